"""Low-rank adapters (LoRA) as the training engine sees them: names, scale, switching off, and merging into base
weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from peft import LoraConfig


CONFIG_FILE = "adapter_config.json"  # peft's name
IN_NETWORK = ".default."  # peft's adapter name, which is part of parameter names in the network but not in files


@contextmanager
def adapter_off(network: nn.Module) -> Iterator[None]:
    """Makes the network compute the outputs of its base model inside the context, without the adapter."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in network.modules() if isinstance(module, LoraLayer)]
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    # peft froze them, but FSDP2 records in its first forward which parameters get gradients
    for parameter in trained:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def base_name(path: str | None) -> str:
    """Returns the name of an adapter's base model for its config: the absolute path of a folder, or a name on the hub.

    Absolute, because an export, which may be called from another folder, merges the adapter into this model.
    """
    folder = Path(str(path))
    return str(folder.absolute()) if folder.is_dir() else str(path)


def scale_of(config: LoraConfig) -> float:
    """Returns the factor alpha / rank of B A x."""
    return float(config.lora_alpha) / int(config.r)


def is_adapter_parameter(name: str) -> bool:
    """Returns True if this is the name of a parameter of an adapter in a network."""
    return IN_NETWORK in name and (".lora_A." in name or ".lora_B." in name)


def merged(
    weights: Iterable[tuple[str, torch.Tensor]], adapter: Mapping[str, torch.Tensor], scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the base model's weights with the adapter merged: W + scale B A, computed in fp32, in the dtype of W.

    Args:
        weights: weights of the base model, by its own names or by the names in a network with an adapter.
        adapter: parameters of the adapter, by the names in the network.
        scale: alpha / rank.

    Yields:
        (name in the base model, weight).
    """
    for adapted_name, weight in weights:
        # peft wraps an adapted layer, which then is the base_layer of the wrapper
        name = adapted_name.replace(".base_layer.", ".")
        layer = name.removesuffix(".weight")
        down = adapter.get(f"{layer}.lora_A{IN_NETWORK}weight")
        # no adapter, or the bias of a layer that has one
        if down is None or layer == name:
            yield name, weight
            continue
        up = adapter[f"{layer}.lora_B{IN_NETWORK}weight"]
        # one rounding to bf16, of the sum: a small change would vanish in a sum of bf16 numbers
        exact = torch.addmm(weight.float(), up.float(), down.float(), alpha=scale)
        yield name, exact.to(weight.dtype)


def load_adapter_config(folder: Path) -> LoraConfig | None:
    """Returns peft's config of the adapter in a checkpoint's `folder`, or None if all parameters were trained."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    from peft import LoraConfig

    return LoraConfig.from_pretrained(str(folder))
