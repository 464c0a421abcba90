"""Environments inside a process of the pool, or in the rollout worker itself (`agentic.env_pool.num_workers: 0`).

An environment object serves one episode after another; one that failed is not used again. What it gives is checked
against its protocol (trainer/AGENTIC.md), and plain values come out: a reward that is NaN, an observation that is bytes
or a metric that is a list would fail far away, in the tokenizer or the loss.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import numbers
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_lite.envs import Env, EnvTemplate, find_env
from verl_lite.errors import UserError
from verl_lite.registry import import_modules

AGGREGATIONS = ("mean", "sum", "min", "max", "last", "first")
_SHOWN_CHARS = 200


class NonsenseError(UserError):
    """An environment does not keep to the protocol. The message says where, what came and what was expected."""


@dataclass(frozen=True)
class EnvReply:
    """What a reset or step came to.

    seconds: the call itself took. error: the environment failed, as a traceback or a sentence; nothing else is set
    then, and the episode is over. is_timeout: it failed because it took too long.
    """

    key: Hashable
    observation: str | None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    is_timeout: bool = False

    def digest(self) -> str:
        """By which two replies are compared: the same observation, reward and end give the same."""
        told = (self.observation, self.reward, self.terminated, self.truncated)
        return hashlib.sha256(repr(told).encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Begin:
    """Reset an environment of `tag`."""

    tag: str
    seed: int


@dataclass(frozen=True)
class Act:
    """One step of a begun episode."""

    action: str


@dataclass(frozen=True)
class Trial:
    """A new environment, one reset, one step: whether an environment works at all."""

    tag: str


@dataclass
class _Episode:
    tag: str
    env: Env


class EnvHost:
    """The environments of `templates`; a session is an episode.

    modules: imported first, for the environments that they register.
    """

    info, is_async = None, False

    def __init__(self, templates: Mapping[str, EnvTemplate], modules: tuple[str, ...] = ()) -> None:
        import_modules(modules)
        for template in templates.values():
            find_env(template.env_type)  # now, and not within the deadline of a reset
        self._templates = templates
        self._episodes: dict[int, _Episode] = {}
        self._spare: dict[str, list[Env]] = {tag: [] for tag in templates}
        self._changing = threading.Lock()

    def run(self, session: int, payload: Begin | Act | Trial) -> EnvReply:
        """A reset, a step, or a trial. Raises whatever the environment does, and NonsenseError."""
        try:
            if isinstance(payload, Act):
                return read_step(self._episodes[session].env.step(payload.action))
            reply = self._begin(session, payload)
            return self._try(session) if isinstance(payload, Trial) else reply
        except BaseException:
            self._close(session)
            raise

    def end(self, session: int) -> None:
        """The environment of this episode may serve another."""
        with self._changing:
            if (episode := self._episodes.pop(session, None)) is not None:
                self._spare[episode.tag].append(episode.env)

    def _begin(self, session: int, payload: Begin | Trial) -> EnvReply:
        begin = payload if isinstance(payload, Begin) else Begin(payload.tag, 0)
        with self._changing:
            spare = self._spare[begin.tag] if isinstance(payload, Begin) else []
            env = spare.pop() if spare else None
        episode = _Episode(begin.tag, env or self._templates[begin.tag].make())
        with self._changing:
            self._episodes[session] = episode
        observation, info = read_reset(episode.env.reset(begin.seed))
        return EnvReply(None, observation, info=info)

    def _try(self, session: int) -> EnvReply:
        episode = self._episodes[session]
        sample = getattr(episode.env, "sample_random_action", None)
        action = sample() if callable(sample) else ""
        if not isinstance(action, str):
            raise _nonsense("sample_random_action", action, "the text of an action")
        reply = read_step(episode.env.step(action))
        self._close(session)
        return reply

    def _close(self, session: int) -> None:
        with self._changing:
            episode = self._episodes.pop(session, None)
        close = getattr(episode.env, "close", None) if episode is not None else None
        if callable(close):
            with contextlib.suppress(BaseException):  # it is thrown away: what it raises now changes nothing
                close()


def read_reset(result: object) -> tuple[str, dict[str, Any]]:
    """Observation and info of a reset. Raises NonsenseError."""
    observation, info = _parts("reset", result, "(observation, info)")
    return _text("the observation of reset", observation), _info("reset", info)


def read_step(result: object) -> EnvReply:
    """The five values of a step. Raises NonsenseError."""
    found = _parts("step", result, "(observation, reward, terminated, truncated, info)")
    observation, reward, terminated, truncated, info = found
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not _is_flag(flag):
            raise _nonsense(f"{name} of step", flag, "true or false")
    observation, reward = _text("the observation of step", observation), _number("the reward of step", reward)
    return EnvReply(None, observation, reward, bool(terminated), bool(truncated), _info("step", info))


def _parts(method: str, result: object, expected: str) -> tuple[Any, ...]:
    number = expected.count(",") + 1
    if not isinstance(result, tuple | list) or len(result) != number:
        raise _nonsense(f"what {method} gave", result, f"{number} values: a tuple {expected}")
    return tuple(result)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise _nonsense(what, value, "text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _nonsense(what, value, f"valid text ({error})") from None
    return str(value)


def _number(what: str, value: object) -> float:
    item = getattr(value, "item", None)  # a numpy scalar, or an array of one number
    number = item() if callable(item) and getattr(value, "size", 1) == 1 else value
    if not isinstance(number, numbers.Real) or not math.isfinite(number):
        raise _nonsense(what, number, "a finite number")
    return float(number)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # numpy's need not be imported here


def _info(method: str, info: object) -> dict[str, Any]:
    checked = dict(_mapping(f"the info of {method}", info))
    for key in ("suffix", "env_instruction"):
        if checked.get(key) is not None:
            checked[key] = _text(f"info[{key!r}] of {method}", checked[key])
    if checked.get("metrics") is not None:
        checked["metrics"] = {
            str(name): bool(value) if _is_flag(value) else _number(f"metric {name!r} of {method}", value)
            for name, value in _mapping(f"metrics in the info of {method}", checked["metrics"]).items()
        }
    modes = checked.get("metrics_agg_mode")
    for name, mode in _mapping("metrics_agg_mode", {} if modes is None else modes).items():
        if mode not in AGGREGATIONS:
            where = f"metrics_agg_mode[{name!r}] in the info of {method}"
            raise _nonsense(where, mode, f"one of {', '.join(AGGREGATIONS)}")
    return checked


def _mapping(what: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _nonsense(what, value, "a dictionary")
    return value


def _nonsense(what: str, value: object, expected: str) -> NonsenseError:
    text = repr(value)
    shown = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
    return NonsenseError(f"{what} is {shown}, expected {expected}")
