"""Configurations of tests, changed key by key."""

from __future__ import annotations

from functools import reduce
from typing import Any, TypeVar

T = TypeVar("T")


def set_keys(config: T, **settings: Any) -> T:
    """Sets keys whose dots are written as two underscores, which have to be there; gives the configuration back."""
    for name, value in settings.items():
        *path, leaf = name.split("__")
        section = reduce(getattr, path, config)
        assert hasattr(section, leaf), name
        setattr(section, leaf, value)
    return config
