"""The generation config of a model: the sampling defaults and end tokens that its author recommends."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import GenerationConfig
from transformers.utils import cached_file

from verl_lite.json_types import JsonMapping, JsonObject
from workers.policy.model_errors import user_error_on_failure

GENERATION_CONFIG = "generation_config.json"


def model_file(path: str, name: str) -> str | None:
    """Returns the path of a file in a model's folder or in the hub's cache; None if the model lacks it."""
    if Path(path).is_dir():
        file = Path(path) / name
        return str(file) if file.is_file() else None
    return cached_file(
        path,
        name,
        local_files_only=True,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def generation_config(path: str) -> JsonObject:
    """Returns the entries of a model's generation config; empty if the model has none.

    Raises:
        UserError: transformers could read neither this file nor its copy in an export.
    """
    file = model_file(path, GENERATION_CONFIG)
    if file is None:
        return {}
    with user_error_on_failure(f"model.path={path!r}: {GENERATION_CONFIG} is invalid", "correct or remove this file"):
        entries = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(entries, dict):
            raise TypeError(f"expected an object, not a {type(entries).__name__}")
        eos_token_ids(entries)
        GenerationConfig.from_dict(dict(entries))
    return entries


def eos_token_ids(entries: JsonMapping) -> list[int]:
    """Returns the tokens that end a response according to the entries of a generation config.

    Raises:
        TypeError: eos_token_id is neither a token nor a list of tokens.
    """
    value = entries.get("eos_token_id")
    if value is None:
        return []
    tokens = value if isinstance(value, list) else [value]
    for token in tokens:
        # not isinstance: True is an int
        if type(token) is not int or token < 0:
            raise TypeError(f"eos_token_id={value!r}: expected a token id or a list of them")
    return tokens
