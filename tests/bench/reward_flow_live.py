"""One row of the benchmark `reward_flow_memory`: a worker, a train step, and the bytes of tensors alive in it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bench.frame import reset_high_water, status_bytes
from tests.workers.diffusion.tiny_wan import flow_config, planned
from trainer.planner.diffusion_memory import FP32, LiveBytes, plan, read_shape
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.protocol import DataProto
from workers.diffusion.reward_flow_worker import RewardFlowWorker

STEPS, BLOCKS, DECODE = "checkpoint_steps", "enable_gradient_checkpointing", "checkpoint_decode"
OPTIONS: dict[str, tuple[str, ...]] = {
    "all off": (),
    "checkpoint_steps": (STEPS,),
    "gradient checkpointing in blocks": (BLOCKS,),
    "checkpoint_decode": (DECODE,),
    "blocks, decode": (BLOCKS, DECODE),
    "steps, blocks, decode (the default)": (STEPS, BLOCKS, DECODE),
}


@dataclass
class Measured:
    """live: bytes of tensors at the peak of a step, beside weights and Adam. planned: the same by the planner. rss:
    growth of resident memory at its highest, bytes. seconds: processor time of a step."""

    live: int
    planned: float
    rss: int
    seconds: float


def wan_pipeline(folder: Path, layers: int = 8, channels: int = 16) -> str:
    """A pipeline whose activations are large beside its weights. channels: of the VAE's largest layers."""
    if (folder / "model_index.json").is_file():
        return str(folder)
    import diffusers

    from recipes.reward_flow.world import tiny_text_encoder, tiny_tokenizer
    from tests.workers.diffusion.tiny_wan import TEXT, WORDS

    torch.manual_seed(0)
    experts = [
        diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=6, attention_head_dim=32, in_channels=36, out_channels=16,
            text_dim=TEXT, freq_dim=32, ffn_dim=768, num_layers=layers, cross_attn_norm=True,
            qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
        )
        for _ in range(2)
    ]  # fmt: skip
    pipeline: Any = diffusers.WanImageToVideoPipeline(
        tokenizer=tiny_tokenizer(WORDS, longest=6),
        text_encoder=tiny_text_encoder(TEXT),
        vae=diffusers.AutoencoderKLWan(base_dim=channels),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=experts[0],
        transformer_2=experts[1],
        boundary_ratio=0.9,
    )
    pipeline.save_pretrained(folder)
    return str(folder)


def configured(path: str, frames: int, side: int, names: tuple[str, ...]) -> RewardFlowConfig:
    """A run with these options of `model` on. Its expert is one FSDP group: `LiveBytes` does not see that FSDP empties
    the storages of gathered weights."""
    config = flow_config(path, lora_rank=8, min_num_params=10**9, **dict.fromkeys(names, True))
    config.data.num_frames, config.data.height, config.data.width = frames, side, side
    return config


def measure(config: RewardFlowConfig, *, warm_up: bool = True) -> Measured:
    """Three steps of a worker: one to warm up, one timed, one followed; without `warm_up` one, timed and followed."""
    torch.set_num_threads(1)
    worker = RewardFlowWorker(config, 10)
    worker.init_model()
    data = planned(one_clip(config), 1, 1)[0]
    reset_high_water()
    before = status_bytes("VmRSS")
    if warm_up:
        worker.train_step(data)
    started = time.process_time()
    if warm_up:
        worker.train_step(data)
    seconds, rss = time.process_time() - started, status_bytes("VmHWM") - before
    live = LiveBytes()
    with live:
        worker.train_step(data)
    found = plan(config, read_shape(str(config.model.path)), 1, size=FP32)
    beside = sum(found.phases[found.worst].values())
    gathered = 0.0 if warm_up else found.always["gathered: root and two blocks"]  # FSDP keeps these storages
    return Measured(live.peak, beside + gathered, rss, seconds)


def one_clip(config: RewardFlowConfig) -> DataProto:
    data = config.data
    size = (1, data.num_frames, 3, data.height or 0, data.width or 0)
    video = torch.rand(size, generator=torch.Generator().manual_seed(1))
    columns = {"video": video, "noise_seed": torch.tensor([7]), "row": torch.tensor([0])}
    return DataProto.from_dict(columns, {"prompt": np.array(["a red face"], dtype=object)}, {"global_step": 1})
