"""Whether what an environment gave is what the protocol says (verl_lite/envs/README.md); plain values come out.

Nothing unchecked goes on: a reward that is NaN, an observation that is bytes or a metric that is a list would fail far
away, in the tokenizer or the loss.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Mapping
from typing import Any

from workers.envs.messages import EnvReply

AGGREGATIONS = ("mean", "sum", "min", "max", "last", "first")
_SHOWN_CHARS = 200
_STEP = "(observation, reward, terminated, truncated, info)"


class NonsenseError(ValueError):
    """An environment does not keep to the protocol. The message says where, what came and what was expected."""


def read_reset(result: object) -> tuple[str | None, dict[str, Any]]:
    """Observation and info of a reset. Raises NonsenseError."""
    observation, info = _parts("reset", result, 2, "(observation, info)")
    return None if observation is None else _text("reset", observation), _info("reset", info)


def read_step(result: object) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """The five values of a step. Raises NonsenseError."""
    observation, reward, terminated, truncated, info = _parts("step", result, 5, _STEP)
    return (
        _text("step", observation),
        _number("step", "reward", reward),
        _flag("terminated", terminated),
        _flag("truncated", truncated),
        _info("step", info),
    )


def digest(reply: EnvReply) -> str:
    """By which two replies are compared: the same observation, reward and end give the same."""
    told = (reply.observation, reply.reward, reply.terminated, reply.truncated)
    return hashlib.sha256(repr(told).encode(errors="surrogatepass")).hexdigest()


def _parts(method: str, result: object, number: int, expected: str) -> tuple[Any, ...]:
    if not isinstance(result, tuple | list):
        raise NonsenseError(f"{method} gave {_shown(result)}, expected a tuple {expected}")
    if len(result) != number:
        raise NonsenseError(
            f"{method} gave {len(result)} values, expected {number}: {expected}; it gave {_shown(result)}"
        )
    return tuple(result)


def _text(method: str, value: object) -> str:
    if not isinstance(value, str):
        hint = ": decode it" if isinstance(value, bytes) else ""
        raise NonsenseError(f"the observation of {method} is {_shown(value)}, expected text{hint}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise NonsenseError(f"the observation of {method} is no valid text ({error}): {_shown(value)}") from None
    return str(value)


def _number(method: str, name: str, value: object) -> float:
    item = getattr(value, "item", None)  # a numpy scalar, or an array of one number
    number = item() if callable(item) and getattr(value, "size", 1) == 1 else value
    if not isinstance(number, numbers.Real):
        raise NonsenseError(f"the {name} of {method} is {_shown(value)}, expected a number")
    if not math.isfinite(number):
        raise NonsenseError(f"the {name} of {method} is {float(number)}, expected a finite number")
    return float(number)


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # numpy's, which need not be imported here
        return bool(value)
    raise NonsenseError(f"{name} of step is {_shown(value)}, expected true or false")


def _info(method: str, info: object) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise NonsenseError(f"the info of {method} is {_shown(info)}, expected a dictionary")
    checked = dict(info)
    for key in ("suffix", "env_instruction"):
        if checked.get(key) is not None:
            checked[key] = _text(f"{method}, as info[{key!r}],", checked[key])
    if checked.get("metrics") is not None:
        metrics = _mapping(method, "metrics", checked["metrics"])
        checked["metrics"] = {str(name): _metric(method, str(name), value) for name, value in metrics.items()}
    if checked.get("metrics_agg_mode") is not None:
        for name, mode in _mapping(method, "metrics_agg_mode", checked["metrics_agg_mode"]).items():
            if mode not in AGGREGATIONS:
                where = f"metrics_agg_mode[{name!r}] in the info of {method}"
                raise NonsenseError(f"{where} is {_shown(mode)}, expected one of {', '.join(AGGREGATIONS)}")
    return checked


def _mapping(method: str, key: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise NonsenseError(f"{key} in the info of {method} is {_shown(value)}, expected a dictionary")
    return value


def _metric(method: str, name: str, value: object) -> float | bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    return _number(method, f"metric {name!r}", value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
