"""Which options are read while a run is under way: an option that the user set and nothing read has no effect.

`record_reads` takes the values out of a configuration's sections and leaves a trap: the first read of an option is
noted and puts its value back, so that later reads cost nothing. The trap travels with a pickled section, so workers
note their own first reads; `Worker.option_reads` gives them to the driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

_READ: set[str] = set()
_uncounted = 0


class Options:
    """Base of every section of options."""

    def check(self) -> Iterator[str]:
        """What cannot work, or would give other results than asked: key, value, expectation and remedy of each."""
        yield from ()

    if not TYPE_CHECKING:  # so that a misspelt option stays an error of types

        def __getattr__(self, name: str) -> Any:
            """The value of an option at its first read; called only where the plain attribute is missing."""
            trapped = self.__dict__.get("_unread", {})
            if name not in trapped:
                raise AttributeError(f"{type(self).__name__} has no option {name}")
            if not _uncounted:
                _READ.add(f"{self.__dict__['_at']}{name}")
                self.__dict__[name] = trapped[name]
            return trapped[name]


def record_reads(options: Any, at: str = "") -> None:
    """Notes from now on which options are read, here and where `options` is sent.

    Args:
        at: what stands before the names of this section; empty for a whole configuration, which begins a new record.
    """
    if "_unread" not in vars(options):
        if not at:
            _READ.clear()
        leaves = {name: value for name, value in vars(options).items() if not isinstance(value, Options)}
        for name in leaves:
            delattr(options, name)
        vars(options).update(_unread=leaves, _at=at)
    for name, value in vars(options).items():
        if isinstance(value, Options):
            record_reads(value, f"{at}{name}.")


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
    at = vars(options).get("_at")
    if at is not None:
        _READ.update(f"{at}{name}" for name in vars(options)["_unread"])
        for value in vars(options).values():
            if isinstance(value, Options):
                handed_over(value)


def option_reads() -> set[str]:
    """The dotted names of the options that this process has read since `record_reads`."""
    return set(_READ)
