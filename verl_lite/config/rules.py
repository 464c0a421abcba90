"""The kinds of lines in the table of verl's keys (`verl_keys`), and what each makes of a key and its value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_lite.config.keys import is_interpolation


@dataclass(frozen=True)
class Verdict:
    """What to do with one verl key: `refusal` stops the run; else it is set as `target`, or dropped if that is None.

    also: other keys to set with it. equals: a key whose value has to be the same in the end.
    """

    target: str | None = None
    value: Any = None
    note: str | None = None
    refusal: str | None = None
    also: Mapping[str, Any] = field(default_factory=dict)
    equals: str | None = None


@dataclass(frozen=True)
class Renamed:
    """The same option under another name; `values` translates values that are spelt differently, None to nothing.

    also: other keys that the option sets, where it is not left out.
    """

    to: str
    values: Mapping[Any, Any] = field(default_factory=dict)
    why: str = ""
    also: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Means:
    """Any value but null says the same as one value of another option."""

    to: str
    value: Any
    why: str


@dataclass(frozen=True)
class SameAs:
    """Accepted and dropped where another option has the same value, which alone is read here; refused otherwise."""

    key: str
    why: str


@dataclass(frozen=True)
class NoEffect:
    """Accepted and dropped at any value, because results do not depend on it here."""

    why: str


@dataclass(frozen=True)
class Only:
    """Accepted and dropped at these values (and null), refused at any other."""

    harmless: tuple[Any, ...]
    why: str
    otherwise: str


Rule = Renamed | Means | SameAs | NoEffect | Only


def apply_rule(rule: Rule, name: str, rest: str, value: Any) -> Verdict:
    """The verdict of a rule on a key and its value; rest: what of the key stands below the one that the rule is for."""
    shown = f"{name}={value}"
    if isinstance(rule, NoEffect):
        return Verdict(note=f"{shown} has no effect here: {rule.why}")
    if isinstance(rule, SameAs):
        is_open = value is None or is_interpolation(value)
        return Verdict(note=None if is_open else f"{shown}: {rule.why}", equals=None if is_open else rule.key)
    if isinstance(rule, Means):
        note = f"{shown} means {rule.to}={str(rule.value).lower()} here: {rule.why}"
        return Verdict() if value is None else Verdict(target=rule.to, value=rule.value, note=note)
    if isinstance(rule, Renamed):
        target = f"{rule.to}.{rest}" if rest else rule.to
        known = rule.values.get(value, value) if isinstance(value, str | bool | int) else value
        if known is None:
            return Verdict()
        note = f"{name} is called {target} here: {target}={known}"
        note += "".join(f", with {other}={setting}" for other, setting in rule.also.items())
        return Verdict(target=target, value=known, note=note, also=rule.also)
    if value is None or is_interpolation(value) or value in rule.harmless:
        # verl's own default, or a reference to a key that is judged by itself.
        return Verdict(note=f"{shown} has no effect here: {rule.why}" if rule.why and value is not None else None)
    expected = " or ".join(str(h).lower() if isinstance(h, bool) else str(h) for h in (*rule.harmless, "null"))
    return Verdict(refusal=f"{shown} is an option that would change the run: {rule.otherwise}. Accepted: {expected}")
