"""Small image-to-video pipelines of both layouts in diffusers' own classes, and what a worker needs to run one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from verl_lite.config import FSDPConfig, MixedPrecisionConfig, OptimConfig, WrapPolicyConfig
from verl_lite.config.diffusion import (
    DiffusionModelConfig,
    FlowActorConfig,
    FlowRewardConfig,
    FlowSamplerConfig,
    FlowTrainerConfig,
    RewardFlowConfig,
)
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import plan_batch
from verl_lite.visual_rewards.base import VisualScore

FRAMES, SIDE, TEXT = 5, 16, 16
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
WORDS = "a red blue face smiles"


class ColourCodec(nn.Module):
    """A fixed random decoder that lets its input be felt (a random AutoencoderKLWan hardly does): 4 latent channels,
    8 x 8 pixels each; a latent frame after the first stands for four."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)  # (4, 3, 8, 8)
        channels = len(weight)
        self.config = SimpleNamespace(
            z_dim=channels, scale_factor_temporal=4, scale_factor_spatial=8,
            latents_mean=[0.1] * channels, latents_std=[0.5] * channels,
        )  # fmt: skip

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def encode_video(self, video: torch.Tensor) -> torch.Tensor:
        pooled = torch.einsum("bcfhiwj,zcij->bzfhw", video.unflatten(3, (-1, 8)).unflatten(5, (-1, 8)), self.weight) / 8
        rest = pooled[:, :, 1:].unflatten(2, (-1, 4)).mean(3) if pooled.shape[2] > 1 else pooled[:, :, :0]
        return torch.cat([pooled[:, :, :1], rest], 2)

    def decode(self, latents: torch.Tensor, return_dict: bool = True) -> Any:
        pixels = torch.einsum("bzfhw,zcij->bcfhiwj", latents, self.weight).flatten(3, 4).flatten(4, 5)
        times = torch.tensor([1] + [4] * (pixels.shape[2] - 1), device=pixels.device)
        return (pixels.repeat_interleave(times, 2).tanh(),)

    @classmethod
    def from_pretrained(cls, folder: str) -> ColourCodec:
        return cls(torch.load(Path(folder) / "weight.pt"))


class MeanColourReward:
    """The frames' mean red minus their mean blue, frame 0 left out. A clip whose reference is black does not count."""

    def prepare(self, reference_frames: torch.Tensor) -> bool:
        if float(reference_frames.min()) > 0.99:
            raise ValueError("all of it is white")
        return bool(reference_frames.max() > 0)

    def score(self, frames: torch.Tensor, reference: bool) -> VisualScore:
        if not reference:
            return VisualScore(torch.zeros(()), counted=False)
        return VisualScore(frames[1:, 0].mean() - frames[1:, 2].mean())

    def to(self, device: Any) -> MeanColourReward:
        return self


def tiny_pipeline(folder: Path, layout: str = "i2v", vae: str = "colour", layers: int = 2) -> str:
    """layout: i2v (two experts) | ti2v (one, expanded timesteps). vae: colour | wan (AutoencoderKLWan)."""
    import diffusers

    from recipes.reward_flow.world import tiny_text_encoder, tiny_tokenizer

    torch.manual_seed(0)
    latent = 4 if vae == "colour" else 16
    channels = 2 * latent + 4 if layout == "i2v" else latent
    experts = [
        diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=channels,
            out_channels=latent, text_dim=TEXT, freq_dim=32, ffn_dim=32, num_layers=layers, cross_attn_norm=True,
            qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
        )
        for _ in range(2 if layout == "i2v" else 1)
    ]  # fmt: skip
    autoencoder = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    pipeline = diffusers.WanImageToVideoPipeline(
        tokenizer=tiny_tokenizer(WORDS, longest=6),
        text_encoder=tiny_text_encoder(TEXT),
        vae=autoencoder,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=experts[0],
        transformer_2=experts[1] if layout == "i2v" else None,
        boundary_ratio=0.9 if layout == "i2v" else None,
        expand_timesteps=layout == "ti2v",
    )
    pipeline.save_pretrained(folder)
    if vae == "colour":
        index = json.loads((folder / "model_index.json").read_text())
        index["vae"] = [ColourCodec.__module__, "ColourCodec"]
        (folder / "model_index.json").write_text(json.dumps(index))
        torch.save(torch.randn(4, 3, 8, 8) * 0.5, folder / "vae" / "weight.pt")
    return str(folder)


def flow_config(path: str, **options: Any) -> RewardFlowConfig:
    """A small run's settings. options: of `FlowSamplerConfig`, `DiffusionModelConfig` and `FlowActorConfig`, by name;
    min_num_params, reshard_after_forward and param_dtype of the sharding, lr and eps of the optimizer."""
    sampler = {name: options.pop(name) for name in list(options) if name in vars(FlowSamplerConfig())}
    model = {name: options.pop(name) for name in list(options) if name in vars(DiffusionModelConfig())}
    sharding = FSDPConfig(
        wrap_policy=WrapPolicyConfig(min_num_params=options.pop("min_num_params", 0)),
        reshard_after_forward=options.pop("reshard_after_forward", True),
        mixed_precision=MixedPrecisionConfig(param_dtype=options.pop("param_dtype", "auto")),
    )
    optim = OptimConfig(lr=options.pop("lr", 1e-2), weight_decay=0.0, eps=options.pop("eps", 1e-3), lr_warmup_steps=2)
    return RewardFlowConfig(
        model=DiffusionModelConfig(
            path=path, **({"lora_rank": 4, "lora_alpha": 8, "target_modules": TARGETS, **NO_CHECKPOINTS} | model)
        ),
        sampler=FlowSamplerConfig(**(STEPS | sampler)),
        reward=FlowRewardConfig(name=f"{MeanColourReward.__module__}:MeanColourReward"),
        actor=FlowActorConfig(optim=optim, fsdp_config=sharding, **options),
        trainer=FlowTrainerConfig(device="cpu", seed=3),
    )


STEPS = {"num_inference_steps": 4, "mid_timestep": 2, "final_timestep": 3}
"""Timesteps 1000 and 937.5 are the high-noise expert's, 833 and 625 learn."""

NO_CHECKPOINTS = {"enable_gradient_checkpointing": False, "checkpoint_steps": False, "checkpoint_decode": False}
ALL_CHECKPOINTS = dict.fromkeys(NO_CHECKPOINTS, True)


def clips(rows: int, without_face: tuple[int, ...] = ()) -> DataProto:
    """Random clips; those named are black, which `MeanColourReward` does not count."""
    generator = torch.Generator().manual_seed(1)
    video = torch.rand(rows, FRAMES, 3, SIDE, SIDE, generator=generator) * 0.9 + 0.05
    for row in without_face:
        video[row] = 0
    prompts = np.array([" ".join(WORDS.split()[: 3 + row % 3]) for row in range(rows)], dtype=object)
    columns = {"video": video, "noise_seed": torch.arange(100, 100 + rows), "row": torch.arange(rows)}
    return DataProto.from_dict(columns, {"prompt": prompts}, {"global_step": 1})


def planned(data: DataProto, world: int, micro_batch_size: int) -> list[DataProto]:
    """The parts of each rank, as the driver's dispatch sends them."""
    ones = np.ones(len(data), dtype=np.int64)
    plan = plan_batch(ones, world_size=world, mini_batch_size=None, max_token_len=micro_batch_size, num_tokens=ones)
    return plan.apply(data).chunk(world)
