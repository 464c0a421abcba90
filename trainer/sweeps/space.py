"""What is searched: the parameters of a sweep, read from `key=value` words and from a sweep file.

    actor.optim.lr=1e-6,3e-6            choices
    actor.optim.lr=log(1e-7,1e-5)       a range on a logarithmic scale
    actor.clip_ratio=uniform(0.1,0.3)   an even range; uniform(0.1,0.3,step=0.05) a grid of it
    rollout.n=int(2,16)                 whole numbers; int(2,16,step=2), int(1,64,log)
    data.train_files=[a,b]              one value: what stands in brackets or quotes is no choice

Takes text; gives a `Space`, which knows its grid, its corners, Optuna's distributions, and the words that a trial's
command has for its parameters.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_lite.config import split_choices
from verl_lite.errors import UserError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Value = str | int | float
"""Of a parameter in a trial: the label of a choice, or a number of a range."""

_CALL = re.compile(r"([a-z_]+)\((.*)\)", re.DOTALL)
_KINDS = ("log", "uniform", "int")
_EXAMPLES = "log(1e-7,1e-5), uniform(0,1), int(1,8)"
_MOST_VALUES = 100_000
"""Of a grid; more is a mistake."""


@dataclass(frozen=True)
class Choice:
    """label: what the user wrote. settings: the words of a command that it stands for."""

    label: str
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Choices:
    """A parameter with a few values."""

    name: str
    options: tuple[Choice, ...]

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution([option.label for option in self.options])

    def settings(self, value: Value) -> tuple[str, ...]:
        return next(option.settings for option in self.options if option.label == value)

    def count(self) -> int | None:
        return len(self.options)

    def values(self) -> list[Value]:
        return [option.label for option in self.options]

    def ends(self) -> list[Value]:
        return self.values()

    def between(self) -> list[Value]:
        return []

    def written(self) -> Any:
        """What a study keeps of it: the labels, or the settings of each where they are more than `key=label`."""
        plain = all(option.settings == (f"{self.name}={option.label}",) for option in self.options)
        labels = [option.label for option in self.options]
        return labels if plain else {option.label: list(option.settings) for option in self.options}


@dataclass(frozen=True)
class Range:
    """A parameter between two numbers, both included. word: the key with its operator. step: None = any number."""

    name: str
    word: str
    whole: bool
    low: float
    high: float
    step: float | None = None
    log: bool = False

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log, step=int(self.step or 1))
        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def settings(self, value: Value) -> tuple[str, ...]:
        return (f"{self.word}={int(value) if self.whole else repr(float(value))}",)

    def count(self) -> int | None:
        """Number of values; None if there is no end of them."""
        if not self.whole and self.step is None:
            return None
        return int((self.high - self.low) / (self.step or 1) + 1e-9) + 1

    def values(self) -> list[Value]:
        """All of them; none if there is no end of them."""
        step, steps = self.step or 1, range(self.count() or 0)
        if self.whole:
            return [int(self.low + number * step) for number in steps]
        return [float(f"{self.low + number * step:.12g}") for number in steps]

    def ends(self) -> list[Value]:
        ends = dict.fromkeys((self.low, self.high))
        return [int(end) if self.whole else float(end) for end in ends]

    def between(self) -> list[Value]:
        """A value that is no whole number, if there is one: an end may be one by chance."""
        inside = self.values()[1:2] or [self.low + (self.high - self.low) / math.pi]
        return [value for value in inside if value != int(value)]

    def written(self) -> str:
        """The canonical text of it."""
        step = "" if self.step is None else f",step={self.step:g}"
        if self.whole:
            return f"int({int(self.low)},{int(self.high)}{step}{',log' if self.log else ''})"
        return f"{'log' if self.log else 'uniform'}({self.low!r},{self.high!r}{step})"


Parameter = Choices | Range


@dataclass(frozen=True)
class Space:
    """All parameters of a sweep, in the order in which they were given."""

    parameters: tuple[Parameter, ...]

    def distributions(self) -> dict[str, BaseDistribution]:
        return {parameter.name: parameter.distribution() for parameter in self.parameters}

    def size(self) -> int | None:
        """Number of combinations; None if there is no end of them."""
        counts = [count for parameter in self.parameters if (count := parameter.count()) is not None]
        return math.prod(counts) if len(counts) == len(self.parameters) else None

    def is_listed(self, kind: str) -> bool:
        """Whether trials are combinations of a list: those of a grid, and of a random choice where one can be made."""
        size = self.size()
        return kind == "grid" or (kind == "random" and size is not None and size <= _MOST_VALUES)

    def grid(self) -> Iterator[dict[str, Value]]:
        """All combinations, the last parameter varying fastest. Raises UserError if a range has no end of values."""
        endless = [parameter.name for parameter in self.parameters if parameter.count() is None]
        if endless:
            raise UserError(
                f"{endless[0]} is a range, and a grid needs values: give choices ({endless[0]}=A,B,C) or a step "
                "(uniform(0,1,step=0.25)), or search it with --random N or --optuna N"
            )
        size = self.size() or 0
        if size > _MOST_VALUES:
            raise UserError(f"the grid has {size:,} combinations: search it with --random N or --optuna N")
        yield from self._combinations([parameter.values() for parameter in self.parameters])

    def corners(self, most: int) -> Iterator[dict[str, Value]]:
        """Combinations of all choices with the ends of all ranges, the first `most` of them."""
        yield from itertools.islice(self._combinations([parameter.ends() for parameter in self.parameters]), most)

    def _combinations(self, values: Sequence[Sequence[Value]]) -> Iterator[dict[str, Value]]:
        names = [parameter.name for parameter in self.parameters]
        return (dict(zip(names, combination, strict=True)) for combination in itertools.product(*values))

    def settings(self, values: Mapping[str, Value]) -> list[str]:
        """The words of a trial's command."""
        return [word for parameter in self.parameters for word in parameter.settings(values[parameter.name])]

    def samples(self) -> Iterator[list[str]]:
        """Settings in which each value of each parameter occurs, ranges by their ends and a value between: few, to be
        checked each."""
        ends = [[*parameter.ends(), *parameter.between()] for parameter in self.parameters]
        for place in range(max(map(len, ends), default=1)):
            chosen = {
                p.name: values[min(place, len(values) - 1)] for p, values in zip(self.parameters, ends, strict=True)
            }
            yield self.settings(chosen)

    def written(self) -> dict[str, Any]:
        """What a study keeps, and reads again with `read_space`."""
        return {parameter.name: parameter.written() for parameter in self.parameters}


def read_space(written: Mapping[str, Any]) -> tuple[Space, list[str]]:
    """From a mapping of keys to a text (`log(..)`, `a,b`), a list of choices, or a mapping of names to settings.

    Gives the space and the words of keys that have one value only. Raises UserError.
    """
    parameters: list[Parameter] = []
    fixed: list[str] = []
    for key, value in written.items():
        if isinstance(value, Mapping):
            parameters.append(_variants(str(key), value))
        elif isinstance(value, list | tuple):
            labels = [as_word(item) for item in value]
            parameters.append(_choices(str(key), labels, f"{key}: {list(value)}"))
        else:
            parameter = read_parameter(f"{key}={as_word(value)}")
            if parameter is None:
                fixed.append(f"{key}={as_word(value)}")
            else:
                parameters.append(parameter)
    return Space(tuple(parameters)), fixed


def read_parameter(word: str) -> Parameter | None:
    """The parameter that `key=value` stands for; None if it has one value. Raises UserError for what is no range."""
    key, equals, raw = word.partition("=")
    name, raw = key.lstrip("+"), raw.strip()
    if not equals or key.startswith("~"):
        return None
    call = _CALL.fullmatch(raw)
    if call is not None:
        return _range(name, key, call.group(1), call.group(2), word)
    labels = split_choices(raw)
    return _choices(key, labels, word) if len(labels) > 1 else None


def _choices(word: str, labels: Sequence[str], shown: str) -> Choices:
    if not labels or "" in labels:
        raise UserError(f"{shown}: there is an empty choice; write {word}=A,B")
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        raise UserError(f"{shown}: {twice[0]} is there twice; for repetitions give seeds=3")
    return Choices(word.lstrip("+"), tuple(Choice(label, (f"{word}={label}",)) for label in labels))


def _variants(name: str, entries: Mapping[Any, Any]) -> Choices:
    """Names, each for several settings at once: a mapping of keys to values, or a list of words."""
    options = []
    for label, settings in entries.items():
        if isinstance(settings, Mapping):
            words = [f"{key}={as_word(value)}" for key, value in settings.items()]
        elif isinstance(settings, list):
            words = [str(word) for word in settings]
        else:
            raise UserError(f"space.{name}.{label}: {settings!r} is no mapping of keys to values")
        options.append(Choice(str(label), tuple(words)))
    if not options:
        raise UserError(f"space.{name}: a mapping of names to settings is expected, it is empty")
    return Choices(name, tuple(options))


def as_word(value: Any) -> str:
    """A value of a YAML file as a command line has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(as_word(item) for item in value) + "]"
    return "null" if value is None else str(value)


def _range(name: str, word: str, kind: str, inside: str, shown: str) -> Range:
    if kind not in _KINDS:
        near = difflib.get_close_matches(kind, _KINDS, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{shown}: {kind}(...) is no range{hint} There are {_EXAMPLES}; a text belongs in quotes")
    numbers: list[float] = []
    step: float | None = None
    log = kind == "log"
    for part in (part.strip() for part in inside.split(",")):
        if part in ("log", "log=true"):
            log = True
        elif part.startswith("step="):
            step = _number(part.removeprefix("step="), shown)
        else:
            numbers.append(_number(part, shown))
    if len(numbers) != 2:
        raise UserError(f"{shown}: {len(numbers)} numbers; a range has two, such as {_EXAMPLES}")
    found = Range(name, word, kind == "int", numbers[0], numbers[1], step, log)
    _check_range(found, kind, shown)
    return found


def _number(text: str, shown: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{shown}: {text!r} is no number; ranges are {_EXAMPLES}, with step=S or log") from None


def _check_range(found: Range, kind: str, shown: str) -> None:
    if not (abs(found.low) < float("inf") and abs(found.high) < float("inf")):
        raise UserError(f"{shown}: a range ends at finite numbers")
    if found.low > found.high:
        raise UserError(
            f"{shown}: the range is upside down, {found.low:g} is above {found.high:g}; write "
            f"{found.name}={kind}({found.high:g},{found.low:g})"
        )
    if found.low == found.high:
        raise UserError(f"{shown}: the range has one value; write {found.name}={found.low:g}")
    if found.log and found.low <= 0:
        raise UserError(f"{shown}: a logarithmic range begins above 0, not at {found.low:g}")
    if found.step is not None and (found.log or found.step <= 0):
        why = "a logarithmic range has no steps" if found.log else "a step is above 0"
        raise UserError(f"{shown}: {why}; leave step={found.step:g} out")
    numbers = [found.low, found.high, *([] if found.step is None else [found.step])]
    if found.whole and any(number != int(number) for number in numbers):
        raise UserError(f"{shown}: int(...) takes whole numbers; for others write uniform(...) or log(...)")


def space_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One sentence for each parameter that is not what it was; both as `Space.written` gives them."""
    changes = [f"{name} is new: {now[name]}" for name in now if name not in before]
    changes += [f"{name} is gone; it was {before[name]}" for name in before if name not in now]
    both = [name for name in now if name in before and now[name] != before[name]]
    return changes + [f"{name} was {before[name]}, and is {now[name]}" for name in both]
