"""Predicts the memory of a reward-flow run on one device, for each module and each phase of a step.

Inputs are the options of `trainer.main_reward_flow` and the config files in `model.path` (no weights are read) or those
of a published model. The training code (`workers.diffusion.reward_policy`) runs a step on the meta device: tensors
have shapes but no data. The plan counts the bytes of all tensors that are alive at the same time. `python -m
tests.bench reward_flow_memory` compares the plan with a measured step.
"""

import json
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trainer.planner.memory_table import GIB, MemoryPlan
from trainer.planner.networks import FP32, MOMENTS, ranks_of_a_copy
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.errors import UserError
from workers.diffusion.lora import add_adapter
from workers.diffusion.pipeline import LONGEST_PROMPT, DiffusionParts, LatentCodec, component_class
from workers.diffusion.reward_policy import FlowInputs, RewardFlowPolicy

FACE_MODEL_BYTES = 280_000_000  # glintr100 (65 M parameters) and scrfd_10g (4 M), fp32
FACE_BYTES_PER_FRAME = 100_000_000  # activations of an IResNet-100 at 112 x 112, fp32; estimated

Size = tuple[int, int, int]
"""(frames, height, width)."""

# huggingface/diffusers, scripts/convert_wan_to_diffusers.py (Wan2.2-I2V-14B-720p, Wan2.2-TI2V-5B,
# vae22_diffusers_config); google/umt5-xxl, config.json
UMT5_XXL: dict[str, Any] = {"d_model": 4096, "d_kv": 64, "num_heads": 64, "d_ff": 10240, "num_layers": 24}
UMT5_XXL |= {"vocab_size": 256384, "feed_forward_proj": "gated-gelu"}
_WAN = {"attention_head_dim": 128, "text_dim": 4096}
_A14B = _WAN | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40, "in_channels": 36, "out_channels": 16}
_5B = _WAN | {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48}
_VAE22: dict[str, Any] = {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "patch_size": 2}
_VAE22 |= {"in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
_VAE22 |= {"latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
_INDEX = {"vae": ["diffusers", "AutoencoderKLWan"], "text_encoder": ["transformers", "UMT5EncoderModel"]}
_TWO: dict[str, Any] = {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.9}
PUBLISHED: dict[str, dict[str, Any]] = {  # contents of the config files of a model's folder
    "wan2.2-i2v-a14b": {"model_index": _INDEX | _TWO, "transformer": _A14B, "vae": {}, "text_encoder": UMT5_XXL},
    "wan2.2-ti2v-5b": {
        "model_index": _INDEX | {"expand_timesteps": True},
        "transformer": _5B,
        "vae": _VAE22,
        "text_encoder": UMT5_XXL,
    },
}


@dataclass(frozen=True, eq=False)
class PipelineShape:
    """Shapes of a pipeline. transformer: its config. vae, text_encoder: frozen modules on the meta device."""

    transformer: dict[str, Any]
    vae: Any
    text_encoder: Any
    experts: int
    expand_timesteps: bool
    text_tokens: int
    boundary_ratio: float | None


@lru_cache
def published_shape(name: str) -> PipelineShape:
    """Returns the shape of a model in `PUBLISHED`."""
    return _shape(PUBLISHED[name])


def read_shape(path: str) -> PipelineShape:
    """Reads the shape of the pipeline in a folder from its config files. Raises UserError if one is missing."""
    folder = Path(path).expanduser()
    files = {name: folder / name / "config.json" for name in ("transformer", "vae", "text_encoder")}
    files["model_index"] = folder / "model_index.json"
    if (file := folder / "tokenizer" / "tokenizer_config.json").is_file():
        files["tokenizer"] = file
    if missing := [str(file) for file in files.values() if not file.is_file()]:
        known = ", ".join(PUBLISHED)
        raise UserError(
            f"model.path: {missing[0]} is missing; expected a pipeline in diffusers format, or --like {known}"
        )
    return _shape({name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()})


def _shape(files: dict[str, Any]) -> PipelineShape:
    index = files["model_index"]
    return PipelineShape(
        transformer=files["transformer"],
        vae=_on_meta("vae", index["vae"], files["vae"]),
        text_encoder=_on_meta("text_encoder", index["text_encoder"], files["text_encoder"]),
        experts=2 if (index.get("transformer_2") or [None])[0] else 1,
        expand_timesteps=bool(index.get("expand_timesteps", False)),
        boundary_ratio=index.get("boundary_ratio"),
        text_tokens=min(LONGEST_PROMPT, int(files.get("tokenizer", {}).get("model_max_length") or LONGEST_PROMPT)),
    )


def _on_meta(name: str, entry: list[str], config: dict[str, Any]) -> Any:
    """Builds a component of diffusers or transformers on the meta device from its config."""
    kind = component_class(name, entry)
    if not hasattr(kind, "from_config") and not hasattr(kind, "config_class"):
        raise UserError(f"model.path: cannot plan the memory of {name}: {'.'.join(entry)} has no from_config")
    with torch.device("meta"):
        made = kind.from_config(config) if hasattr(kind, "from_config") else kind(kind.config_class(**config))
    return made.requires_grad_(False)


def count(module: nn.Module, *, learns: bool = False) -> int:
    """Returns the number of a module's parameter elements, or with learns=True of its trainable ones."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not learns)


# -- a step on the meta device -----------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages that operations inside the context allocate: current (`now`) and `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in given | self._known:
                storage = tensor.untyped_storage()
                size, key = storage.nbytes(), _storage(tensor)
                self._known.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._remove, key, size)
        return result

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    @contextmanager
    def peak_of(self, peaks: dict[str, float], name: str) -> Iterator[None]:
        """Stores the peak of live bytes inside the context as peaks[name]."""
        self.peak = self.now
        with self, _fused_kernels():
            yield
        peaks[name] = float(self.peak)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _fused_kernels() -> Iterator[None]:
    """Makes attention and RMS norm save the same tensors for backward as their fused kernels on a GPU.

    On the meta device PyTorch decomposes both into operations that save more.
    """

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, False)[0]

    def norm(x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None) -> torch.Tensor:
        return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]

    plain = F.scaled_dot_product_attention, F.rms_norm
    F.scaled_dot_product_attention, F.rms_norm = attention, norm  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.rms_norm = plain


def policy_of(config: RewardFlowConfig, shape: PipelineShape, dtype: torch.dtype, layers: int) -> RewardFlowPolicy:
    """Builds the trained network on the meta device. layers: number of blocks per transformer."""
    entry, transformer = ["diffusers", "WanTransformer3DModel"], {**shape.transformer, "num_layers": layers}
    experts = [_on_meta("transformer", entry, transformer) for _ in range(shape.experts)]
    for module in (*experts, shape.vae):
        nn.Module.to(module, dtype)  # diffusers' own `to` would log a warning
    expert = experts[-1]
    add_adapter(expert, config.model)
    if config.model.enable_gradient_checkpointing:
        expert.enable_gradient_checkpointing()
    parts = DiffusionParts(
        low_noise=expert,
        high_noise=experts[0] if shape.experts > 1 else None,
        codec=LatentCodec(shape.vae),
        text_encoder=shape.text_encoder,
        tokenizer=SimpleNamespace(model_max_length=shape.text_tokens),
        boundary_ratio=config.model.boundary_ratio or shape.boundary_ratio,
        expand_timesteps=shape.expand_timesteps,
    )
    reward: Any = SimpleNamespace(to=lambda device: None)  # a reward without weights; `plan` adds their bytes
    placed = replace(config, model=replace(config.model, offload_frozen=False))  # `plan` counts offloaded modules
    return RewardFlowPolicy(parts, reward, placed, torch.device("meta")).train()


def clip_of(config: RewardFlowConfig) -> tuple[int, int, int]:
    """Returns the clip's (frames, height, width); a square of `data.max_pixels` if no size is configured."""
    data = config.data
    side = int(math.sqrt(data.max_pixels)) // data.side_multiple * data.side_multiple
    return data.num_frames, data.height or side, data.width or side


def bytes_of_coding(policy: RewardFlowPolicy, video: torch.Tensor) -> tuple[dict[str, float], torch.Tensor]:
    """Returns the peak of live bytes in each phase of encoding, decoding and reward, and `FlowInputs.condition`.

    The peaks do not include tensors that the denoising steps keep.
    """
    peaks: dict[str, float] = {}
    live, frames, (height, width) = LiveBytes(), video.shape[1], video.shape[3:]
    with torch.no_grad(), live.peak_of(peaks, "first frame"):
        condition = policy._condition(video)
    latents = torch.empty(len(video), *policy.codec.latent_shape(frames, height, width), device="meta")
    with (live := LiveBytes()).peak_of(peaks, "decoding"):
        loss = policy.decode(latents.requires_grad_()).mean()
    peaks["reward"] = float(live.now)
    with live.peak_of(peaks, "backward of decoding"):
        loss.backward()
    return peaks, condition


def bytes_of_steps(
    policy: RewardFlowPolicy, video: torch.Tensor, condition: torch.Tensor, tokens: int
) -> dict[str, float]:
    """Returns the peak of live bytes in each phase of the denoising steps.

    The key `kept` holds the bytes that the steps keep for the backward pass, `learn` the number of trainable elements
    of the expert, and `numbers` that of its frozen ones.
    """
    frames, (height, width), model = video.shape[1], video.shape[3:], policy.model
    with torch.device("meta"):
        noise = torch.empty(len(video), *policy.codec.latent_shape(frames, height, width))
        prompts = torch.empty(len(video), tokens, model.config.text_dim)
    inputs = FlowInputs(noise, condition, prompts, [], torch.empty(0), len(video), is_counting=True)
    live, learn = LiveBytes(), count(model, learns=True)
    peaks = {"numbers": float(count(model) - learn), "learn": float(learn), "high-noise steps": 0.0}
    if (other := policy._high_noise[0]) is not None:
        with torch.no_grad(), live.peak_of(peaks, "high-noise steps"):
            policy._velocity(other, inputs)(noise, 1.0)
    with live.peak_of(peaks, "steps"):
        latents, divergence = policy._sample(inputs, True)
    peaks["kept"] = float(live.now)
    with live.peak_of(peaks, "backward of the steps"):
        (latents.mean() + divergence.mean()).backward()
    return peaks


def plan(config: RewardFlowConfig, shape: PipelineShape, slots: int, *, size: int = 2) -> MemoryPlan:
    """Predicts the memory of a train step by extrapolation from transformers with two and with three blocks.

    Args:
        slots: ranks of the run; the host memory is computed as if all of them were on one node.
        size: bytes of an element in the compute dtype: 2 for bf16 (CUDA), 4 for fp32 (CPU).
    """
    dtype = torch.float32 if size == FP32 else torch.bfloat16
    frames, height, width = clip_of(config)
    video = torch.empty(config.actor.micro_batch_size_per_gpu, frames, 3, height, width, device="meta")
    policies = [policy_of(config, shape, dtype, layers) for layers in (2, 3)]
    coding, condition = bytes_of_coding(policies[0], video)
    two, three = (bytes_of_steps(policy, video, condition, shape.text_tokens) for policy in policies)
    block = {name: three[name] - value for name, value in two.items()}
    found = {name: value + (int(shape.transformer["num_layers"]) - 2) * block[name] for name, value in two.items()}
    fsdp = config.actor.fsdp_config
    numbers = found["numbers"]
    learn = found["learn"]
    gathered = two["numbers"] + FP32 / size * two["learn"] if fsdp.reshard_after_forward else numbers
    ranks, offloads = ranks_of_a_copy(fsdp, slots), config.model.offload_frozen
    has_faces = any(".onnx" in str(value) for value in config.reward.kwargs.values())
    frozen = {"high-noise expert": (shape.experts - 1) * size * numbers}
    frozen["text encoder"] = float(size * count(shape.text_encoder))
    host = {name: value for name, value in frozen.items() if value and offloads}
    always = {
        "low-noise expert, this rank's shard": size * numbers / ranks,
        "gathered: root and two blocks": size * gathered,
        "adapter, Adam": (FP32 + MOMENTS) * learn / ranks,
        "VAE": float(size * count(shape.vae)),
        "reward": float(FACE_MODEL_BYTES * has_faces),
        **({} if offloads else frozen),
    }
    kept = {"kept by the steps": found["kept"]}
    phases = {
        "prompts": {"text encoder": host.get("text encoder", 0.0)},
        "first frame": {"VAE": coding["first frame"]},
        "high-noise steps": {
            "high-noise expert": host.get("high-noise expert", 0.0),
            "activations": found["high-noise steps"],
        },
        "steps": {"activations": found["steps"]},
        "decoding": kept | {"activations": coding["decoding"]},
        "reward": kept | {"frames": coding["reward"], "faces": float(FACE_BYTES_PER_FRAME * frames * has_faces)},
        "backward of decoding": kept | {"activations": coding["backward of decoding"]},
        "backward of the steps": {"activations": found["backward of the steps"]},
    }
    return MemoryPlan({name: value for name, value in always.items() if value}, phases, host=host)


def launch_plan(config: RewardFlowConfig, slots: int) -> str:
    """Returns the required memory of one device for the table at launch, or "" if config files are missing."""
    try:
        found = plan(config, read_shape(str(config.model.path)), slots)
    except UserError:
        return ""
    return f"{found.device_bytes / GIB:.0f} GiB (calculated)"
