"""The adapter of a diffusion model: put beside its linear layers, and written as diffusers reads it.

The layers are peft's, as in `workers.policy.adapter`; B starts as zeros, so the model starts as the base model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from verl_lite.config.diffusion import DiffusionModelConfig
from verl_lite.config.flow_grpo import FlowModelConfig
from verl_lite.errors import UserError
from workers.policy.adapter import ALL_LINEAR

if TYPE_CHECKING:
    from peft import LoraConfig


def add_adapter(network: Any, model: DiffusionModelConfig | FlowModelConfig) -> LoraConfig:
    """Puts an adapter beside the linear layers that `model.target_modules` names, and freezes all else.

    The adapter's parameters are fp32 and compute in the dtype of their inputs. Raises UserError for a name that fits no
    linear layer.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    layers = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    targets = layers if list(model.target_modules) == [ALL_LINEAR] else list(model.target_modules)
    unmatched = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in layers)]
    if unmatched or not targets:
        known = sorted({re.sub(r".*\.\d+\.", "", name) for name in layers})
        raise UserError(
            f"model.target_modules={targets}: {', '.join(unmatched) or 'an empty list'} fits no linear layer of "
            f"{type(network).__name__}; there are {', '.join(known)}. A name, or its end after a dot, is expected"
        )
    config = LoraConfig(
        r=model.lora_rank, lora_alpha=model.lora_alpha, target_modules=targets, base_model_name_or_path=str(model.path)
    )
    network.requires_grad_(False)
    if hasattr(network, "add_adapter"):  # a model of diffusers, which notes that it has one
        network.add_adapter(config)
    else:
        inject_adapter_in_model(config, network)
    for layer in network.modules():
        if isinstance(layer, LoraLayer):
            layer.cast_input_dtype_enabled = False
            for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                part.to(torch.float32).__class__ = _InputDtypeLinear
    return config


class _InputDtypeLinear(nn.Linear):
    """A linear layer with fp32 weights that computes in its input's dtype, as mixed precision does.

    peft would take the input, which is far larger than the weights, to fp32 instead.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight.to(input.dtype))


def write_lora(path: str, weights: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
    """Writes pytorch_lora_weights.safetensors into the folder `path`, for diffusers' `load_lora_weights`.

    weights: whole tensors by the names in the expert. An adapter of `transformer_2` is loaded with
    load_into_transformer_2=True.
    """
    from diffusers.loaders import WanLoraLoaderMixin

    Path(path).mkdir(parents=True, exist_ok=True)
    WanLoraLoaderMixin.save_lora_weights(
        path,
        transformer_lora_layers={name.replace(".default.", "."): value.cpu() for name, value in weights.items()},
        transformer_lora_adapter_metadata=config.to_dict(),
    )
