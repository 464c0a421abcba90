"""From a folder in diffusers format to the parts of an image-to-video pipeline, ready for training an adapter.

Two layouts are known, both of Wan2.2. I2V-A14B has two experts (`transformer` for high noise, `transformer_2` for low
noise, with a boundary between them), which read the noisy latents beside a mask and the latents of the first frame.
TI2V-5B has one, which is told a timestep for each token, and whose first latent frame is that of the clip. Small models
and large ones come the same way. A component whose library is neither diffusers nor transformers is imported by the
name that model_index.json gives (`["my_package.my_module", "MyDecoder"]`).

diffusers is imported where it is used: it takes seconds, and nothing else needs it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils.logging import disable_progress_bar

from verl_lite.config.diffusion import DiffusionModelConfig
from verl_lite.errors import UserError
from workers.diffusion.codec import LatentCodec
from workers.policy.guarded import told_as

INDEX = "model_index.json"
NEEDED = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
EXPERTS = ("transformer", "transformer_2")
TRANSFORMERS_LIBRARY, DIFFUSERS_LIBRARY = "transformers", "diffusers"


@dataclass
class DiffusionParts:
    """What a pipeline is made of; all of it frozen, on the CPU.

    transformer: the expert for high noise, or the only one. boundary_ratio: the first has the steps with
    t >= 1000 times this; None = one expert. expand_timesteps: the layout of TI2V-5B.
    """

    transformer: nn.Module
    codec: LatentCodec
    text_encoder: nn.Module
    tokenizer: Any
    boundary_ratio: float | None
    expand_timesteps: bool
    transformer_2: nn.Module | None = None

    @property
    def low_noise(self) -> nn.Module:
        """The expert of the last steps: the one that learns."""
        return self.transformer if self.transformer_2 is None else self.transformer_2

    @property
    def high_noise(self) -> nn.Module | None:
        """The expert of the first steps, which stays as it is; None where there is one expert."""
        return None if self.transformer_2 is None else self.transformer


def load_pipeline(model: DiffusionModelConfig, dtype: torch.dtype, *, with_weights: bool = True) -> DiffusionParts:
    """The parts in the folder `model.path`, with `model.fused_loras` merged into their experts.

    dtype: of all weights but those that a model's class keeps in fp32. with_weights: False leaves the low-noise expert
    uninitialised, for a rank that gets its shards from another. Raises UserError for a folder that is no such pipeline.
    """
    disable_progress_bar()
    folder = Path(str(model.path)).expanduser()
    index = read_index(model)
    second = _is_there(index, "transformer_2")
    learning = EXPERTS[1] if second else EXPERTS[0]
    experts = {}
    for name in EXPERTS[: 1 + second]:
        make = _empty if name == learning and not with_weights else _load
        experts[name] = make(folder, name, index[name], dtype)
    if unknown := set(model.fused_loras) - set(experts):
        raise UserError(f"model.fused_loras: {sorted(unknown)} name no expert; this pipeline has {list(experts)}")
    for name, file in model.fused_loras.items():
        if name != learning or with_weights:
            _fuse(experts[name], file, f"model.fused_loras.{name}")
    parts = DiffusionParts(
        **experts,
        codec=LatentCodec(_load(folder, "vae", index["vae"], dtype)),
        text_encoder=_load(folder, "text_encoder", index["text_encoder"], dtype),
        tokenizer=_load(folder, "tokenizer", index["tokenizer"], None),
        boundary_ratio=boundary_of(model, index),
        expand_timesteps=bool(index.get("expand_timesteps", False)),
    )
    for module in (*experts.values(), parts.codec.vae, parts.text_encoder):
        module.eval().requires_grad_(False)
    _check_channels(parts, str(model.path))
    return parts


def read_index(model: DiffusionModelConfig) -> dict[str, Any]:
    """model_index.json: for each component its [library, class], and the pipeline's own settings. Raises UserError for
    one that lacks a component; that there is one, `verl_lite.config.checks.diffusion` sees before."""
    index: dict[str, Any] = json.loads((Path(str(model.path)).expanduser() / INDEX).read_text(encoding="utf-8"))
    missing = [name for name in NEEDED if not _is_there(index, name)]
    if missing:
        raise UserError(
            f"model.path={model.path!r}: {INDEX} names no {', '.join(missing)}; expected the folder of an "
            "image-to-video pipeline in diffusers format, as save_pretrained writes it"
        )
    return index


def boundary_of(model: DiffusionModelConfig, index: Mapping[str, Any]) -> float | None:
    """Where the experts change: model.boundary_ratio, else the pipeline's own. UserError unless that fits them."""
    given = model.boundary_ratio if model.boundary_ratio is not None else index.get("boundary_ratio")
    if _is_there(index, "transformer_2"):
        if given is None:
            raise UserError("model.boundary_ratio=null: this pipeline has two experts and no boundary; give one (0.9)")
        return float(given)
    if model.boundary_ratio is not None:
        raise UserError(
            f"model.boundary_ratio={model.boundary_ratio}: this pipeline has one expert; expected null (no boundary)"
        )
    return None


def _is_there(index: Mapping[str, Any], name: str) -> bool:
    entry = index.get(name)
    return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None


def _load(folder: Path, name: str, entry: list[str], dtype: torch.dtype | None) -> Any:
    """A component with its weights. dtype: None = it has none."""
    library, component = entry[0], _component_class(name, entry)
    how: dict[str, Any] = {}
    if dtype is not None and library in (TRANSFORMERS_LIBRARY, DIFFUSERS_LIBRARY):
        how["dtype" if library == TRANSFORMERS_LIBRARY else "torch_dtype"] = dtype
    remedy = f"the folder has to hold what {'.'.join(entry)}.from_pretrained reads"
    with told_as(f"model.path: the component {name} ({folder / name}) cannot be loaded", remedy):
        loaded = component.from_pretrained(str(folder / name), **how)
    if dtype is not None and not how:
        loaded.to(dtype)
    return loaded


def _component_class(name: str, entry: list[str]) -> Any:
    library, class_name = entry
    if name == "tokenizer" and library == TRANSFORMERS_LIBRARY:
        class_name = "AutoTokenizer"  # the class of an older release may have another name in this one
    try:
        return getattr(importlib.import_module(library), class_name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{INDEX}: {name} is {library}.{class_name}, which cannot be imported: {error}") from error


def _empty(folder: Path, name: str, entry: list[str], dtype: torch.dtype) -> Any:
    """An expert without its weights, each parameter in the dtype that it has with them."""
    from diffusers.models.modeling_utils import no_init_weights

    component = _component_class(name, entry)
    with no_init_weights():
        expert = component.from_config(component.load_config(str(folder / name)))
    kept = tuple(getattr(component, "_keep_in_fp32_modules", None) or ()) if dtype != torch.float32 else ()
    for key, parameter in expert.named_parameters():
        is_kept = any(part in kept for part in key.split("."))
        parameter.data = parameter.data.to(torch.float32 if is_kept else dtype)
    return expert


def _fuse(expert: Any, file: str, option: str) -> None:
    """Merges an adapter into the expert's weights: diffusers' files, and those it can convert."""
    from diffusers.loaders import WanLoraLoaderMixin

    with told_as(f"{option}={file!r} cannot be merged", "expected LoRA weights for this expert, as safetensors"):
        state, metadata = WanLoraLoaderMixin.lora_state_dict(str(Path(file).expanduser()), return_lora_metadata=True)
        expert.load_lora_adapter(state, metadata=metadata, adapter_name="fused")
        if not getattr(expert, "peft_config", None):
            raise UserError(f"{option}={file!r}: none of its weights fits {type(expert).__name__}")
        expert.fuse_lora(adapter_names=["fused"])
        expert.unload_lora()


def _check_channels(parts: DiffusionParts, path: str) -> None:
    """Raises UserError unless the experts read what the layout gives them."""
    codec = parts.codec
    expected = codec.channels if parts.expand_timesteps else 2 * codec.channels + codec.temporal_factor
    for expert in filter(None, (parts.transformer, parts.transformer_2)):
        config: Any = expert.config
        if getattr(config, "image_dim", None) is not None:
            raise UserError(
                f"model.path={path!r}: its transformer reads the embedding of an image encoder (Wan2.1); expected the "
                "layout of Wan2.2-I2V-A14B or Wan2.2-TI2V-5B"
            )
        if config.in_channels != expected:
            layout = "TI2V (expand_timesteps)" if parts.expand_timesteps else "I2V"
            raise UserError(
                f"model.path={path!r}: its transformer has {config.in_channels} input channels; expected {expected} in "
                f"the layout {layout} with {codec.channels} latent channels"
            )
