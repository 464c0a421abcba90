"""How an option is declared: a dataclass field that carries its default, its sentence of documentation, its range."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Range:
    """Which values an option takes, and how that is said; null passes where the option may be null."""

    words: str
    holds: Callable[[Any], bool]


def at_least(least: float) -> Range:
    return Range(f"at least {least} is expected", lambda value: value >= least)


POSITIVE = Range("a number above 0 is expected", lambda value: 0 < value < math.inf)
SHARE = Range("a share between 0 and 1 is expected", lambda value: 0 <= value <= 1)
POSITIVE_SHARE = Range("a share above 0 and at most 1 is expected", lambda value: 0 < value <= 1)
ALL_OR_SOME = Range("-1 (all) or at least 1 is expected", lambda value: value == -1 or value >= 1)
MOMENTS = Range(
    "two numbers from 0 up to but not 1 are expected, such as [0.9,0.999]",
    lambda values: len(values) == 2 and all(0 <= value < 1 for value in values),
)


def opt(default: Any, doc: str, expects: Range | tuple[str, ...] | None = None) -> Any:
    """A dataclass field with its documentation; lists and dicts get a fresh copy for each instance.

    expects: the range of a number, or the words that a text may be; `verl_lite.config.checks.config.ranges` checks it.
    """
    metadata = {"doc": doc, "expects": expects}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, doc: str) -> Any:
    """A nested group of options, built fresh for each instance."""
    return field(default_factory=cls, metadata={"doc": doc})
