"""What is searched: the parameters that `key=value` words stand for.

actor.optim.lr=1e-6,3e-6            choices
actor.optim.lr=log(1e-7,1e-5)       a range on a logarithmic scale
actor.clip_ratio=uniform(0.1,0.3)   an even range
rollout.n=int(2,16)                 whole numbers
data.train_files=[a,b]              one value: what stands in brackets or quotes is no choice
@name={"a": {"key": 1, "other": 2}, "b": {"key": 3}}   several settings at once, from a sweep file
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from verl_lite.config import split_choices
from verl_lite.errors import UserError

Value = str | int | float
"""Of a parameter in a trial: the label of a choice, or a number of a range."""

MOST_LISTED = 100_000
"""Combinations of a grid; more is a mistake."""

_CALL = re.compile(r"([a-z_]+)\((.*)\)", re.DOTALL)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the search. choices: words of a command by label; or else a range."""

    name: str
    choices: Mapping[str, list[str]]
    range: FloatDistribution | IntDistribution | None = None

    @property
    def distribution(self) -> BaseDistribution:
        return self.range or CategoricalDistribution(list(self.choices))

    def words(self, value: Value) -> list[str]:
        """Of a command, for this value."""
        return self.choices[str(value)] if self.choices else [f"{self.name}={value}"]

    def values(self) -> list[Value] | None:
        """All of them in order; None if there is no end of them."""
        if isinstance(self.range, IntDistribution) and self.range.high - self.range.low < MOST_LISTED:
            return list(range(self.range.low, self.range.high + 1))
        return None if self.range else list(self.choices)

    def ends(self) -> list[Value]:
        """All choices; of a range both ends."""
        return [self.range.low, self.range.high] if self.range else list(self.choices)


Space = tuple[Parameter, ...]


def combinations(space: Space, *, corners: bool = False) -> Iterator[dict[str, Value]]:
    """All combinations, the last parameter varying fastest; corners: of the ends of ranges.

    Raises:
        UserError: a grid with a range that has no end of values, or with more than `MOST_LISTED` combinations.
    """
    values = [parameter.ends() if corners else parameter.values() for parameter in space]
    lists = [listed for listed in values if listed is not None]
    if len(lists) < len(values) or (not corners and math.prod(map(len, lists)) > MOST_LISTED):
        raise UserError(
            f"a grid needs values, at most {MOST_LISTED:,} combinations: give choices (KEY=A,B,C), or search it with "
            "--random N or --optuna N"
        )
    return (dict(zip((p.name for p in space), chosen, strict=True)) for chosen in itertools.product(*lists))


def read_parameter(word: str) -> Parameter | None:
    """The parameter that a word stands for; None if it has one value. Raises UserError."""
    key, _, raw = word.partition("=")
    if key.startswith("@"):
        entries = json.loads(raw).items()
        return Parameter(key[1:], {label: [f"{k}={as_text(v)}" for k, v in one.items()] for label, one in entries})
    if (call := _CALL.fullmatch(raw.strip())) is not None:
        return Parameter(key, {}, _range(call[1], call[2].split(","), word))
    labels = split_choices(raw.strip())
    if len(labels) > 1 and ("" in labels or len(set(labels)) < len(labels)):
        raise UserError(f"{word}: a choice is empty or there twice; for repetitions give --seeds 3")
    return Parameter(key, {label: [f"{key}={label}"] for label in labels}) if len(labels) > 1 else None


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
