"""LoRA (Hu et al. 2021): small matrices beside frozen linear layers, W x + alpha / rank * B A x, and only they learn.

The layers are peft's. B starts as zeros, so the policy starts as the base model; switched off, it is the base model
again, which is why a run with an adapter needs no other model as its reference. Here stand what the options mean for a
network, merging (what the rollout engine and an exported folder get), and the adapter's own files. peft is imported
where it is used: it takes two seconds, and most runs have no adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from verl_lite.config import ModelConfig, NetworkConfig
from verl_lite.errors import UserError
from workers.policy.model_errors import user_error_on_failure

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"
CHOOSERS = ("Indexer",)  # classes of modules that choose tokens, as in DeepSeek's sparse attention
STATE_SPACE = re.compile("Mamba|Mixer$")
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # peft's names
_IN_NETWORK = ".default."  # peft's name of the one adapter, in the parameters' names but not in its files


def has_adapter(model: NetworkConfig) -> bool:
    """Whether only an adapter of the network is trained."""
    return isinstance(model, ModelConfig) and model.lora_rank > 0


def add_adapter(network: PreTrainedModel, model: ModelConfig) -> LoraConfig:
    """Puts an adapter beside the layers that `model` names, freezes all else, and gives peft's config of it.

    Its parameters are fp32. Raises UserError for a name that fits no linear layer; the output layer cannot have one.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    targets, excluded = list(model.target_modules), list(model.exclude_modules)
    _require_linear_layers(network, "model.exclude_modules", excluded)
    if targets != [ALL_LINEAR]:
        _require_linear_layers(network, "model.target_modules", targets)
    place: nn.Module = network
    if any(type(module).__name__.endswith("Experts") for module in network.modules()):
        # where peft sees a model of transformers, it takes names of layers for those of experts, as these once were
        place = nn.ModuleDict({"network": network})
        targets = linear_layers(network) if targets == [ALL_LINEAR] else targets
    if model.target_modules == [ALL_LINEAR] and (unreached := _unreached_layers(network)):
        targets = [name for name in linear_layers(network) if name not in unreached]
    config = LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        exclude_modules=excluded or None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(model.path),
    )
    with user_error_on_failure(f"model.target_modules={targets}", "peft has no adapter for these layers; name others"):
        inject_adapter_in_model(config, place)
    for name, module in network.named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module.get_base_layer(), nn.Linear):
            raise UserError(f"model.target_modules: {name} is no torch.nn.Linear, and only such layers can be adapted")
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return config


def linear_layers(network: PreTrainedModel) -> list[str]:
    """Names of the layers that can have an adapter: all linear ones but the output layer."""
    head = network.get_output_embeddings()
    return [name for name, module in network.named_modules() if isinstance(module, nn.Linear) and module is not head]


def _unreached_layers(network: PreTrainedModel) -> set[str]:
    """Linear layers whose adapter would do nothing: kernels of state-space layers take these weights past the module,
    and what chooses tokens gets no gradient."""
    unreached: set[str] = set()
    for name, module in network.named_modules():
        kind = type(module).__name__
        ends = ("",) if kind.endswith(CHOOSERS) else ("out_proj", "dt_proj") if STATE_SPACE.search(kind) else ()
        if ends:
            unreached |= {f"{name}.{each}" for each, _ in module.named_modules() if each.endswith(ends)}
    return unreached


def refuse_to_train_choosers(network: PreTrainedModel) -> None:
    """Raises UserError if parameters would be trained that no gradient of a policy reaches."""
    for name, module in network.named_modules():
        kind = type(module).__name__
        if kind.endswith(CHOOSERS) and any(parameter.requires_grad for parameter in module.parameters()):
            raise UserError(
                f"model.path: in a {type(network).__name__} {name} ({kind}) chooses tokens, and no gradient of the "
                "policy reaches it: train an adapter, model.lora_rank=32, beside the other layers"
            )


def _require_linear_layers(network: PreTrainedModel, key: str, given: list[str]) -> None:
    layers = linear_layers(network)
    for target in given:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            known = sorted({name.rpartition(".")[2] for name in layers})
            raise UserError(
                f"{key}: {target} fits no linear layer of {type(network).__name__} (its output layer cannot be "
                f"adapted); there are {', '.join(known)}. A name, or its end after a dot, is expected"
            )


@contextmanager
def adapter_off(network: nn.Module) -> Iterator[None]:
    """Inside, the network computes what its base model does."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in network.modules() if isinstance(module, LoraLayer)]
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    for parameter in trained:  # peft froze them; FSDP2 looks at its first forward which parameters will get gradients
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def scale_of(config: LoraConfig) -> float:
    """What B A x counts."""
    return float(config.lora_alpha) / int(config.r)


def merged(
    weights: Iterable[tuple[str, torch.Tensor]], adapter: Mapping[str, torch.Tensor], scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights under the base model's names, W + scale B A where there is an adapter, each in its own dtype.

    weights: of the base model, by its own names or by those in a network with an adapter. adapter: by the names there.
    The sum is made in fp32.
    """
    for adapted_name, weight in weights:
        name = adapted_name.replace(".base_layer.", ".")
        layer = name.removesuffix(".weight")
        down = adapter.get(f"{layer}.lora_A{_IN_NETWORK}weight")
        if down is None or layer == name:
            yield name, weight
            continue
        up = adapter[f"{layer}.lora_B{_IN_NETWORK}weight"]
        yield name, torch.addmm(weight.float(), up.float(), down.float(), alpha=scale).to(weight.dtype)


def count_trained_parameters(network: PreTrainedModel, model: NetworkConfig) -> int:
    """Parameters that learn; changes the network, which may be without memory (on the meta device)."""
    if has_adapter(model):
        assert isinstance(model, ModelConfig)
        add_adapter(network, model)
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def save_adapter(folder: Path, adapter: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained` loads. adapter: by the names in a network."""
    tensors = {f"base_model.model.{name.replace(_IN_NETWORK, '.')}": value for name, value in adapter.items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / WEIGHTS_FILE)
    config.save_pretrained(str(folder))


def load_adapter_config(folder: Path) -> LoraConfig | None:
    """What `folder` (of a checkpoint) says of its adapter; None if all parameters were trained."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    from peft import LoraConfig

    return LoraConfig.from_pretrained(str(folder))
