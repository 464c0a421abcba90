"""Declares options: a dataclass field with its default, its documentation and its range.

`tests/architecture/test_config_fields_are_read.py` checks that some code reads every option.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from verl_lite.registry import did_you_mean

V = TypeVar("V")

Problems = Iterator[str]
"""Problems of a configuration: sentences with key, value, expectation and remedy."""

FreeDict = dict[str, Any]
"""A free dictionary: an option with entries of any name and type, such as the arguments of a user's function. The code
that reads an entry checks it."""


@dataclass(frozen=True)
class Range:
    """The valid values of an option as a predicate, and in words. Null is valid for optional options."""

    words: str
    # of a number, or of a list of numbers
    holds: Callable[[Any], bool]


def at_least(least: float) -> Range:
    return Range(f"at least {least} is expected", lambda value: value >= least)


POSITIVE = Range("a number above 0 is expected", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Range("a finite number, at least 0, is expected", lambda value: 0 <= value < math.inf)
FINITE = Range("a finite number is expected", math.isfinite)
SHARE = Range("a share between 0 and 1 is expected", lambda value: 0 <= value <= 1)
POSITIVE_SHARE = Range("a share above 0 and at most 1 is expected", lambda value: 0 < value <= 1)
ALL_OR_SOME = Range("-1 (all) or at least 1 is expected", lambda value: value == -1 or value >= 1)
PORT = Range("0 or a port up to 65535 is expected", lambda value: 0 <= value <= 65535)
SEED = Range("a whole number from 0 to 2^63 - 1 is expected", lambda value: 0 <= value < 2**63)


def opt(default: V, doc: str, expects: Range | tuple[str, ...] | None = None) -> V:
    """Returns a dataclass field with its documentation; each instance gets its own copy of the default.

    As for `dataclasses.field`, the declared type is that of the default, so that mypy compares it with the annotation.

    Args:
        default: value of the option if nothing sets it.
        doc: help sentence for `--help-config`.
        expects: range of a number, or valid values of a text.
    """
    return field(default_factory=lambda: copy.copy(default), metadata={"doc": doc, "expects": expects})


def section(cls: type[V], doc: str) -> V:
    """Returns a dataclass field for a nested section of options; each instance gets its own."""
    return field(default_factory=cls, metadata={"doc": doc})


def unknown_value(name: str, value: object, choices: Collection[str]) -> str:
    """Returns the problem of an unknown value, with the known values and the nearest of them."""
    hint = did_you_mean(str(value), choices)
    return f"{name}={value} is not known; known: {', '.join(sorted(choices))}{hint}"


class Options:
    """Base class of all sections of options.

    Attributes:
        gone: for a root class, messages for removed options by dotted key.
    """

    gone: ClassVar[Mapping[str, str]] = {}

    def check(self) -> Problems:
        """Yields the problems of values that cannot work, or would give other results than requested."""
        yield from ()
