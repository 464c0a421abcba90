"""What is searched: parameters read from `key=value` words and from a sweep file, as Optuna's distributions.

actor.optim.lr=1e-6,3e-6            choices
actor.optim.lr=log(1e-7,1e-5)       a range on a logarithmic scale
actor.clip_ratio=uniform(0.1,0.3)   an even range; uniform(0.1,0.3,step=0.05) a grid of it
rollout.n=int(2,16)                 whole numbers; int(2,16,step=2), int(1,64,log)
data.train_files=[a,b]              one value: what stands in brackets or quotes is no choice
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from verl_lite.config import did_you_mean, split_choices
from verl_lite.errors import UserError

Value = str | int | float
"""Of a parameter in a trial: the label of a choice, or a number of a range."""

MOST_LISTED = 100_000
"""Combinations of a grid; more is a mistake."""

_CALL = re.compile(r"([a-z_]+)\((.*)\)", re.DOTALL)
_KINDS = ("log", "uniform", "int")
_EXAMPLES = "log(1e-7,1e-5), uniform(0,1), int(1,8)"


@dataclass(frozen=True)
class Parameter:
    """A parameter of the search.

    Args:
        key: in the command's words, with its operator (`+key`), or a name of the user's for several settings at once.
        written: what study.json keeps, and `read_space` reads again.
        variants: the command's words of each choice, where they are more than `key=choice`.
    """

    key: str
    written: Any
    distribution: BaseDistribution
    variants: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.key.lstrip("+")

    def words(self, value: Value) -> list[str]:
        """Of a command, for this value."""
        return list(self.variants[str(value)]) if self.variants else [f"{self.key}={value}"]

    def values(self) -> list[Value] | None:
        """All of them in order; None if there is no end of them."""
        kind = self.distribution
        if isinstance(kind, CategoricalDistribution):
            return [str(choice) for choice in kind.choices]
        if isinstance(kind, IntDistribution):
            return list(range(kind.low, kind.high + 1, kind.step)) if kind.high - kind.low <= MOST_LISTED else None
        assert isinstance(kind, FloatDistribution)
        if kind.step is None:
            return None
        return [float(f"{kind.low + i * kind.step:.12g}") for i in range(round((kind.high - kind.low) / kind.step) + 1)]

    def ends(self) -> list[Value]:
        """All choices; of a range both ends and a number between, which is no whole one if there is such."""
        kind = self.distribution
        if isinstance(kind, CategoricalDistribution):
            return [str(choice) for choice in kind.choices]
        assert isinstance(kind, IntDistribution | FloatDistribution)
        listed, between = self.values(), kind.low + (kind.high - kind.low) / math.pi
        inside = listed[1:2] if listed else [int(between) if isinstance(kind, IntDistribution) else between]
        return list(dict.fromkeys([kind.low, kind.high, *inside]))


Space = tuple[Parameter, ...]


def combinations(space: Space, *, corners: bool = False) -> Iterator[dict[str, Value]]:
    """All combinations, the last parameter varying fastest; corners: of the ends of ranges.

    Raises:
        UserError: a grid with a range that has no end of values, or with more than `MOST_LISTED` combinations.
    """
    values = [parameter.ends() if corners else parameter.values() for parameter in space]
    if None in values:
        name = space[values.index(None)].name
        raise UserError(
            f"{name} is a range, and a grid needs values: give choices ({name}=A,B,C) or a step "
            "(uniform(0,1,step=0.25)), or search it with --random N or --optuna N"
        )
    lists = [listed for listed in values if listed is not None]
    if not corners and math.prod(map(len, lists)) > MOST_LISTED:
        raise UserError(f"the grid has more than {MOST_LISTED:,} combinations: search it with --random N or --optuna N")
    return (dict(zip((p.name for p in space), chosen, strict=True)) for chosen in itertools.product(*lists))


def words_of(space: Space, values: Mapping[str, Value]) -> list[str]:
    """The words of a trial's command that its parameters give it."""
    return [word for parameter in space for word in parameter.words(values[parameter.name])]


def read_space(written: Mapping[str, Any]) -> tuple[Space, list[str]]:
    """From a mapping of keys to a text (`log(..)`, `a,b`), a list of choices, or a mapping of names to settings.

    Returns:
        The space, and the words of keys that have one value only.

    Raises:
        UserError: for an entry that means nothing.
    """
    parameters, fixed = [], []
    for key, value in written.items():
        if isinstance(value, Mapping):
            parameters.append(_variants(str(key), value))
        elif isinstance(value, list | tuple):
            parameters.append(_choices(str(key), [as_text(item) for item in value]))
        elif (found := read_parameter(word := f"{key}={as_text(value)}")) is not None:
            parameters.append(found)
        else:
            fixed.append(word)
    return tuple(parameters), fixed


def read_parameter(word: str) -> Parameter | None:
    """The parameter that `key=value` stands for; None if it has one value. Raises UserError for what is no range."""
    key, equals, raw = word.partition("=")
    if not equals or key.startswith("~"):
        return None
    if (call := _CALL.fullmatch(raw.strip())) is not None:
        return Parameter(key, raw.strip(), _range(call[1], call[2], word))
    labels = split_choices(raw.strip())
    return _choices(key, labels) if len(labels) > 1 else None


def as_text(value: Any) -> str:
    """A value of a YAML file as a command line has it."""
    if isinstance(value, list):
        return "[" + ",".join(as_text(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _choices(key: str, labels: list[str]) -> Parameter:
    if not labels or "" in labels:
        raise UserError(f"{key}={','.join(labels)}: there is an empty choice; write {key}=A,B")
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UserError(f"{key}={','.join(labels)}: {twice[0]} is there twice; for repetitions give --seeds 3")
    return Parameter(key, labels, CategoricalDistribution(labels))


def _variants(name: str, entries: Mapping[Any, Any]) -> Parameter:
    words: dict[str, list[str]] = {}
    for label, settings in entries.items():
        if isinstance(settings, Mapping):
            words[str(label)] = [f"{key}={as_text(value)}" for key, value in settings.items()]
        elif isinstance(settings, list):
            words[str(label)] = settings
        else:
            raise UserError(f"space.{name}.{label}: {settings!r} is no mapping of keys to values")
    if not words:
        raise UserError(f"space.{name}: a mapping of names to settings is expected, it is empty")
    return Parameter(name, words, CategoricalDistribution(list(words)), words)


def _range(kind: str, inside: str, word: str) -> IntDistribution | FloatDistribution:
    if kind not in _KINDS:
        raise UserError(
            f"{word}: {kind}(...) is no range{did_you_mean(kind, _KINDS)}. There are {_EXAMPLES}; a text belongs in "
            "quotes"
        )
    parts = [part.strip() for part in inside.split(",")]
    log = kind == "log" or "log" in parts
    steps = [part.removeprefix("step=") for part in parts if part.startswith("step=")]
    ends = [part for part in parts if part != "log" and not part.startswith("step=")]
    try:
        low, high, *step = [int(text) if kind == "int" else float(text) for text in (*ends, *steps)]
        if len(ends) != 2 or not all(math.isfinite(number) for number in (low, high, *step)) or low == high:
            raise ValueError("a range has two different, finite numbers")
        if kind == "int":
            return IntDistribution(int(low), int(high), log=log, step=int(step[0]) if step else 1)
        return FloatDistribution(low, high, log=log, step=step[0] if step else None)
    except ValueError as error:  # Optuna's own words on what is upside down, at or below 0 on a logarithmic scale ...
        raise UserError(f"{word}: {error}; ranges are {_EXAMPLES}, with step=S or log") from None
