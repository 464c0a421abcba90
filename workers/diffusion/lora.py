"""LoRA adapters of diffusion models: injects them into linear layers and saves them in the format of diffusers.

The layers are peft's, as in `workers.policy.adapter`. Matrix B starts as zeros, so training starts at the base model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from verl_lite.config.diffusion import DiffusionModelConfig
from verl_lite.config.flow_grpo import FlowModelConfig
from verl_lite.errors import UserError
from workers.engine.lora import IN_NETWORK, base_name
from workers.policy.adapter import ALL_LINEAR

if TYPE_CHECKING:
    from peft import LoraConfig


@runtime_checkable
class _RecordsAdapter(Protocol):
    """A diffusers model, which needs to know the adapter's config to save and load it."""

    def add_adapter(self, adapter_config: LoraConfig) -> None:
        """Injects the adapter's layers and records its config."""


def add_adapter(network: nn.Module, model: DiffusionModelConfig | FlowModelConfig) -> LoraConfig:
    """Adds a LoRA adapter to the linear layers in `model.target_modules` and freezes all other parameters.

    The adapter's parameters are fp32 and compute in the dtype of their inputs.

    Raises:
        UserError: `model.target_modules` is empty, or one of its names matches no linear layer.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    layers = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    targets = list(model.target_modules)
    if targets == [ALL_LINEAR]:
        targets = layers
    unmatched = [target for target in targets if not _matches_any(target, layers)]
    if unmatched or not targets:
        # names within a block, because those of all blocks differ only in its number
        names = sorted({re.sub(r".*\.\d+\.", "", layer) for layer in layers})
        raise UserError(
            f"model.target_modules={targets}: {', '.join(unmatched) or 'an empty list'} matches no linear layer of "
            f"{type(network).__name__}; expected names of layers, or their last parts, such as {', '.join(names)}"
        )
    config = LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=targets,
        base_model_name_or_path=base_name(model.path),
    )
    network.requires_grad_(False)
    if isinstance(network, _RecordsAdapter):
        network.add_adapter(config)
    else:
        inject_adapter_in_model(config, network)

    for layer in network.modules():
        if not isinstance(layer, LoraLayer):
            continue
        # peft's cast of the input to the adapter's dtype; `_InputDtypeLinear` says why the weights are cast instead
        layer.cast_input_dtype_enabled = False
        for matrix in (*layer.lora_A.values(), *layer.lora_B.values()):
            matrix.to(torch.float32)
            matrix.__class__ = _InputDtypeLinear
    return config


def _matches_any(target: str, layers: Sequence[str]) -> bool:
    """Returns True if `target` is the name of a layer or the end of one."""
    # the dots compare whole parts of a name, so that "to_q" does not match a layer "add_to_q"
    return any(f".{layer}".endswith(f".{target}") for layer in layers)


class _InputDtypeLinear(nn.Linear):
    """A linear layer with fp32 weights that computes in the dtype of its input, as mixed precision does.

    peft would instead convert the input to fp32, which needs far more memory than converting the weights.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight.to(input.dtype))


def write_lora(path: str, weights: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
    """Writes pytorch_lora_weights.safetensors into the folder `path`, for diffusers' `load_lora_weights`.

    To load an adapter of `transformer_2`, pass load_into_transformer_2=True to `load_lora_weights`.

    Args:
        path: folder, which is created.
        weights: full (unsharded) tensors by parameter name.
        config: peft's config of the adapter.
    """
    from diffusers.loaders import WanLoraLoaderMixin

    Path(path).mkdir(parents=True, exist_ok=True)
    layers = {}
    for name, value in weights.items():
        # files do not contain the adapter's name
        layers[name.replace(IN_NETWORK, ".")] = value.cpu()
    WanLoraLoaderMixin.save_lora_weights(
        path, transformer_lora_layers=layers, transformer_lora_adapter_metadata=config.to_dict()
    )
