"""Exports a checkpoint to a Hugging Face folder, and rehearses the export before a training starts."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from verl_lite.errors import UserError
from verl_lite.machine.device import DTYPES
from workers.engine.checkpoint import read_weights
from workers.engine.lora import load_adapter_config, merged, scale_of
from workers.policy.adapter import save_adapter
from workers.policy.assets import ASSETS, write_assets
from workers.policy.classifier import KINDS, AutoClass, classifier_of, config_has_code, is_of_transformers
from workers.policy.model_errors import user_error_on_failure

if TYPE_CHECKING:
    from peft import LoraConfig

MOST_BYTES_PER_FILE = "50GB"  # as transformers
_OF_THE_WHOLE_MODEL = ("config.json", "generation_config.json")


def save_assets(path: str, assets: Mapping[str, bytes], adapter: LoraConfig | None = None) -> None:
    """Writes the files of `model_assets` to `path`/huggingface, and an adapter's config to `path`."""
    write_assets(assets, Path(path) / ASSETS)
    if adapter is not None:
        adapter.save_pretrained(path)


def export(path: str, target: str, dtype: str | None = None, *, trust_remote_code: bool = False) -> None:
    """Exports a checkpoint's model as a Hugging Face folder: safetensors, config, tokenizer, generation config.

    Runs in one process on the CPU and holds the model in memory once. An adapter is merged into its base model.

    Args:
        path: a folder written by `save`.
        target: the folder to write. The weights are written first.
        dtype: fp32 or bf16; None = the dtype of the model before training.
        trust_remote_code: run the code in the checkpoint's folder, which a model with code of its own needs.

    Raises:
        UserError: `path` has no checkpoint, or the adapter's base model is no longer at its path.
    """
    source = _checkpoint(path)
    folder = Path(target)
    config, auto_class = _exported_class(source / ASSETS, trust_remote_code)
    target_dtype = config.dtype or torch.float32
    if dtype:
        target_dtype = DTYPES[dtype]
    adapter = load_adapter_config(source)
    weights = read_weights(source)
    if adapter is None:
        network = _network_without_weights(auto_class, config, target_dtype, trust_remote_code)
        # one after another, so that both dtypes of the whole model are never in memory
        converted = {}
        for name in list(weights):
            converted[name] = weights.pop(name).to(target_dtype)
        # not strict: the checkpoint has tied weights once, under one of their names
        network.load_state_dict(converted, strict=False, assign=True)
        network.tie_weights()
    else:
        # the checkpoint of an adapter does not contain the base model
        network = _base_network(path, adapter, auto_class, config, trust_remote_code)
        merged_weights = merged(network.named_parameters(), weights, scale_of(adapter))
        with torch.no_grad():
            for name, weight in merged_weights:
                network.get_parameter(name).copy_(weight)
        network = network.to(target_dtype)

    # the assets after the weights: a folder whose export was interrupted has no config, and nothing loads it
    _write_weights(network, folder)
    shutil.copytree(source / ASSETS, folder, dirs_exist_ok=True)
    _update_config(folder, network, target_dtype)
    if not is_of_transformers(network) and not config_has_code(config):
        print(f"transformers has no class {type(network).__name__}: only this project can load {target}")


def _base_network(
    path: str,
    adapter: LoraConfig,
    auto_class: AutoClass,
    config: PretrainedConfig,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Loads the base model of a checkpoint's adapter. Raises UserError if it is no longer at its path."""
    base = str(adapter.base_model_name_or_path)
    dtype = config.dtype or torch.float32
    try:
        network: PreTrainedModel = auto_class.from_pretrained(
            base, config=config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    except OSError as error:
        problem = f"the base model {base} of its adapter cannot be loaded; export the adapter alone with --adapter"
        raise UserError(f"checkpoint {path!r}: {problem}") from error
    return network


def rehearse_export(path: str, kind: str, assets: Mapping[str, bytes], *, trust_remote_code: bool) -> None:
    """Does all that `export` will do except for reading and writing the weights, in a temporary folder.

    Args:
        path: the initial model's path, for messages.
        kind: name of the class of the trained network.
        assets: the files of `model_assets`.
        trust_remote_code: run the code in the model's folder.

    Raises:
        UserError: the trained model could not be exported.
    """
    problem = f"model.path={path!r}: a trained {kind} could not be exported"
    remedy = "correct its config.json or the entries of model.override_config, or choose another model"
    with tempfile.TemporaryDirectory(prefix="verl_lite-export-") as name, user_error_on_failure(problem, remedy):
        folder = Path(name)
        write_assets(assets, folder)
        config, auto_class = _exported_class(folder, trust_remote_code)
        exported = _network_without_weights(auto_class, config, torch.float32, trust_remote_code)
        if type(exported).__name__ != kind:
            raise ValueError(f"its config.json describes a {type(exported).__name__}")
        _saved_weights(exported)
        _update_config(folder, exported, torch.float32)
        AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _exported_class(folder: Path, trust_remote_code: bool) -> tuple[PretrainedConfig, AutoClass]:
    """Returns the config in a folder, and the Auto class of the network that it describes."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserError(
            f"{folder}: the model has Python code of its own; read it, and add --trust_remote_code to run it"
        ) from error
    # a critic or reward model has a head that AutoModelForCausalLM does not build
    architectures = " ".join(config.architectures or ())
    for kind in KINDS:
        if kind in architectures:
            return config, classifier_of(kind, config)
    return config, AutoModelForCausalLM


def _network_without_weights(
    auto_class: AutoClass,
    config: PretrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> PreTrainedModel:
    with torch.device("meta"):
        return auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def _saved_weights(network: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the weights of a network by their names in a Hugging Face folder; tied weights appear once."""
    # the steps of transformers' `save_pretrained`
    state = dict(network.state_dict())
    for name in network._keys_to_ignore_on_save or ():
        state.pop(name, None)
    for tied, original in network.all_tied_weights_keys.items():
        if original in state:
            state.pop(tied, None)
    converted: dict[str, torch.Tensor] = revert_weight_conversion(network, state)
    return converted


def _write_weights(network: PreTrainedModel, folder: Path) -> None:
    """Writes the weights as safetensors. `save_pretrained` would also write both configs, which it may refuse."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = _saved_weights(network)
    files = split_torch_state_dict_into_shards(weights, max_shard_size=MOST_BYTES_PER_FILE)
    # an earlier export may have more files than this one
    for earlier in folder.glob("model*.safetensors*"):
        earlier.unlink()
    for name, tensor_names in files.filename_to_tensors.items():
        # as safetensors requires; experts, which are contiguous views of one tensor, are not copied
        tensors = {tensor_name: weights[tensor_name].contiguous() for tensor_name in tensor_names}
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        index_file = folder / SAFE_WEIGHTS_INDEX_NAME
        index_file.write_text(json.dumps(index, indent=2), encoding="utf-8")


def _update_config(folder: Path, network: PreTrainedModel, dtype: torch.dtype) -> None:
    """Sets the entries of config.json that describe the weights."""
    file = folder / "config.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    class_name = type(network).__name__
    entries["architectures"] = [class_name]
    entries["dtype"] = str(dtype).removeprefix("torch.")
    # as transformers writes it
    text = json.dumps(entries, indent=2, sort_keys=True)
    file.write_text(text + "\n", encoding="utf-8")


def export_adapter(path: str, target: str) -> None:
    """Exports a checkpoint's adapter in fp32 as a folder that `peft.PeftModel.from_pretrained(base, target)` loads.

    Raises:
        UserError: `path` has no checkpoint, or its checkpoint has no adapter.
    """
    source = _checkpoint(path)
    folder = Path(target)
    adapter = load_adapter_config(source)
    if adapter is None:
        raise UserError(f"checkpoint {path!r}: all parameters were trained, so it has no adapter; export it as a model")
    folder.mkdir(parents=True, exist_ok=True)
    weights = read_weights(source)
    save_adapter(folder, weights, adapter)
    # the tokenizer and its chat template; peft reads the configs from the base model's folder
    for file in (source / ASSETS).iterdir():
        if file.is_file() and file.name not in _OF_THE_WHOLE_MODEL:
            shutil.copyfile(file, folder / file.name)


def _checkpoint(path: str) -> Path:
    """Returns the folder of a checkpoint. Raises UserError if `path` is none."""
    folder = Path(path)
    if not folder.exists():
        raise UserError(f"{path} does not exist: expected the folder of a run, or of one of its steps")
    has_weights = (folder / ".metadata").is_file()
    has_assets = (folder / ASSETS).is_dir()
    if not has_weights or not has_assets:
        raise UserError(f"checkpoint {path!r}: expected a folder written by a training run (.metadata and {ASSETS}/)")
    return folder
