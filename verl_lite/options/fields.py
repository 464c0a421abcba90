"""How an option is declared: a dataclass field that carries its default and its sentence of documentation."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def opt(default: Any, doc: str) -> Any:
    """A dataclass field with its documentation; lists and dicts get a fresh copy for each instance."""
    metadata = {"doc": doc}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, doc: str) -> Any:
    """A nested group of options, built fresh for each instance."""
    return field(default_factory=cls, metadata={"doc": doc})
