"""Declares options: a dataclass field with its default, its documentation and its range.

`tests/architecture/test_config_fields_are_read.py` checks that some code reads every option.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl_lite.registry import did_you_mean

Problems = Iterator[str]
"""Sentences, each naming key, value, what was expected and what to change."""


@dataclass(frozen=True)
class Range:
    """Which values an option takes, and how that is said; null passes where the option may be null."""

    words: str
    holds: Callable[[Any], bool]


def at_least(least: float) -> Range:
    return Range(f"at least {least} is expected", lambda value: value >= least)


POSITIVE = Range("a number above 0 is expected", lambda value: 0 < value < math.inf)
FINITE = Range("a finite number is expected", math.isfinite)
SHARE = Range("a share between 0 and 1 is expected", lambda value: 0 <= value <= 1)
POSITIVE_SHARE = Range("a share above 0 and at most 1 is expected", lambda value: 0 < value <= 1)
ALL_OR_SOME = Range("-1 (all) or at least 1 is expected", lambda value: value == -1 or value >= 1)
SEED = Range("a whole number from 0 to 2^63 - 1 is expected", lambda value: 0 <= value < 2**63)


def opt(default: Any, doc: str, expects: Range | tuple[str, ...] | None = None) -> Any:
    """Returns a dataclass field with its documentation; each instance gets its own copy of the default.

    Args:
        default: value of the option if nothing sets it.
        doc: one sentence for `--help-config`.
        expects: the range of a number, or the words that a text may be.
    """
    return field(default_factory=lambda: copy.copy(default), metadata={"doc": doc, "expects": expects})


def section(cls: type, doc: str) -> Any:
    """A nested group of options, built fresh for each instance."""
    return field(default_factory=cls, metadata={"doc": doc})


def unknown_value(name: str, value: Any, known: Collection[str]) -> str:
    """The problem of a key whose value is none of the known ones."""
    return f"{name}={value} is not known; known: {', '.join(sorted(known))}{did_you_mean(str(value), known)}"


class Options:
    """Base of every section of options.

    gone: of a whole configuration, the keys that were options once, with what to say or do instead.
    """

    gone: ClassVar[Mapping[str, str]] = {}

    def check(self) -> Problems:
        """What cannot work, or would give other results than asked: key, value, expectation and remedy of each."""
        yield from ()
