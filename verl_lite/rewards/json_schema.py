"""Whether an answer is JSON of the wanted shape, by JSON Schema (https://json-schema.org, the jsonschema library).

The JSON is the whole answer, or else the last fenced block of it (``` or ```json). NaN, Infinity, and what Python or
the schema's arithmetic cannot hold are wrong answers. References in a schema lead to places inside it; nothing is
fetched.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_lite.rewards.registry import register_reward
from verl_lite.rewards.rules import fenced_blocks

_SHOWN_CHARACTERS = 200


@register_reward("rule/json_schema")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    schema: Mapping[str, Any] | str | None = None,
    fenced: bool = True,
) -> dict[str, float | str]:
    """score and acc: 1.0 if the answer is valid, else 0.0; parses: 1.0 if it is JSON at all; problem: what is wrong,
    "" if nothing is.

    schema: a mapping, JSON text, or the path of a .json file; without it the row's ground truth, a mapping or JSON
    text, is the schema. fenced: whether a fenced block with text around it is an answer.
    Raises ValueError for what is no schema, and what jsonschema raises for a reference that leads nowhere.
    """
    wanted = ground_truth if schema is None else schema
    if isinstance(wanted, Mapping):
        wanted = json.dumps(wanted, sort_keys=True)
    elif isinstance(wanted, str) and wanted.strip().endswith(".json"):
        wanted = Path(wanted).expanduser().read_text(encoding="utf-8")
    if not isinstance(wanted, str):
        raise ValueError(f"the schema is {wanted!r:.200}; a mapping, JSON text or the path of a .json file is expected")
    validator, parses = _validator(wanted), 0.0
    try:
        value, parses = parse_json(solution_str, fenced), 1.0
        problem = next((error.message for error in validator.iter_errors(value)), "")
    except (ValueError, OverflowError, RecursionError) as error:  # the answer's doing, and no failure of the reward
        problem = str(error)
    return {
        "score": float(not problem),
        "acc": float(not problem),
        "parses": parses,
        "problem": problem[:_SHOWN_CHARACTERS],
    }


def parse_json(text: str, fenced: bool = True) -> Any:
    """The JSON value that an answer is or contains. Raises ValueError if there is none."""
    try:
        return json.loads(text, parse_constant=_number, parse_float=_number)
    except ValueError:
        blocks = [block for language, block, end in fenced_blocks(text) if end and language.lower() in ("", "json")]
        if not fenced or not blocks:
            raise
    return parse_json(blocks[-1], fenced=False)


def _number(digits: str) -> float:
    """The number as written. Raises ValueError for NaN, Infinity and what becomes it."""
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits:.20} is not JSON, or too large a number")
    return number


@functools.lru_cache(maxsize=4096)
def _validator(text: str) -> Any:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        schema = json.loads(text)
        if not isinstance(schema, dict | bool):
            raise ValueError("an object is expected")
        kind = validator_for(schema)
        kind.check_schema(schema)
    except (ValueError, SchemaError) as error:
        raise ValueError(f"the schema is none ({getattr(error, 'message', error)}): {text:.200}") from error
    return kind(schema, registry=Registry())
