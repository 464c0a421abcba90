"""What is searched: the parameters that `key=value` words stand for (SWEEPS.md has their table), and of a sweep file
`@name={"a": {"key": 1, "other": 2}, "b": {"key": 3}}`, several settings at once."""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from verl_lite.config import split_choices
from verl_lite.errors import UserError

Value = str | int | float
"""Of a parameter in a trial: the label of a choice, or a number of a range."""

MOST_LISTED = 100_000
"""Combinations of a grid; more is a mistake."""

_CALL = re.compile(r"([a-z_]+)\((.*)\)", re.DOTALL)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the search. settings: words of a command by label, where a label is more than a value."""

    name: str
    distribution: CategoricalDistribution | FloatDistribution | IntDistribution
    settings: Mapping[str, list[str]] = field(default_factory=dict)

    def words(self, value: Value) -> list[str]:
        """Of a command, for this value."""
        return self.settings.get(str(value), [f"{self.name}={value}"])

    def values(self, *, ends: bool = False) -> list[Any] | None:
        """All of them in order; None if there is no end of them. ends: of a range both ends."""
        known = self.distribution
        if isinstance(known, CategoricalDistribution):
            return list(known.choices)
        if ends:
            return [known.low, known.high]
        is_listed = isinstance(known, IntDistribution) and known.high - known.low < MOST_LISTED
        return list(range(int(known.low), int(known.high) + 1)) if is_listed else None


def combinations(space: Sequence[Parameter], *, corners: bool = False) -> Iterator[dict[str, Value]]:
    """All combinations, the last parameter varying fastest; corners: of the ends of ranges. Raises UserError for a
    grid with a range that has no end of values, or with more than `MOST_LISTED` combinations."""
    lists = [listed for p in space if (listed := p.values(ends=corners)) is not None]
    if len(lists) < len(space) or (not corners and math.prod(map(len, lists)) > MOST_LISTED):
        raise UserError(
            f"a grid needs values, at most {MOST_LISTED:,} combinations: give choices (KEY=A,B,C), or search it with "
            "--random N or --optuna N"
        )
    return (dict(zip((p.name for p in space), chosen, strict=True)) for chosen in itertools.product(*lists))


def read_parameter(word: str) -> Parameter | None:
    """The parameter that a word stands for; None if it has one value. Raises UserError."""
    key, _, raw = word.partition("=")
    if key.startswith("@"):
        settings = {label: [f"{k}={as_text(v)}" for k, v in one.items()] for label, one in json.loads(raw).items()}
        return Parameter(key[1:], CategoricalDistribution(list(settings)), settings)
    if (call := _CALL.fullmatch(raw.strip())) is not None:
        return Parameter(key, _range(call[1], call[2].split(","), word))
    labels = split_choices(raw.strip())
    if len(labels) > 1 and ("" in labels or len(set(labels)) < len(labels)):
        raise UserError(f"{word}: a choice is empty or there twice; for repetitions give --seeds 3")
    return Parameter(key, CategoricalDistribution(labels)) if len(labels) > 1 else None


def as_text(value: Any) -> str:
    """A value of a YAML file as a command line has it."""
    if isinstance(value, list):
        return "[" + ",".join(as_text(item) for item in value) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool | dict) else str(value)


def _range(kind: str, ends: list[str], word: str) -> IntDistribution | FloatDistribution:
    try:
        low, high = (int(end) if kind == "int" else float(end) for end in ends)
        if kind not in ("log", "uniform", "int") or not math.isfinite(high - low) or low == high:
            raise ValueError("expected a range with two different, finite numbers")
        if kind == "int":
            return IntDistribution(int(low), int(high))
        return FloatDistribution(low, high, log=kind == "log")
    except ValueError as error:  # Optuna's own words on what is upside down, at or below 0 on a logarithmic scale ...
        raise UserError(f"{word}: {error}; ranges are log(1e-7,1e-5), uniform(0,1), int(1,8)") from None
