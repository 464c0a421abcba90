"""Several rewards under names of one's own: the entries of `reward.functions`, read and checked.

An entry is a mapping, `{reward: NAME}` for a registered function, `{path: FILE.py, name: FUNCTION}` for a function of
your own, or neither: then the row's data_source picks the function. Each may have `weight`, `kwargs`, `style` (of an
own function) and `outcome`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_lite.errors import UserError
from verl_lite.registry import accepts, did_you_mean
from verl_lite.rewards.dispatch import RewardFunction, find_named_reward

OPTION = "reward.functions"
STYLES = ("sample", "batch", "trl")
ENTRIES = ("reward", "path", "name", "style", "weight", "kwargs", "outcome")

_NAME = re.compile(r"[A-Za-z][\w-]*")
_TAKEN = (
    "score",
    "model",
    "function",
    "error_rate",
    "timeout_rate",
    "processes_replaced",
    "overlong",
    "overlong_reward",
)
"""What other columns and metrics are called: reward/model, reward/error_rate ..."""


@dataclass(frozen=True)
class RewardPart:
    """One of several rewards. label: its name in the score, in columns and metrics.

    reward: a registered one; path, name, style: a function of your own, as in reward.custom_reward_function; neither
    reward nor path: by data_source. weight: what its score counts times. is_outcome: its `acc` and `pred` are those of
    the sample; exactly one part says so.
    """

    label: str
    reward: str | None = None
    path: str | None = None
    name: str = "compute_score"
    style: str = "sample"
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_outcome: bool = False

    @property
    def option(self) -> str:
        """Its key in the configuration."""
        return f"{OPTION}.{self.label}"

    @property
    def is_by_source(self) -> bool:
        """Whether the row's data_source picks its function."""
        return self.reward is None and self.path is None


def reward_parts(functions: Mapping[str, Any]) -> list[RewardPart]:
    """The parts of `reward.functions`, in their order. Raises UserError with every problem."""
    problems = list(part_problems(functions))
    if problems:
        raise UserError("; ".join(problems))
    entries = {label: dict(entry or {}) for label, entry in functions.items()}
    outcome = next((label for label, entry in entries.items() if entry.get("outcome")), next(iter(entries), None))
    return [
        RewardPart(
            label,
            entry.get("reward"),
            entry.get("path"),
            entry.get("name", "compute_score"),
            entry.get("style", "sample"),
            float(entry.get("weight", 1.0)),
            dict(entry.get("kwargs") or {}),
            label == outcome,
        )
        for label, entry in entries.items()
    ]


def part_problems(functions: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with `reward.functions`, as far as it can be seen without running the user's files."""
    for label, entry in functions.items():
        option = f"{OPTION}.{label}"
        if not _NAME.fullmatch(label):
            yield f"{option}: the name of a part consists of letters, digits, _ and -, and begins with a letter"
        elif label in _TAKEN:
            yield f"{option}: reward/{label} is the name of something else; call the part otherwise"
        if entry is not None and not isinstance(entry, Mapping):
            yield (
                f"{option}={entry!r}: a mapping is expected, such as {{reward: format, weight: 0.1}} or "
                "{path: my_reward.py, name: compute_score}"
            )
            continue
        yield from _entry_problems(option, entry or {})
    outcomes = [label for label, entry in functions.items() if isinstance(entry, Mapping) and entry.get("outcome")]
    if len(outcomes) > 1:
        yield (
            f"{OPTION}: {' and '.join(outcomes)} have outcome: true; one part says whether an answer is right "
            "(without any, the first)"
        )


def check_kwargs(function: RewardFunction, kwargs: Mapping[str, Any], option: str) -> None:
    """Raises UserError if there is an argument that the function does not take."""
    for problem in kwargs_problems(function, kwargs, option):
        raise UserError(problem)


def kwargs_problems(function: RewardFunction, kwargs: Mapping[str, Any], option: str) -> Iterator[str]:
    """One sentence for each argument that the function does not take."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    for name in kwargs:
        if not accepts(function, name):
            hint = did_you_mean(name, names)
            taken = [known for known in names if known not in ("data_source", "solution_str", "extra_info", "prompt")]
            yield f"{option}.kwargs.{name}: the function has no such argument.{hint} It takes {', '.join(taken)}"


def _entry_problems(option: str, entry: Mapping[str, Any]) -> Iterator[str]:
    for key in entry:
        if key not in ENTRIES:
            hint = did_you_mean(str(key), ENTRIES)
            yield f"{option}.{key}: there is no such entry.{hint} Known: {', '.join(ENTRIES)}"
    yield from _type_problems(option, entry)
    reward, path, kwargs = (entry.get(key) for key in ("reward", "path", "kwargs"))
    if reward is not None and path is not None:
        yield f"{option}: reward={reward} and path={path}: one of them can be the function; leave the other out"
    elif isinstance(reward, str):
        try:
            function = find_named_reward(reward)
        except UserError as error:
            yield f"{option}.reward={reward}: {error}"
        else:
            yield from kwargs_problems(function, kwargs if isinstance(kwargs, Mapping) else {}, option)
    if path is None:
        for key, default in (("name", "compute_score"), ("style", "sample")):
            if entry.get(key, default) != default:
                yield f"{option}.{key}={entry[key]} has no effect without {option}.path: name a file, or leave it out"


def _type_problems(option: str, entry: Mapping[str, Any]) -> Iterator[str]:
    for key in ("reward", "path", "name"):
        if not isinstance(entry.get(key, ""), str | None):
            yield f"{option}.{key}={entry[key]!r}: text is expected"
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        yield f"{option}.weight={weight!r}: a finite number is expected"
    if not isinstance(entry.get("kwargs") or {}, Mapping):
        yield f"{option}.kwargs={entry['kwargs']!r}: a mapping is expected, such as {{limit: 10}}"
    if not isinstance(entry.get("outcome", False), bool):
        yield f"{option}.outcome={entry['outcome']!r}: true or false is expected"
    if entry.get("style", "sample") not in STYLES:
        yield f"{option}.style={entry['style']!r}: one of {', '.join(STYLES)} is expected"
