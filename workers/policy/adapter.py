"""LoRA adapters (Hu et al. 2021): W x + alpha / rank * B A x with a frozen W and trained low-rank matrices A and B.

The layers are peft's. B is initialised with zeros, so the policy starts as the base model. With the adapter disabled
the policy equals the base model, so a run with an adapter needs no separate reference model. This module inserts
adapters according to the options, merges them for the rollout engine and for exports, and reads and writes their files.
peft is imported inside the functions because the import takes two seconds and most runs have no adapter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from verl_lite.config import ModelConfig, NetworkConfig, PPOConfig
from verl_lite.errors import UserError
from workers.engine.lora import IN_NETWORK, base_name, is_adapter_parameter, merged
from workers.policy.model_errors import user_error_on_failure
from workers.policy.saved_adapter import (
    WEIGHTS_FILE,
    read_adapter_config,
    refused_tensor,
    require_equal_sizes,
    require_plain_lora,
)
from workers.policy.vision import has_vision

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"  # peft's name for all layers
CHOOSERS = ("Indexer",)  # class names of modules that select tokens, as in DeepSeek's sparse attention
STATE_SPACE = re.compile("Mamba|Mixer$")
_PREFIX_IN_FILE = "base_model.model."


def has_adapter(model: NetworkConfig) -> bool:
    """Returns True if only an adapter of the network is trained."""
    return isinstance(model, ModelConfig) and model.lora_rank > 0


def add_adapter(network: PreTrainedModel, model: ModelConfig) -> LoraConfig:
    """Adds an fp32 adapter to the layers that `model` names, freezes all other parameters, and returns peft's config.

    Raises:
        UserError: a name matches no linear layer or only the output layer, which cannot have an adapter.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    excluded = list(model.exclude_modules)
    _require_linear_layers(network, "model.exclude_modules", excluded)
    targets = _target_modules(network, model)
    adapted: nn.Module = network
    if _has_experts(network):
        # for a transformers model peft would interpret layer names as names of experts, as in older model classes
        adapted = nn.ModuleDict({"network": network})
    target_modules: str | list[str] = targets
    # in a list, peft would take it for the name of a layer
    if targets == [ALL_LINEAR]:
        target_modules = ALL_LINEAR
    config = LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=target_modules,
        exclude_modules=excluded or None,
        # no dropout: a policy gradient needs the log-probs of the policy that sampled
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name(model.path),
    )
    with user_error_on_failure(f"model.target_modules={targets}", "peft has no adapter for these layers; name others"):
        inject_adapter_in_model(config, adapted)

    # peft also adapts other classes, such as GPT-2's Conv1D, whose weight is stored transposed, unlike `merged` expects
    for name, module in network.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if not isinstance(module.get_base_layer(), nn.Linear):
            raise UserError(f"model.target_modules: {name} is not a torch.nn.Linear, which an adapter needs")
    # peft creates them in the dtype of the frozen layer, bf16, which would lose small updates
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if model.lora_adapter_path is not None:
        _load_saved_adapter(network, model, Path(model.lora_adapter_path))
    return config


def _target_modules(network: PreTrainedModel, model: ModelConfig) -> list[str]:
    """Returns the targets of peft's config: ALL_LINEAR alone, or names of layers or ends of their names.

    Raises:
        UserError: a name matches no linear layer.
    """
    # the names that the user gave are checked here: peft ignores a name that matches no layer if another one does
    targets = list(model.target_modules)
    layers = linear_layers(network)
    if targets != [ALL_LINEAR]:
        _require_linear_layers(network, "model.target_modules", targets)
        if not has_vision(network.config):
            return targets
        # by their whole names, because the vision tower has layers of the same last names
        endings = tuple(f".{target}" for target in targets)
        return [name for name in layers if f".{name}".endswith(endings)]

    unreached = _layers_without_effect(network)
    if unreached:
        return [name for name in layers if name not in unreached]
    # peft's own rule for ALL_LINEAR would include the vision tower, and fails for a network inside another module
    if _has_experts(network) or has_vision(network.config):
        return layers
    return targets


def _has_experts(network: PreTrainedModel) -> bool:
    return any(type(module).__name__.endswith("Experts") for module in network.modules())


def base_note(model: NetworkConfig) -> str:
    """Returns a sentence if the adapter in model.lora_adapter_path was trained on a model of another name, else an
    empty string."""
    # no reason to refuse the adapter: models are renamed, and different models have equal names
    if not isinstance(model, ModelConfig) or model.lora_adapter_path is None:
        return ""
    saved = read_adapter_config(Path(model.lora_adapter_path))
    base = str(saved.get("base_model_name_or_path") or "")
    own_name = Path(str(model.path)).name
    if not base or Path(base).name == own_name:
        return ""
    return (
        f"the adapter of model.lora_adapter_path={model.lora_adapter_path} was trained on {base}, and "
        f"model.path={model.path}; if its weights differ, the adapter has another effect"
    )


def _load_saved_adapter(network: PreTrainedModel, model: ModelConfig, folder: Path) -> None:
    """Copies a saved adapter into the adapter of `network`; on the meta device only checks that it fits.

    Raises:
        UserError: the folder has no readable adapter, or its adapter has another rank, scale or kind, or belongs to
            other layers or to a model of other sizes.
    """
    entries = read_adapter_config(folder)
    require_plain_lora(entries, folder)
    require_equal_sizes(entries, folder, model.lora_rank, model.lora_alpha)
    remedy = f"expected {WEIGHTS_FILE}, as `python -m trainer.export RUN --adapter` writes"
    with user_error_on_failure(f"model.lora_adapter_path={folder} cannot be read", remedy):
        tensors = load_file(folder / WEIGHTS_FILE)

    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in network.named_parameters():
        if is_adapter_parameter(name):
            parameters[_name_in_file(name)] = parameter
    base = str(entries.get("base_model_name_or_path") or "")
    _require_same_layers(network, model, folder, tensors, base)
    _require_same_targets(network, model, parameters.keys(), tensors.keys())

    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def _require_same_layers(
    network: PreTrainedModel,
    model: ModelConfig,
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    base: str,
) -> None:
    """Raises UserError if a tensor of a saved adapter belongs to no linear layer of the network, has other sizes than
    that layer, or holds values that are not finite.

    Args:
        network: the network, which already has its own adapter.
        model: the options of the network.
        folder: the folder of the saved adapter, for messages.
        tensors: the tensors of the saved adapter, by their names in the file.
        base: the name of the adapter's base model; an empty string if its config has none.
    """
    # an adapted layer is a module with the former layer in `base_layer`
    adapted = {name.removesuffix(".base_layer") for name in linear_layers(network)}
    modules = dict(network.named_modules())
    for name, tensor in tensors.items():
        layer, _, part = name.removeprefix(_PREFIX_IN_FILE).rpartition(".lora_")
        if part not in ("A.weight", "B.weight"):
            raise refused_tensor(name, folder, "which is neither a matrix A nor a matrix B of a linear layer")
        # such as an adapter of a run that diverged: every log-prob would be NaN
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"model.lora_adapter_path={folder}: {name} in {WEIGHTS_FILE} has values NaN or infinite")
        if layer in modules and layer not in adapted:
            raise refused_tensor(name, folder, f"and {layer} is no layer that can have an adapter here")

        own = "no such layer"
        shape = tuple(tensor.shape)
        if layer in adapted:
            rows, columns = modules[layer].weight.shape
            expected = (model.lora_rank, columns) if part == "A.weight" else (rows, model.lora_rank)
            if shape == expected:
                continue
            own = f"{expected} there"
        difference = f"has the shape {shape}, and {model.path} has {own}"
        advice = f"Set model.path={base}, or train {model.path} without this adapter"
        if not base or base in (str(model.path), base_name(model.path)):
            advice = f"Give the adapter of the model that is now at {model.path}, or train that model without one"
        raise UserError(f"model.lora_adapter_path={folder}: an adapter of another model: {name} {difference}. {advice}")


def _require_same_targets(
    network: PreTrainedModel,
    model: ModelConfig,
    in_network: Collection[str],
    in_file: Collection[str],
) -> None:
    """Raises UserError if the options give an adapter to other layers than a saved adapter has.

    The message contains options that give one to the same layers.

    Args:
        network: the network with its adapter.
        model: the options of the network.
        in_network: names of the parameters of the network's adapter, as a file would have them.
        in_file: names of the tensors of the saved adapter.
    """
    in_one_of_them = sorted(set(in_network) ^ set(in_file))
    if not in_one_of_them:
        return

    saved_layers = set()
    for name in in_file:
        layer, _, _ = name.removeprefix(_PREFIX_IN_FILE).rpartition(".lora_")
        saved_layers.add(layer)
    all_layers = {name.removesuffix(".base_layer") for name in linear_layers(network)}
    targets = {_last_part(layer) for layer in saved_layers}
    with_these_parts = {layer for layer in all_layers if _last_part(layer) in targets}
    # an adapter of some layers only needs their whole names
    if with_these_parts != saved_layers:
        targets = saved_layers
    advice = f"Set model.target_modules=[{','.join(sorted(targets))}]"
    if model.exclude_modules:
        advice += " model.exclude_modules=[]"

    options = f"model.target_modules={model.target_modules}"
    if model.exclude_modules:
        options += f" with model.exclude_modules={model.exclude_modules}"
    name = in_one_of_them[0]
    source = "in the options"
    if name in in_file:
        source = f"in the adapter of model.lora_adapter_path={model.lora_adapter_path}"
    raise UserError(f"{options}: {name} is only {source}. {advice}")


def _last_part(name: str) -> str:
    """Returns the part of a layer's name after the last dot."""
    return name.rpartition(".")[2]


def _name_in_file(name: str) -> str:
    """Returns the name in peft's file of an adapter's parameter, given its name in the network."""
    return f"{_PREFIX_IN_FILE}{name.replace(IN_NETWORK, '.')}"


def linear_layers(network: PreTrainedModel) -> list[str]:
    """Returns the names of the layers that can have an adapter: all linear layers except the output layer and those of
    a vision tower."""
    # log-probs are computed from the output layer's weight without a call of the layer
    excluded = {network.get_output_embeddings()}
    if has_vision(network.config):
        excluded.update(network.base_model.visual.modules())
    layers = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and module not in excluded:
            layers.append(name)
    return layers


def _layers_without_effect(network: PreTrainedModel) -> set[str]:
    """Returns the names of linear layers whose adapter would have no effect: kernels of state-space layers use their
    weights without calling the module, and modules that select tokens receive no gradient."""
    without_effect: set[str] = set()
    for name, module in network.named_modules():
        class_name = type(module).__name__
        if class_name.endswith(CHOOSERS):
            # every name ends with an empty text
            endings: tuple[str, ...] = ("",)
        elif STATE_SPACE.search(class_name):
            endings = ("out_proj", "dt_proj")
        else:
            continue
        for child_name, _ in module.named_modules():
            if child_name.endswith(endings):
                without_effect.add(f"{name}.{child_name}")
    return without_effect


def refuse_to_train_choosers(network: PreTrainedModel) -> None:
    """Raises UserError if a module that selects tokens would be trained: it receives no gradient of the policy."""
    for name, module in network.named_modules():
        kind = type(module).__name__
        if not kind.endswith(CHOOSERS):
            continue
        is_trained = any(parameter.requires_grad for parameter in module.parameters())
        if is_trained:
            raise UserError(
                f"model.path: in a {type(network).__name__}, {name} ({kind}) selects tokens and gets no gradient from "
                "the policy; train an adapter of the other layers with model.lora_rank=32"
            )


def _require_linear_layers(network: PreTrainedModel, key: str, targets: list[str]) -> None:
    """Raises UserError for a target of the option `key` that is not the name of a linear layer or its end."""
    layers = linear_layers(network)
    for target in targets:
        if any(f".{name}".endswith(f".{target}") for name in layers):
            continue
        last_parts = {_last_part(name) for name in layers}
        listed = ", ".join(sorted(last_parts))
        raise UserError(
            f"{key}: {target} matches no linear layer of {type(network).__name__} (its output layer cannot have an "
            f"adapter); its layers are {listed}. Expected a layer's name, or its part after a dot"
        )


def sends_adapter(config: PPOConfig) -> bool:
    """Returns True if weight updates after the first one send only the adapter to the rollout engines."""
    if config.model.lora_rank == 0:
        return False
    # between processes the adapter is far less to send; within one, a copy of the base model would be kept on the host
    default = "merged" if config.hybrid_engine else "adapter"
    return (config.rollout.lora_sync or default) == "adapter"


class KeptBase:
    """The base model of an adapter, kept on the host to merge later adapters.

    Attributes:
        tensors: the weights of the base model by name; empty at first.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._scale = model.lora_alpha / model.lora_rank

    @torch.no_grad()
    def merged(
        self, weights: Iterable[tuple[str, torch.Tensor]], device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights of the whole model.

        Args:
            weights: those of `FSDPEngine.unmerged_params`. Base weights among them replace `tensors`.
            device: the device of the yielded weights.
        """
        # all of them first: a base weight can be merged when the adapter's parameters are there
        adapter = {}
        for name, tensor in weights:
            if is_adapter_parameter(name):
                adapter[name] = tensor
            else:
                self.tensors[name] = tensor.to("cpu", copy=True)
        yield from merged(self._on_device(device), adapter, self._scale)

    def _on_device(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        # one after another, so that the device holds one base weight at a time
        for name, tensor in self.tensors.items():
            yield name, tensor.to(device)


def count_trained_parameters(network: PreTrainedModel, model: NetworkConfig) -> int:
    """Counts the trained parameters. Adds the adapter to `network`, which may be on the meta device."""
    if has_adapter(model):
        assert isinstance(model, ModelConfig)
        add_adapter(network, model)
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def save_adapter(folder: Path, adapter: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
    """Writes an adapter in the format of peft.

    Args:
        folder: the folder to write, which exists.
        adapter: the adapter's parameters by their names in the network.
        config: the adapter's config.
    """
    tensors = {}
    for name, parameter in adapter.items():
        tensors[_name_in_file(name)] = parameter.contiguous()
    save_file(tensors, folder / WEIGHTS_FILE)
    config.save_pretrained(str(folder))
