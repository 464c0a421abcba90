"""How an option is declared: a dataclass field with its default, its sentence, its range, and when it is read; and what
is read while a run is under way: an option that the user set and nothing read has no effect.

After `record_reads` the sections of a configuration note which of their options are read. They do so in every process
that they are sent to; `Worker.option_reads` gives the notes of a worker to the driver.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

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


def opt(default: Any, doc: str, expects: Range | tuple[str, ...] | None = None, *, read: str | None = None) -> Any:
    """A dataclass field with its documentation; each instance gets its own copy of the default.

    expects: the range of a number, or the words that a text may be. read: when it is read, for what the first step does
    not read yet ("save", "validation"); "load" for what is read while options and data are, or not again.
    """
    return field(default_factory=lambda: copy.copy(default), metadata={"doc": doc, "expects": expects, "read": read})


def section(cls: type, doc: str) -> Any:
    """A nested group of options, built fresh for each instance."""
    return field(default_factory=cls, metadata={"doc": doc})


def unknown_value(name: str, value: Any, known: Collection[str]) -> str:
    """The problem of a key whose value is none of the known ones."""
    return f"{name}={value} is not known; known: {', '.join(sorted(known))}{did_you_mean(str(value), known)}"


_read: set[str] = set()
_uncounted = 0


class Options:
    """Base of every section of options.

    gone: of a whole configuration, the keys that were options once, with what to say or do instead.
    """

    gone: ClassVar[Mapping[str, str]] = {}

    def check(self) -> Problems:
        """What cannot work, or would give other results than asked: key, value, expectation and remedy of each."""
        yield from ()

    if not TYPE_CHECKING:  # so that a misspelt option stays an error of types

        def __getattribute__(self, name: str) -> Any:
            own = object.__getattribute__(self, "__dict__")
            if "_at" in own and name in own and not _uncounted:
                _read.add(f"{own['_at']}{name}")
            return object.__getattribute__(self, name)


def record_reads(options: Any, at: str = "") -> None:
    """Notes from now on which options are read, here and where `options` is sent.

    Args:
        at: what stands before the names of this section; empty for a whole configuration, which begins a new record.
    """
    if not at:
        _read.clear()
    for name, value in vars(options).items():
        if isinstance(value, Options):
            record_reads(value, f"{at}{name}.")
    vars(options)["_at"] = at


@contextmanager
def uncounted() -> Iterator[None]:
    """Inside, reads do not count: those of checks, of the plan, of what is printed and saved."""
    global _uncounted
    _uncounted += 1
    try:
        yield
    finally:
        _uncounted -= 1


def handed_over(options: Options) -> None:
    """Counts a whole section as read, because a process gets it that reports nothing."""
    for name in list(vars(options)):
        if isinstance(value := getattr(options, name), Options):
            handed_over(value)


def option_reads() -> set[str]:
    """The dotted names of the options that this process has read since `record_reads`."""
    return set(_read)
