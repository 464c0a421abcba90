"""Decides whether an adapter that peft saved is one that this project computes: W x + alpha / r * B A x.

An `adapter_config.json` can describe many other functions, whose files have tensors of the same names and shapes: other
scales, other base weights (PiSSA and OLoRA change them at the initialization), weights of other modules. Every entry is
therefore compared with a list of understood entries; peft's own reader ignores the entries that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from verl_lite.errors import UserError
from verl_lite.json_types import JsonMapping, JsonObject, JsonValue
from workers.engine.lora import CONFIG_FILE
from workers.policy.model_errors import user_error_on_failure

WEIGHTS_FILE = "adapter_model.safetensors"  # peft's name


# Entries that do not change the function of the saved tensors. The names of the tensors show which layers have an
# adapter; dropout acts only in training, where this project has none.
_WITHOUT_EFFECT = frozenset(
    {
        "alora_invocation_string",
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",  # read only with use_qalora
        "revision",
        "runtime_config",
        "target_modules",
    }
)
# Compared with the options of the run by the caller.
_COMPARED = frozenset({"r", "lora_alpha"})
# Values that keep the function plain. Each initialization here starts from the weights of the base model as they are.
_ACCEPTED: Mapping[str, tuple[str | bool | None, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
_MERGE = "merge it into its base model with peft's merge_and_unload, and set model.path to the merged model"


def read_adapter_config(folder: Path) -> JsonObject:
    """Returns the entries of the adapter's config in `folder`.

    Raises:
        UserError: the file cannot be read, or does not contain an object.
    """
    file = folder / CONFIG_FILE
    remedy = (
        f"expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, as `python -m trainer.export RUN --adapter` writes"
    )
    with user_error_on_failure(f"model.lora_adapter_path={folder} cannot be read", remedy):
        entries = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(entries, dict):
            raise TypeError(f"{CONFIG_FILE} has no object, but a {type(entries).__name__}")
    return entries


def require_plain_lora(entries: JsonMapping, folder: Path) -> None:
    """Raises UserError for the first entry that is not understood, with the accepted values.

    An entry that is not listed above is accepted only if it is empty: null, false, or without elements.
    """
    if "peft_type" not in entries:
        raise UserError(f"{folder / CONFIG_FILE} has no peft_type; accepted: LORA. Give the folder of a LoRA adapter")

    for name, value in entries.items():
        if name in _WITHOUT_EFFECT or name in _COMPARED:
            continue
        accepted = _ACCEPTED.get(name)
        if accepted is None:
            # an option that is switched off has no effect, also if this project does not know it
            is_accepted = value is None or value is False or value in ("", [], {})
            accepted_values = "null or false"
        else:
            is_accepted = _is_one_of(value, accepted)
            accepted_values = ", ".join(json.dumps(accepted_value) for accepted_value in accepted)
        if not is_accepted:
            raise UserError(
                f"model.lora_adapter_path={folder}: its {CONFIG_FILE} has {name}={json.dumps(value)[:200]}, with which "
                f"the adapter is another function than W x + lora_alpha / r * B A x; accepted: {accepted_values}. To "
                f"train from this adapter, {_MERGE}"
            )


def _is_one_of(value: JsonValue, accepted: Collection[JsonValue]) -> bool:
    """Returns True if the value is equal to an accepted one and has its type: 1 is not true."""
    # peft accepts the names of initializations in any case, such as Gaussian
    if isinstance(value, str) and value.lower() in accepted:
        value = value.lower()
    for accepted_value in accepted:
        if type(value) is type(accepted_value) and value == accepted_value:
            return True
    return False


def require_equal_sizes(entries: JsonMapping, folder: Path, lora_rank: int, lora_alpha: int) -> None:
    """Raises UserError if the adapter's rank or alpha is missing or differs from the option of the run."""
    for name, key, option in (("r", "lora_rank", lora_rank), ("lora_alpha", "lora_alpha", lora_alpha)):
        # other writers of JSON have 16.0 for 16
        saved = entries.get(name)
        if isinstance(saved, float) and saved.is_integer():
            saved = int(saved)
        if type(saved) is not int:
            raise UserError(
                f"model.lora_adapter_path={folder}: its {CONFIG_FILE} has {name}={json.dumps(saved)[:200]}; accepted: "
                f"an integer of at least 1. To train from this adapter, {_MERGE}"
            )
        if saved != option:
            raise UserError(
                f"model.{key}={option}: the adapter of model.lora_adapter_path={folder} has {saved}; set "
                f"model.{key}={saved}"
            )


def refused_tensor(name: str, folder: Path, reason: str) -> UserError:
    """Returns the error for a tensor of the adapter's file that has no place in the network."""
    return UserError(
        f"model.lora_adapter_path={folder}: its {WEIGHTS_FILE} has {name}, {reason}. {_MERGE.capitalize()}"
    )
