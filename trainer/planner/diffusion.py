"""The memory of reward flow before it starts: what each part and each phase of a step takes on one device.

Takes the options of `trainer.main_reward_flow` and the config files of `model.path` (no weights are read), or those of
a published model. Numbers come from the modules themselves on the meta device (diffusers' WanTransformer3DModel with
its adapter and AutoencoderKLWan, transformers' UMT5EncoderModel): what their backward passes keep is what autograd
saves there. `python -m tests.bench reward_flow_memory` compares the plan with a measured step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from trainer.planner.memory import GIB, MemoryPlan, Phase
from verl_lite.config.diffusion import DiffusionModelConfig, RewardFlowConfig
from verl_lite.errors import UserError
from workers.diffusion.lora import add_adapter

FP32 = 4
ADAM_BYTES = 4 * FP32  # weight, gradient and two moments of what learns
FACE_MODEL_BYTES = 280_000_000  # glintr100 (65 M parameters) and scrfd_10g (4 M), fp32
FACE_BYTES_PER_FRAME = 100_000_000  # activations of an IResNet-100 at 112 x 112, fp32; estimated


@dataclass(frozen=True, eq=False)
class PipelineShape:
    """Config files of a pipeline. vae: None for a decoder that is no AutoencoderKLWan; decoder_parameters: its numbers.
    text_parameters: numbers of a text encoder that is no UMT5."""

    transformer: Mapping[str, Any]
    vae: Mapping[str, Any] | None
    text: Mapping[str, Any] | None
    experts: int
    expand_timesteps: bool
    text_tokens: int = 512
    text_parameters: int = 0
    decoder_parameters: int = 0
    space: int = 8
    time: int = 4
    channels: int = 16

    def network(self, layers: int) -> Any:
        """The transformer with so many blocks, on the meta device."""
        from diffusers import WanTransformer3DModel

        with torch.device("meta"):
            return WanTransformer3DModel.from_config({**self.transformer, "num_layers": layers})

    @cached_property
    def decoder(self) -> Any:
        """The VAE on the meta device, frozen."""
        from diffusers import AutoencoderKLWan

        ends = {"latents_mean": [0.0] * self.channels, "latents_std": [1.0] * self.channels}
        with torch.device("meta"):
            return AutoencoderKLWan.from_config({**(self.vae or {}), **ends}).requires_grad_(False)

    @cached_property
    def frozen_parameters(self) -> tuple[int, int]:
        """(of the VAE, of the text encoder)."""
        from transformers import UMT5Config, UMT5EncoderModel

        with torch.device("meta"):
            text = None if self.text is None else UMT5EncoderModel(UMT5Config(**self.text))
        return (
            self.decoder_parameters if self.vae is None else _count(self.decoder),
            self.text_parameters if text is None else _count(text),
        )


# huggingface/diffusers, scripts/convert_wan_to_diffusers.py (Wan2.2-I2V-14B-720p, Wan2.2-TI2V-5B,
# vae22_diffusers_config); google/umt5-xxl, config.json
UMT5_XXL: dict[str, Any] = {"d_model": 4096, "d_kv": 64, "num_heads": 64, "d_ff": 10240, "num_layers": 24}
UMT5_XXL |= {"vocab_size": 256384, "feed_forward_proj": "gated-gelu"}
_WAN = {"attention_head_dim": 128, "text_dim": 4096}
_A14B = _WAN | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40, "in_channels": 36, "out_channels": 16}
_5B = _WAN | {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48}
_VAE22 = {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "patch_size": 2}
_VAE22 |= {"in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
PUBLISHED = {
    "wan2.2-i2v-a14b": PipelineShape(_A14B, {}, UMT5_XXL, experts=2, expand_timesteps=False),
    "wan2.2-ti2v-5b": PipelineShape(_5B, _VAE22, UMT5_XXL, experts=1, expand_timesteps=True, space=16, channels=48),
}


def read_shape(path: str) -> PipelineShape:
    """The config files of the pipeline in a folder. UserError where one is missing."""
    folder = Path(path).expanduser()
    index, vae = _config(folder / "model_index.json"), _config(folder / "vae" / "config.json")
    text, is_wan = _config(folder / "text_encoder" / "config.json"), vae.get("_class_name") == "AutoencoderKLWan"
    tokenizer = folder / "tokenizer" / "tokenizer_config.json"
    longest = _config(tokenizer).get("model_max_length") if tokenizer.is_file() else None
    is_umt5 = "d_kv" in text
    return PipelineShape(
        transformer=_config(folder / "transformer" / "config.json"),
        vae=vae if is_wan else None,
        text=text if is_umt5 else None,
        experts=2 if (index.get("transformer_2") or [None])[0] else 1,
        expand_timesteps=bool(index.get("expand_timesteps", False)),
        text_tokens=min(512, int(longest or 512)),
        text_parameters=0 if is_umt5 else _stored_numbers(folder / "text_encoder"),
        decoder_parameters=0 if is_wan else _stored_numbers(folder / "vae"),
        space=vae.get("scale_factor_spatial", 8),
        time=vae.get("scale_factor_temporal", 4),
        channels=vae.get("z_dim", 16),
    )


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        known = ", ".join(PUBLISHED)
        raise UserError(f"model.path: {file} is missing; expected a pipeline in diffusers format, or --like {known}")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def _stored_numbers(folder: Path) -> int:
    """How many numbers a folder's safetensors files hold, by their headers; 0 where there is none."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


# -- on the meta device ------------------------------------------------------------------------------------------------


class _OnCuda(TorchFunctionMode):
    """Attention and RMS norm keep what their CUDA kernels keep: on the meta device PyTorch takes them apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            query, key, value = args or (kwargs[name] for name in ("query", "key", "value"))
            return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, False)[0]
        return _FusedNorm.apply(args[0]) if func is F.rms_norm else func(*args, **(kwargs or {}))


class _FusedNorm(torch.autograd.Function):
    """Keeps its input as it came."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError


def _saved_bytes(run: Callable[[], Any]) -> int:
    """Bytes of the storages that autograd keeps for the backward pass of `run`, weights left out."""
    storages: dict[int, torch.Tensor] = {}  # which stay, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storages[tensor.untyped_storage()._cdata] = tensor.detach()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor), _OnCuda():
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def _count(module: nn.Module, *, learns: bool = False) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not learns)


@dataclass(frozen=True)
class Expert:
    """A transformer and one denoising step of one sample.

    parameters, block_parameters: of all of it, and of a block, which FSDP gathers at one time. adapter: its numbers.
    block_input: bytes that a checkpoint around a block keeps. block: that a block's backward pass needs. shared: kept
    once a step for all blocks. forward_work, backward_work: what comes and goes inside a block, beside those.
    """

    layers: int
    parameters: int
    block_parameters: int
    adapter: int
    tokens: int
    block_input: int
    block: int
    shared: int
    forward_work: int
    backward_work: int


@lru_cache
def expert_memory(
    shape: PipelineShape, latents: tuple[int, int, int], rank: int, targets: tuple[str, ...], size: int
) -> Expert:
    """Of latents (T, h, w), in a dtype of `size` bytes: networks of one and of three blocks, whose difference is two.

    rank, targets: of the adapter, which computes in its input's dtype.
    """
    dtype, found = torch.float32 if size == FP32 else torch.bfloat16, []
    for layers in (1, 3):
        network = nn.Module.to(shape.network(layers), dtype)  # not its own, which warns
        config, whole = network.config, _count(network)
        tokens = math.prod(length // patch for length, patch in zip(latents, config.patch_size, strict=True))
        add_adapter(network, DiffusionModelConfig(lora_rank=rank, target_modules=list(targets)))
        with torch.device("meta"):
            x = torch.empty(1, config.in_channels, *latents, dtype=dtype, requires_grad=True)
            timestep = torch.empty((1, tokens) if shape.expand_timesteps else (1,))
            text = torch.empty(1, shape.text_tokens, config.text_dim, dtype=dtype)
        found.append((whole, _count(network, learns=True), _saved_bytes(lambda: network(x, timestep, text))))  # noqa: B023
    one, three = found
    block_parameters, adapter, block = ((b - a) // 2 for a, b in zip(one, three, strict=True))
    layers = int(shape.transformer["num_layers"])
    wide, inner = tokens * config.num_attention_heads * config.attention_head_dim, tokens * config.ffn_dim
    modulation = 24 * wide * shape.expand_timesteps  # in the layout of TI2V a tensor of all tokens
    return Expert(
        layers,
        parameters=one[0] + (layers - 1) * block_parameters,
        block_parameters=block_parameters,
        adapter=one[1] + (layers - 1) * adapter,
        tokens=tokens,
        block_input=size * wide,
        block=block,
        shared=max(0, one[2] - block),
        forward_work=(2 * FP32 + size) * inner + (4 if size == FP32 else 6) * size * wide + modulation,
        backward_work=(3 * FP32 if size == FP32 else 2 * FP32) * inner,
    )


@dataclass(frozen=True)
class Decoding:
    """Bytes of decoding one sample. chunk: that the backward pass of one chunk needs. cache: what one chunk hands to
    the next. chunks, caches: of all chunks. work: what comes and goes inside a chunk. frames: the clip."""

    chunk: float
    cache: float
    chunks: float
    caches: float
    work: float
    frames: float


@lru_cache
def decode_memory(shape: PipelineShape, latents: tuple[int, int, int], size: int) -> Decoding:
    """Of latents (T, h, w)."""
    time, height, width = latents
    frames = float(FP32 * 3 * ((time - 1) * shape.time + 1) * height * width * shape.space**2)
    if shape.vae is None:  # another decoder: taken for one layer of the clip's size
        return Decoding(chunk=2 * frames, cache=0, chunks=2 * frames, caches=0, work=frames, frames=frames)
    dtype = torch.float32 if size == FP32 else torch.bfloat16
    vae, inputs, caches, saved = nn.Module.to(shape.decoder, dtype), [0], [0], []

    def clear() -> None:
        kept = [tensor for tensor in getattr(vae, "_feat_map", ()) if isinstance(tensor, torch.Tensor)]
        caches.append(sum(tensor.nbytes for tensor in kept))
        type(vae).clear_cache(vae)

    hooks = [
        module.register_forward_pre_hook(lambda _, given: inputs.append(given[0].numel()))
        for module in vae.decoder.modules()
        if not any(True for _ in module.children())
    ]
    vae.clear_cache = clear
    for length in (2, 3):
        z = torch.empty((1, shape.channels, length, height, width), dtype=dtype, device="meta", requires_grad=True)
        saved.append(_saved_bytes(lambda: vae.decode(z)))  # noqa: B023
    for hook in hooks:
        hook.remove()
    chunk = saved[1] - saved[0]
    return Decoding(
        chunk=chunk,
        cache=max(caches),
        chunks=saved[0] + (time - 2) * chunk,
        caches=max(0.0, time - 1.5) * max(caches),  # the first hands on one frame in place of two
        work=max(inputs) * (FP32 + 2 * size),
        frames=frames,
    )


# -- the plan ----------------------------------------------------------------------------------------------------------


def clip_of(config: RewardFlowConfig, shape: PipelineShape) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(frames, height, width) and those of its latents; a square of `data.max_pixels` where no size is given."""
    data = config.data
    side = int(math.sqrt(data.max_pixels)) // data.side_multiple * data.side_multiple
    height, width = data.height or side, data.width or side
    latents = (data.num_frames - 1) // shape.time + 1, height // shape.space, width // shape.space
    return (data.num_frames, height, width), latents


def expert_of(config: RewardFlowConfig, shape: PipelineShape, size: int) -> Expert:
    """The expert that learns, in this run."""
    model = config.model
    return expert_memory(shape, clip_of(config, shape)[1], model.lora_rank, tuple(model.target_modules), size)


def plan(config: RewardFlowConfig, shape: PipelineShape, slots: int, *, size: int = 2) -> MemoryPlan:
    """The memory of a train step.

    slots: ranks of the run, all of one node as to host memory. size: bytes of a number in the compute dtype, 2 for bf16
    (CUDA), 4 for fp32 (CPU).
    """
    model, fsdp, sampler = config.model, config.actor.fsdp_config, config.sampler
    clip, latents = clip_of(config, shape)
    expert = expert_of(config, shape, size)
    decode = decode_memory(shape, latents, size)
    vae, text = (float(size * count) for count in shape.frozen_parameters)
    samples, blocks = config.actor.micro_batch_size_per_gpu, model.enable_gradient_checkpointing
    numbers = FP32 * math.prod(latents) * shape.channels
    inside = expert.layers * (expert.block_input if blocks else expert.block) + expert.shared
    has_faces = any(".onnx" in str(value) for value in config.reward.kwargs.values())
    ranks = slots if fsdp.fsdp_size < 1 else min(fsdp.fsdp_size, slots)
    rest = expert.parameters - expert.layers * expert.block_parameters
    gathered = rest + 2 * expert.block_parameters if fsdp.reshard_after_forward else expert.parameters
    frozen = {"high-noise expert": float((shape.experts - 1) * size * expert.parameters), "text encoder": text}
    always = {
        "low-noise expert, this rank's shard": size * expert.parameters / ranks,
        "gathered of it: root and two blocks": float(size * gathered),
        "adapter, gradient, Adam": ADAM_BYTES * expert.adapter / ranks + FP32 * expert.adapter / expert.layers,
        "VAE": vae,
        "reward": float(FACE_MODEL_BYTES * has_faces),
        **({} if model.offload_frozen else frozen),
    }
    brought = frozen if model.offload_frozen else dict.fromkeys(frozen, 0.0)
    of_steps = samples * (3.0 * numbers + inside * (not model.checkpoint_steps))
    of_steps *= sampler.final_timestep - sampler.mid_timestep + 1
    of_decode = samples * (decode.caches if model.checkpoint_decode else decode.chunks)
    clips = {"kept of the steps": of_steps, "kept of decoding": of_decode, "frames": 3.0 * samples * decode.frames}
    forward, backward = samples * expert.forward_work, samples * (expert.block * blocks + expert.backward_work)
    again = decode.chunk * model.checkpoint_decode + 1.5 * decode.work
    latent = {"block": forward, "latents": float(samples * numbers)}
    phases = {
        "prompts": {"text encoder": brought["text encoder"]},
        "first frame": {"VAE": samples * (decode.cache + decode.work / 2 + decode.frames)},
        "steps without gradient": {"high-noise expert": brought["high-noise expert"], **latent},
        "steps with gradient": {"kept": of_steps, "block": forward},
        "decoding": {**clips, "chunk": samples * decode.work},
        "reward": {**clips, "one clip's faces": float(FACE_BYTES_PER_FRAME * clip[0] * has_faces)},
        "backward of decoding": {**clips, "chunk": float(samples * again)},
        "backward of the steps": {
            "kept of the steps": of_steps,
            "one step again": float(samples * inside * model.checkpoint_steps),
            "block": float(backward),
        },
        "optimizer step": {},
    }
    host = {name: value for name, value in brought.items() if value}
    always = {name: value for name, value in always.items() if value}
    return MemoryPlan(always, [Phase(name, parts) for name, parts in phases.items()], host=host)


def launch_plan(config: RewardFlowConfig, slots: int, *, size: int = 2) -> str:
    """For the table at launch: what one device has to have, calculated. Empty where config files are missing."""
    try:
        found = plan(config, read_shape(str(config.model.path)), slots, size=size)
    except UserError:
        return ""
    return f"{found.device_bytes / GIB:.0f} GiB (calculated)"
