"""Whether an answer is JSON of the wanted shape, by JSON Schema (https://json-schema.org, the jsonschema library).

The JSON is the whole answer, or else the last fenced block of it (``` or ```json). NaN and Infinity, which JSON does
not have, numbers beyond 1e300, and values nested deeper than 100 levels are wrong answers. References in a schema lead
to places inside it; nothing is fetched.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_lite.rewards.registry import register_reward

DEEPEST = 100
LARGEST = 1e300

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
    validator = _validator(wanted)
    try:
        value = parse_json(solution_str, fenced)
    except ValueError as error:
        return {"score": 0.0, "acc": 0.0, "parses": 0.0, "problem": str(error)[:_SHOWN_CHARACTERS]}
    problem = next((error.message for error in validator.iter_errors(value)), "")
    valid = float(not problem)
    return {"score": valid, "acc": valid, "parses": 1.0, "problem": problem[:_SHOWN_CHARACTERS]}


def parse_json(text: str, fenced: bool = True) -> Any:
    """The JSON value that an answer is or contains. Raises ValueError if there is none."""
    try:
        return _parsed(text)
    except ValueError:
        block = last_fenced(text) if fenced else None
        if block is None:
            raise
    return _parsed(block)


def last_fenced(text: str) -> str | None:
    """What stands in the last fenced block, ``` or ```json, that is closed; None if there is none."""
    found: str | None = None
    block: list[str] | None = None
    for line in text.splitlines():
        mark = line.strip().lower()
        if block is None:
            block = [] if mark in ("```", "```json") else None
        elif mark == "```":
            found, block = "\n".join(block), None
        else:
            block.append(line)
    return found


def _parsed(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_number, parse_float=_number, parse_int=_number)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    layer = [value]
    for _ in range(DEEPEST):
        inside = (each.values() if isinstance(each, dict) else each for each in layer if isinstance(each, dict | list))
        layer = [inner for each in inside for inner in each]
    if layer:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    return value


def _number(digits: str) -> float:
    """The number as written. Raises ValueError for what JSON does not have, and beyond 1e300, where a schema's
    arithmetic (multipleOf) may overflow."""
    number = float(digits)
    if not abs(number) <= LARGEST:
        raise ValueError(f"{digits:.20} is not JSON, or a number beyond {LARGEST:g}")
    return int(digits) if digits.lstrip("-").isdigit() else number


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
