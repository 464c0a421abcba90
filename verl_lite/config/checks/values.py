"""What the checks look at options with: values by their keys, those that were given, files that have to exist."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from verl_lite.config.keys import KEYS

Problems = Iterator[str]
"""Sentences, each naming key, value, what was expected and what to change."""


def value_of(config: Any, name: str) -> Any:
    """The value at a dotted key; None where the command has no such option."""
    return reduce(lambda section, part: getattr(section, part, None), name.split("."), config)


def given(config: Any, start: str, names: Collection[str] | None = None) -> list[tuple[str, Any]]:
    """The keys of `PPOConfig` that begin so (of `names`, if given) and whose value is not their default."""
    return [
        (key.name, value_of(config, key.name))
        for key in KEYS.values()
        if key.name.startswith(start) and (names is None or key.name in names)
        if value_of(config, key.name) != key.default
    ]


def listed(entries: list[tuple[str, Any]]) -> str:
    """`key=value, key=value`"""
    return ", ".join(f"{name}={value}" for name, value in entries)


def shown(value: Any) -> str:
    """A value as a command line spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def python_file(name: str, place: str | None) -> Problems:
    """Whether there is such a file of the user's code; a module (pkg://package.module) is not looked for."""
    if place is not None and not place.startswith("pkg://") and not Path(place).expanduser().is_file():
        yield (
            f"{name}={place}: there is no file {Path(place).expanduser().absolute()} (a module is given as "
            "pkg://package.module)"
        )
