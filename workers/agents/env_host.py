"""Runs environments in a process of the pool, or in the rollout worker (`agentic.env_pool.num_workers: 0`).

An environment object runs one episode after another and is not used again after a failure. Its return values are
checked against the protocol (trainer/AGENTIC.md), because invalid values would otherwise fail later, in the tokenizer
or loss.
"""

import contextlib
import hashlib
import math
import numbers
import re
import threading
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from verl_lite.envs import Env, EnvTemplate, find_env
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject
from verl_lite.registry import import_modules

METRICS_MAX = 64
"""Number of metrics that an episode may report."""

RESERVED = ("error_rate", "timeout_rate", "processes_replaced", "step_seconds/mean", "step_seconds/max")
"""Names that the trainer itself logs as env/NAME."""

AGGREGATIONS = ("mean", "sum", "min", "max", "last", "first")
"""Values of metrics_agg_mode; `workers.agents.episodes.aggregate_metrics` computes them."""
_SHOWN_CHARS = 200
"""Number of characters of an invalid value that are part of a message."""
_NAME = re.compile(r"[\w.:@%+-][\w .:@%+/-]{0,99}", re.ASCII)


class NonsenseError(UserError):
    """An environment returned an invalid value. The message names the place, the value and what was expected."""


@dataclass(frozen=True)
class EnvReply:
    """The result of a reset or a step.

    Attributes:
        key: The caller's name of the episode.
        observation: The observation; None if the environment failed.
        reward: Reward of the step.
        terminated: Whether the task ended in success or failure.
        truncated: Whether the environment cut the episode off.
        info: Further values; trainer/AGENTIC.md lists their keys.
        seconds: Duration of the call.
        error: Traceback or sentence if the environment failed; then the values of the environment are not set, and the
            episode has ended.
        is_timeout: Whether the call exceeded its deadline.
    """

    key: Hashable
    observation: str | None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: JsonObject = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    is_timeout: bool = False

    def digest(self) -> str:
        """Returns a hash of observation, reward and end of episode, by which two replies are compared."""
        values = (self.observation, self.reward, self.terminated, self.truncated)
        text = repr(values).encode(errors="surrogatepass")
        return hashlib.sha256(text).hexdigest()


@dataclass(frozen=True)
class Begin:
    """A call that resets an environment of `tag`."""

    tag: str
    seed: int


@dataclass(frozen=True)
class Act:
    """A call that takes one step; action None = drawn by the environment, if it can draw one."""

    action: str | None


EnvCall = Begin | Act


class EnvHost:
    """Handler of a pool's process that runs environments. A session is an episode.

    Args:
        templates: Environment templates by tag.
        modules: Modules to import first, because they register environments.
    """

    style = "threads"
    thread: int | None = None

    def __init__(self, templates: Mapping[str, EnvTemplate], modules: tuple[str, ...] = ()) -> None:
        import_modules(modules)
        for template in templates.values():
            # imported here, because an import could exceed the deadline of a reset
            find_env(template.env_type)
        self._templates = templates
        # tag and environment of each running episode
        self._episodes: dict[int, tuple[str, Env]] = {}
        # environments of ended episodes, which other episodes of their tag use
        self._spare: dict[str, list[Env]] = {tag: [] for tag in templates}
        # `run` is called in several threads, and `end` in another one
        self._lock = threading.Lock()

    def run(self, session: int, payload: EnvCall) -> EnvReply:
        """Runs a reset or a step. Raises NonsenseError and every exception of the environment."""
        try:
            if isinstance(payload, Begin):
                env = self._begin_episode(session, payload.tag)
                return read_reset(env.reset(payload.seed))
            _, env = self._episodes[session]
            action = payload.action
            if action is None:
                action = _random_action(env)
            return read_step(env.step(action))
        except BaseException:
            # an environment that has failed may be in any state, and is not used again
            self._close(session)
            raise

    def end(self, session: int) -> None:
        """Makes the environment of an ended episode available for another one."""
        with self._lock:
            if session in self._episodes:
                tag, env = self._episodes.pop(session)
                self._spare[tag].append(env)

    def _begin_episode(self, session: int, tag: str) -> Env:
        """Returns the environment of a new episode: a spare one of the tag, or a new one."""
        env: Env | None = None
        with self._lock:
            if self._spare[tag]:
                env = self._spare[tag].pop()
        # outside of the lock, because a constructor may take long and other episodes continue meanwhile
        if env is None:
            env = self._templates[tag].make()
        with self._lock:
            self._episodes[session] = (tag, env)
        return env

    def _close(self, session: int) -> None:
        """Discards the environment of an episode, if it was constructed."""
        with self._lock:
            _, env = self._episodes.pop(session, (None, None))
        # it is discarded, whether or not it can be closed
        with contextlib.suppress(BaseException):
            close = getattr(env, "close", None)
            if callable(close):
                close()


def _random_action(env: Env) -> str:
    """Returns an action that the environment draws; empty if it has no such method."""
    sample = getattr(env, "sample_random_action", None)
    action = sample() if callable(sample) else ""
    return _text("sample_random_action", action)


def read_reset(result: object) -> EnvReply:
    """Returns the values of a reset as a reply. Raises NonsenseError if one of them is invalid."""
    observation, info = _parts("reset", result, "(observation, info)")
    text = _text("the observation of reset", observation)
    return EnvReply(key=None, observation=text, info=_info("reset", info))


def read_step(result: object) -> EnvReply:
    """Returns the five values of a step as a reply. Raises NonsenseError if one of them is invalid."""
    expected = "(observation, reward, terminated, truncated, info)"
    observation, reward, terminated, truncated, info = _parts("step", result, expected)
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        _expect(_is_flag(flag), f"{name} of step", flag, "true or false")
    return EnvReply(
        # `EnvPool` sets key and duration
        key=None,
        observation=_text("the observation of step", observation),
        reward=read_number("the reward of step", reward),
        terminated=bool(terminated),
        truncated=bool(truncated),
        info=_info("step", info),
    )


def _parts(method: str, result: object, expected: str) -> tuple[object, ...]:
    """Returns the values of a reset or a step as a tuple.

    Args:
        method: "reset" or "step".
        result: What it returned.
        expected: Names of the values in parentheses, which tell their number.

    Raises:
        NonsenseError: It is no tuple or list of this number of values.
    """
    number = expected.count(",") + 1
    if not isinstance(result, tuple | list) or len(result) != number:
        raise _nonsense(f"what {method} gave", result, f"{number} values: a tuple {expected}")
    return tuple(result)


def _text(subject: str, value: object) -> str:
    """Returns a text of an environment. Raises NonsenseError if it is no text, or if no tokenizer could encode it.

    Args:
        subject: Name of the value, for the message.
        value: The value.
    """
    if not isinstance(value, str):
        raise _nonsense(subject, value, "text")
    # lone surrogates become question marks here
    encodable = value.encode(errors="replace").decode()
    _expect(value == encodable, subject, value, "text that UTF-8 can encode")
    return str(value)


def read_number(subject: str, value: object) -> float:
    """Returns a number of an environment or a program as a float, also that of a numpy scalar.

    Args:
        subject: Name of the value, for the message.
        value: The value.

    Raises:
        NonsenseError: It is no finite number.
    """
    number = value
    # a numpy scalar, or an array of one number; numpy itself is not imported
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", 1) == 1:
        number = item()
    if not isinstance(number, numbers.Real):
        raise _nonsense(subject, number, "a finite number")

    try:
        is_finite = math.isfinite(number)
    except OverflowError:
        # an integer or a fraction that no float can hold
        is_finite = False
    _expect(is_finite, subject, number, "a finite number")
    return float(number)


def check_metric_names(subject: str, names: Iterable[object]) -> None:
    """Raises NonsenseError if there are more than METRICS_MAX names, or if one cannot be part of a metric's name.

    Args:
        subject: Where the names come from, for the message.
        names: The names.
    """
    names = list(names)
    _expect(len(names) <= METRICS_MAX, f"the number of metrics in {subject}", len(names), f"at most {METRICS_MAX}")
    expected = "at most 100 letters, digits, spaces and . : @ % + / - _, and no space or / at its beginning"
    for name in names:
        is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None
        _expect(is_name, f"the name of a metric in {subject}", name, expected)


def _is_flag(value: object) -> bool:
    # numpy's type is compared by name, so that environments without numpy do not import it
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")


def _info(method: str, info: object) -> JsonObject:
    """Returns a checked copy of the info of a reset or a step: with Python's numbers and flags instead of numpy's."""
    where = f"in the info of {method}"
    checked = _mapping(f"the info of {method}", info)
    for key in ("suffix", "env_instruction"):
        if checked.get(key) is not None:
            checked[key] = _text(f"{key} {where}", checked[key])
    if checked.get("metrics") is not None:
        checked["metrics"] = _metrics(method, checked["metrics"])

    modes = _mapping(f"metrics_agg_mode {where}", checked.get("metrics_agg_mode") or {})
    expected = f"one of {', '.join(AGGREGATIONS)}"
    for name, mode in modes.items():
        _expect(mode in AGGREGATIONS, f"metrics_agg_mode[{name!r}] {where}", mode, expected)
    return checked


def _metrics(method: str, value: object) -> JsonObject:
    """Returns the metrics in the info of a reset or a step, as numbers and flags."""
    where = f"in the info of {method}"
    metrics = _mapping(f"metrics {where}", value)
    check_metric_names(f"the metrics {where}", metrics)
    for name, number in metrics.items():
        _expect(name not in RESERVED, f"a metric's name {where}", name, f"another name: the trainer logs env/{name}")
        if _is_flag(number):
            metrics[name] = bool(number)
        else:
            metrics[name] = read_number(f"metric {name!r} of {method}", number)
    return metrics


def _mapping(subject: str, value: object) -> JsonObject:
    """Returns a copy of a dictionary. Raises NonsenseError for another value."""
    if not isinstance(value, Mapping):
        raise _nonsense(subject, value, "a dictionary")
    return dict(value)


def _expect(is_right: bool, subject: str, value: object, expected: str) -> None:
    """Raises NonsenseError unless `is_right`. The other arguments are those of `_nonsense`."""
    if not is_right:
        raise _nonsense(subject, value, expected)


def _nonsense(subject: str, value: object, expected: str) -> NonsenseError:
    """Returns the error for an invalid value.

    Args:
        subject: Name of the value.
        value: The value.
        expected: Description of valid values.
    """
    # the representation of a value of untrusted code may have any length
    text = repr(value)
    if len(text) > _SHOWN_CHARS:
        text = text[:_SHOWN_CHARS] + "..."
    return NonsenseError(f"{subject} is {text}, expected {expected}")
