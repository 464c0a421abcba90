"""What an environment gave, checked against its protocol (trainer/AGENTIC.md); plain values come out.

Nothing unchecked goes on: a reward that is NaN, an observation that is bytes or a metric that is a list would fail far
away, in the tokenizer or the loss.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_lite.errors import UserError

AGGREGATIONS = ("mean", "sum", "min", "max", "last", "first")
_SHOWN_CHARS = 200
_STEP = "(observation, reward, terminated, truncated, info)"


@dataclass(frozen=True)
class EnvReply:
    """What a reset or step came to.

    observation: None after a reset: the environment's dataset is exhausted. frame: what `render()` gave, if asked for.
    seconds: the call itself took. error: the environment failed, as a traceback or a sentence; nothing else is set
    then, and the episode is over. is_timeout: it failed because it took too long.
    """

    key: Hashable
    observation: str | None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    frame: Any = None
    seconds: float = 0.0
    error: str | None = None
    is_timeout: bool = False


class NonsenseError(UserError):
    """An environment does not keep to the protocol. The message says where, what came and what was expected."""


def read_reset(result: object) -> tuple[str | None, dict[str, Any]]:
    """Observation and info of a reset. Raises NonsenseError."""
    observation, info = _parts("reset", result, 2, "(observation, info)")
    return None if observation is None else _text("the observation of reset", observation), _info("reset", info)


def read_step(result: object) -> EnvReply:
    """The five values of a step. Raises NonsenseError."""
    observation, reward, terminated, truncated, info = _parts("step", result, 5, _STEP)
    return EnvReply(
        None,
        _text("the observation of step", observation),
        _number("the reward of step", reward),
        _flag("terminated of step", terminated),
        _flag("truncated of step", truncated),
        _info("step", info),
    )


def digest(reply: EnvReply) -> str:
    """By which two replies are compared: the same observation, reward and end give the same."""
    told = (reply.observation, reply.reward, reply.terminated, reply.truncated)
    return hashlib.sha256(repr(told).encode(errors="surrogatepass")).hexdigest()


def _parts(method: str, result: object, number: int, expected: str) -> tuple[Any, ...]:
    if not isinstance(result, tuple | list):
        raise _nonsense(method, result, f"a tuple {expected}", "gave")
    if len(result) != number:
        raise _nonsense(method, result, f"{number}: {expected}", f"gave {len(result)} values:")
    return tuple(result)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise _nonsense(what, value, "text: decode it" if isinstance(value, bytes) else "text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _nonsense(what, value, f"valid text ({error})") from None
    return str(value)


def _number(what: str, value: object) -> float:
    item = getattr(value, "item", None)  # a numpy scalar, or an array of one number
    number = item() if callable(item) and getattr(value, "size", 1) == 1 else value
    if not isinstance(number, numbers.Real):
        raise _nonsense(what, value, "a number")
    if not math.isfinite(number):
        raise _nonsense(what, float(number), "a finite number")
    return float(number)


def _flag(what: str, value: object) -> bool:
    if not _is_flag(value):
        raise _nonsense(what, value, "true or false")
    return bool(value)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # numpy's need not be imported here


def _info(method: str, info: object) -> dict[str, Any]:
    checked = dict(_mapping(f"the info of {method}", info))
    for key in ("suffix", "env_instruction"):
        if checked.get(key) is not None:
            checked[key] = _text(f"info[{key!r}] of {method}", checked[key])
    if checked.get("metrics") is not None:
        metrics = _mapping(f"metrics in the info of {method}", checked["metrics"])
        checked["metrics"] = {
            str(name): bool(value) if _is_flag(value) else _number(f"metric {name!r} of {method}", value)
            for name, value in metrics.items()
        }
    if checked.get("metrics_agg_mode") is not None:
        for name, mode in _mapping(f"metrics_agg_mode in the info of {method}", checked["metrics_agg_mode"]).items():
            if mode not in AGGREGATIONS:
                where = f"metrics_agg_mode[{name!r}] in the info of {method}"
                raise _nonsense(where, mode, f"one of {', '.join(AGGREGATIONS)}")
    return checked


def _mapping(what: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _nonsense(what, value, "a dictionary")
    return value


def _nonsense(what: str, value: object, expected: str, verb: str = "is") -> NonsenseError:
    text = repr(value)
    shown = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
    return NonsenseError(f"{what} {verb} {shown}, expected {expected}")
