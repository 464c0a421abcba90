"""The memory of reward flow before it starts: what each part and each phase of a step takes on one device.

Takes the options of `trainer.main_reward_flow` and the config files of `model.path` (no weights are read), or the
published shapes of a model. All figures are calculated (`diffusion_shapes`), in bytes, and as text in GiB; `python -m
tests.bench reward_flow_memory` compares them with a measured step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.planner.diffusion_shapes import (
    FP32,
    DecodeMemory,
    StepMemory,
    TransformerShape,
    VaeShape,
    decode_memory,
    step_memory,
    umt5_parameters,
)
from trainer.planner.table import CONTEXT_GIB, FRAGMENTATION, GIB, Phase, part_lines, phase_lines, with_context
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.errors import UserError

ADAM_BYTES = 4 * FP32  # weight, gradient and two moments of what learns
FACE_MODEL_BYTES = 280_000_000  # glintr100 (65 M parameters) and scrfd_10g (4 M), fp32
FACE_BYTES_PER_FRAME = 100_000_000  # activations of an IResNet-100 at 112 x 112, fp32; estimated


@dataclass(frozen=True)
class PipelineShape:
    """The shapes of a pipeline. decoder_parameters: of a decoder that is no AutoencoderKLWan (vae=None)."""

    transformer: TransformerShape
    vae: VaeShape | None
    text_parameters: int
    experts: int
    expand_timesteps: bool
    decoder_parameters: int = 0
    space: int = 8
    time: int = 4
    channels: int = 16


# Published shapes: huggingface/diffusers, scripts/convert_wan_to_diffusers.py (Wan2.2-I2V-14B-720p, Wan2.2-TI2V-5B,
# vae22_diffusers_config); text encoder google/umt5-xxl, config.json. Their counts: 14.29 B for each of two experts and
# 5.00 B; VAEs 127 M and 705 M; text encoder 5.68 B.
UMT5_XXL = {"d_model": 4096, "d_kv": 64, "num_heads": 64, "d_ff": 10240, "num_layers": 24, "vocab_size": 256384}
PUBLISHED = {
    "wan2.2-i2v-a14b": PipelineShape(
        TransformerShape(40, 128, 13824, 40, in_channels=36, out_channels=16),
        VaeShape(),
        umt5_parameters(UMT5_XXL),
        experts=2,
        expand_timesteps=False,
    ),
    "wan2.2-ti2v-5b": PipelineShape(
        TransformerShape(24, 128, 14336, 30, in_channels=48, out_channels=48),
        VaeShape(160, 256, 48, is_residual=True, in_channels=12, out_channels=12, scale_factor_spatial=16),
        umt5_parameters(UMT5_XXL),
        experts=1,
        expand_timesteps=True,
        space=16,
        channels=48,
    ),
}


def read_shape(path: str) -> PipelineShape:
    """The shapes of the pipeline in a folder, from its config files. UserError where one is missing."""
    folder = Path(path).expanduser()
    index = _config(folder / "model_index.json")
    vae = _config(folder / "vae" / "config.json")
    is_wan = vae.get("_class_name") == "AutoencoderKLWan"
    text = _config(folder / "text_encoder" / "config.json")
    transformer = TransformerShape.of(_config(folder / "transformer" / "config.json"))
    tokenizer = folder / "tokenizer" / "tokenizer_config.json"
    longest = _config(tokenizer).get("model_max_length") if tokenizer.is_file() else None
    return PipelineShape(
        transformer=replace(transformer, text_tokens=min(transformer.text_tokens, int(longest or 512))),
        vae=VaeShape.of(vae) if is_wan else None,
        text_parameters=umt5_parameters(text) if "d_kv" in text else _stored_numbers(folder / "text_encoder"),
        experts=2 if (index.get("transformer_2") or [None])[0] else 1,
        expand_timesteps=bool(index.get("expand_timesteps", False)),
        decoder_parameters=0 if is_wan else _stored_numbers(folder / "vae"),
        space=vae.get("scale_factor_spatial", 8),
        time=vae.get("scale_factor_temporal", 4),
        channels=vae.get("z_dim", 16),
    )


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(
            f"model.path: {file} is missing; expected a pipeline in diffusers format, or --like with one of "
            f"{', '.join(PUBLISHED)}"
        )
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _stored_numbers(folder: Path) -> int:
    """How many numbers a folder's safetensors files hold, by their headers; 0 where there is none."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """The memory of a run on one device.

    clip: frames, height, width. always: what is there in every phase. host: on the host, of one rank, in bytes by name.
    """

    clip: tuple[int, int, int]
    tokens: int
    adapter: int
    always: dict[str, float]
    phases: list[Phase]
    host: dict[str, float]

    @property
    def worst(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> float:
        """Bytes of tensors at the worst moment."""
        return sum(self.always.values()) + self.worst.total

    @property
    def device_bytes(self) -> float:
        """What the device has to have: the peak, fragmentation, and the CUDA context."""
        return with_context(self.peak)


def plan(config: RewardFlowConfig, shape: PipelineShape, slots: int, *, size: int = 2) -> Plan:
    """The memory of a train step.

    slots: ranks of the run, all of one node as to host memory. size: bytes of a number in the compute dtype, 2 for bf16
    (CUDA), 4 for fp32 (CPU).
    """
    frames, height, width = clip_size(config)
    latents = ((frames - 1) // shape.time + 1, height // shape.space, width // shape.space)
    tokens = shape.transformer.tokens(latents)
    step = step_memory(
        shape.transformer, tokens, config.model.lora_rank, size, timestep_per_token=shape.expand_timesteps
    )
    decode = _decoding(config, shape, latents, frames * height * width, size)
    samples = config.actor.micro_batch_size_per_gpu
    always, adapter = _always(config, shape, slots, size)
    high, text = (shape.experts - 1) * size * shape.transformer.parameters, size * shape.text_parameters
    brought = config.model.offload_frozen
    numbers = FP32 * math.prod(latents) * shape.channels
    kept = _kept(config, step, decode, shape.transformer.num_layers, numbers)
    kept = {name: samples * value for name, value in kept.items()}
    phases = [
        Phase("prompts", {"text encoder": text * brought}),
        Phase("first frame", {"VAE": samples * (decode.cache + decode.work / 2 + decode.frames)}),
        Phase(
            "steps without gradient",
            {"high-noise expert": high * brought, "block": samples * step.forward_work, "latents": samples * numbers},
        ),
        *_gradient_phases(config, step, decode, shape.transformer.num_layers, kept, frames),
        Phase("optimizer step", {}),
    ]
    host = {"high-noise expert": high, "text encoder": text} if brought else {}
    return Plan((frames, height, width), tokens, adapter, always, phases, {k: v for k, v in host.items() if v})


def clip_size(config: RewardFlowConfig) -> tuple[int, int, int]:
    """Frames, height and width; a square of `data.max_pixels` where no size is given."""
    data = config.data
    multiple = data.side_multiple
    side = int(math.sqrt(data.max_pixels)) // multiple * multiple
    return data.num_frames, data.height or side, data.width or side


def _always(config: RewardFlowConfig, shape: PipelineShape, slots: int, size: int) -> tuple[dict[str, float], int]:
    """What is on the device in every phase, in bytes by name; numbers of the adapter."""
    model, fsdp = config.model, config.actor.fsdp_config
    expert = shape.transformer
    ranks = slots if fsdp.fsdp_size < 1 else min(fsdp.fsdp_size, slots)
    adapter = expert.adapter_parameters(model.lora_rank, model.target_modules)
    rest = expert.parameters - expert.num_layers * expert.block_parameters
    gathered = rest + 2 * expert.block_parameters if fsdp.reshard_after_forward else expert.parameters
    vae = shape.vae.parameters if shape.vae else shape.decoder_parameters
    always = {
        "low-noise expert, this rank's shard": size * expert.parameters / ranks,
        "gathered of it: root and two blocks": float(size * gathered),
        "adapter, gradient, Adam": ADAM_BYTES * adapter / ranks + FP32 * adapter / expert.num_layers,
        "VAE": float(size * vae),
        "reward": float(FACE_MODEL_BYTES * _has_face_models(config)),
    }
    if not model.offload_frozen:
        always |= {
            "high-noise expert": float(size * expert.parameters * (shape.experts - 1)),
            "text encoder": float(size * shape.text_parameters),
        }
    return {name: value for name, value in always.items() if value}, adapter


def _has_face_models(config: RewardFlowConfig) -> bool:
    return any(".onnx" in str(value) for value in config.reward.kwargs.values())


def _decoding(
    config: RewardFlowConfig, shape: PipelineShape, latents: tuple[int, int, int], pixels: int, size: int
) -> DecodeMemory:
    if shape.vae is not None:
        return decode_memory(shape.vae, latents, size)
    frames = 3 * pixels * FP32  # another decoder: taken for one layer of the clip's size
    return DecodeMemory(chunk=2 * frames, cache=0, chunks=2 * frames, caches=0, work=frames, frames=frames)


def _kept(
    config: RewardFlowConfig, step: StepMemory, decode: DecodeMemory, layers: int, numbers: int
) -> dict[str, float]:
    """What forward leaves for backward, of one sample. numbers: bytes of its latents."""
    model, sampler = config.model, config.sampler
    of_step = 3.0 * numbers
    if not model.checkpoint_steps:
        of_step += layers * (step.block_input if model.enable_gradient_checkpointing else step.block) + step.shared
    return {
        "steps' activations": of_step * (sampler.final_timestep - sampler.mid_timestep + 1),
        "decoder's activations": float(decode.caches if model.checkpoint_decode else decode.chunks),
    }


def _gradient_phases(
    config: RewardFlowConfig,
    step: StepMemory,
    decode: DecodeMemory,
    layers: int,
    kept: Mapping[str, float],
    frames: int,
) -> Iterator[Phase]:
    model, samples = config.model, config.actor.micro_batch_size_per_gpu
    of_steps, of_decode = kept.values()
    clip = {"frames": 3.0 * samples * decode.frames}
    yield Phase("steps with gradient", {"kept": of_steps, "block": samples * step.forward_work})
    after = {"kept of the steps": of_steps, "kept of decoding": of_decode}
    yield Phase("decoding", after | clip | {"chunk": samples * decode.work})
    faces = FACE_BYTES_PER_FRAME * frames * _has_face_models(config)
    yield Phase("reward", after | clip | {"one clip's faces": float(faces)})
    yield Phase(
        "backward of decoding",
        after | clip | {"chunk": samples * (decode.chunk * model.checkpoint_decode + 1.5 * decode.work)},
    )
    block = samples * (step.block * model.enable_gradient_checkpointing + step.backward_work)
    inside = layers * (step.block_input if model.enable_gradient_checkpointing else step.block) + step.shared
    again = samples * inside * model.checkpoint_steps
    yield Phase("backward of the steps", {"kept of the steps": of_steps, "one step again": again, "block": block})


# -- as text -----------------------------------------------------------------------------------------------------------


def launch_plan(config: RewardFlowConfig, slots: int, *, size: int = 2) -> str:
    """For the table at launch: what one device has to have, calculated. Empty where config files are missing."""
    try:
        found = plan(config, read_shape(str(config.model.path)), slots, size=size)
    except UserError:
        return ""
    return f"{found.device_bytes / GIB:.0f} GiB (calculated)"


def show(config: RewardFlowConfig, shape: PipelineShape, slots: int, memory_gib: float | None, *, size: int = 2) -> str:
    """The plan as text. memory_gib: of one device; None = not compared."""
    found = plan(config, shape, slots, size=size)
    frames, height, width = found.clip
    expert = shape.transformer
    lines = [
        f"{shape.experts} expert{'s' * (shape.experts > 1)} of {expert.parameters / 1e9:.2f} B parameters, adapter "
        f"{found.adapter / 1e6:.1f} M; clip {frames} x {height} x {width}: {found.tokens} tokens; {slots} device"
        f"{'s' * (slots > 1)}",
        "",
        "always on the device (GiB, calculated)",
        *part_lines(found.always),
        "",
        f"{'beside that, in the phase':<44}{'GiB':>8}",
    ]
    lines += [
        *phase_lines(found.phases, found.worst),
        "",
        f"{'peak of tensors':<44}{found.peak / GIB:8.2f}   in the phase marked *",
        f"{'with context and fragmentation':<44}{found.device_bytes / GIB:8.2f}   {CONTEXT_GIB:g} GiB and "
        f"{FRAGMENTATION:.0%} assumed",
    ]
    if found.host:
        parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in found.host.items())
        lines.append(
            f"{'host memory of each rank, beside the program':<44}{sum(found.host.values()) / GIB:8.2f}   {parts}"
        )
    if memory_gib is not None:
        fits = found.device_bytes <= memory_gib * GIB
        lines += ["", f"{'fits' if fits else 'does not fit'} {memory_gib:g} GiB"]
    return "\n".join(lines)
