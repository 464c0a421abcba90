"""Names to objects: the one mechanism by which a config value finds a loss, an estimator, a reward or an engine.

A registry is a plain dict with two more methods: `register(name)` decorates an object into it, `get_fn(name)` resolves
a registered name or a path `pkg.module:object`, and answers a wrong name with the nearest right ones.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import operator
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")
OWN_PACKAGES = ("verl_lite", "workers", "trainer")


class Registry(dict[str, T]):
    """Objects of one kind by name, e.g. `Registry[Callable]("policy loss")`. Names are case-sensitive.

    facts: by name what an entry says of itself where it is registered, such as what it needs.
    """

    def __init__(self, kind: str, entries: dict[str, T] | None = None) -> None:
        super().__init__(entries or {})
        self.kind = kind
        self.facts: dict[str, dict[str, Any]] = {}

    def register(self, name: str | Enum) -> Callable[[T], T]:
        """Decorator that files an object under `name`. See `add_entry`."""
        return add_entry(self, self.kind, name)

    def get_fn(self, name: str | Enum) -> T:
        """The object registered as `name`, or imported from "pkg.module:object". See `find_entry`."""
        return find_entry(self, self.kind, name)

    def copy(self) -> Registry[T]:
        """A registry of the same kind with the same entries (dict.copy would lose the methods)."""
        other = Registry(self.kind, dict(self))
        other.facts = dict(self.facts)
        return other


def add_entry(
    entries: dict[str, T], kind: str, name: str | Enum, facts: dict[str, Any] | None = None
) -> Callable[[T], T]:
    """Decorator that files an object in `entries`, also twice. Raises ValueError if another object has the name."""
    key = _key(name)

    def decorate(item: T) -> T:
        if entries.setdefault(key, item) is not item:
            raise ValueError(f"{kind} {key!r} is already registered as {entries[key]}; {item} needs another name.")
        if facts and isinstance(entries, Registry):  # and not a plain dict in its place
            entries.facts[key] = facts
        return item

    return decorate


def find_entry(entries: dict[str, T], kind: str, name: str | Enum) -> T:
    """The entry of that name, or the object at "pkg.module:object".

    Raises ValueError for an unknown name (with the nearest and all known ones) or a path that does not resolve.
    """
    key = _key(name)
    if key in entries:
        return entries[key]
    module_name, is_path, attributes = key.partition(":")
    if is_path:
        try:
            return operator.attrgetter(attributes)(importlib.import_module(module_name))
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{kind} {key!r} cannot be imported: {error}. Expected pkg.module:object.") from error
    known = ", ".join(sorted(entries)) or "none"
    raise ValueError(f"Unknown {kind}: {key}{did_you_mean(key, entries)}. Known: {known}; or a path pkg.module:object.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X` if a known name is near, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}" if close else ""


def foreign_modules(entries: Iterable[object]) -> list[str]:
    """Modules outside this project that define some of these entries, and so registered them: another process imports
    them to know the entries too. What is defined in a script that was started itself cannot be imported."""
    modules = {getattr(entry, "__module__", "__main__") for entry in entries}
    return sorted(name for name in modules if name.partition(".")[0] not in (*OWN_PACKAGES, "__main__"))


def import_modules(modules: Iterable[str]) -> None:
    """Imports them for what they register."""
    for module in modules:
        importlib.import_module(module)


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function names this parameter; `**kwargs` names none."""
    return name in inspect.signature(function).parameters


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function may be called with this keyword: it names it, or takes any."""
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    return takes(function, name) or inspect.Parameter.VAR_KEYWORD in kinds


def _key(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name
