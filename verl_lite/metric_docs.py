"""How a module says what it logs: a tuple `METRIC_DOCS` of `MetricDoc`, beside the code that computes the numbers.

`python -m trainer.metrics_reference` renders all of them as trainer/METRICS.md, and the health findings of a run judge
its numbers by them. The tuples are read from the source without importing it, so they hold nothing but constants.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cached_property

_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")
MAY_HAVE_SLASHES = ("data_source", "tag")


@dataclass(frozen=True)
class Health:
    """The range in which a metric raises no question, and what to do outside it.

    low, high: the healthy range, both ends included; None = no bound. alarm_low, alarm_high: beyond these the run is
    likely wasted; None = outside the range is a warning at most. of_start: the bounds are multiples of the run's first
    value, for what has no scale of its own.
    cause: what a value outside means, in plain words. change: what to do. keys: the options named by it. why: where the
    numbers come from.
    """

    cause: str
    change: str
    keys: tuple[str, ...] = ()
    why: str = ""
    low: float | None = None
    high: float | None = None
    alarm_low: float | None = None
    alarm_high: float | None = None
    of_start: bool = False

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError(f"Health({self.cause!r}): give low, high or both.")
        ascending = [x for x in (self.alarm_low, self.low, self.high, self.alarm_high) if x is not None]
        if ascending != sorted(ascending):
            raise ValueError(f"Health({self.cause!r}): expected alarm_low <= low <= high <= alarm_high.")

    def judge(self, value: float, start: float | None = None) -> str:
        """`ok`, `warning` or `alarm`. start: the metric's first value in the run, which of_start needs; where that is
        missing or 0, and for a value that is no number, nothing can be said: `ok`."""
        if self.of_start:
            if not start:
                return "ok"
            value = value / start
        if self._is_outside(value, self.alarm_low, self.alarm_high):
            return "alarm"
        return "warning" if self._is_outside(value, self.low, self.high) else "ok"

    @staticmethod
    def _is_outside(value: float, low: float | None, high: float | None) -> bool:
        return (low is not None and value < low) or (high is not None and value > high)

    @property
    def shown(self) -> str:
        """The range as text: `<= 0.005 (alarm above 0.01)`."""
        unit = " x first" if self.of_start else ""
        if self.low is not None and self.high is not None:
            text = f"{self.low:g} to {self.high:g}{unit}"
        else:
            text = f">= {self.low:g}{unit}" if self.low is not None else f"<= {self.high:g}{unit}"
        alarms = [f"below {self.alarm_low:g}"] if self.alarm_low is not None else []
        alarms += [f"above {self.alarm_high:g}"] if self.alarm_high is not None else []
        return f"{text} (alarm {' or '.join(alarms)})" if alarms else text


@dataclass(frozen=True)
class MetricDoc:
    """One metric, or several that differ in a part of the name.

    name: as it is logged; `{mean,max,min}` stands for each of these, `{entry}` for anything without a slash,
    `{data_source}` and `{tag}` for anything, and one capital letter, `mean@{N}`, for a whole number.
    formula: how it is computed, and over what it is a mean. unit: empty for a plain number; `share` is 0 to 1.
    when: the options under which it is logged; empty = in every run of the kind. health: its range, or several.
    """

    name: str
    formula: str
    unit: str = ""
    when: str = ""
    health: Health | tuple[Health, ...] = ()

    @property
    def ranges(self) -> tuple[Health, ...]:
        """`health`, as several."""
        return (self.health,) if isinstance(self.health, Health) else self.health

    @property
    def names(self) -> list[str]:
        """The name with each of its alternatives; placeholders stay."""
        parts = _ALTERNATIVES.split(self.name)  # text and alternatives in turn
        choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
        return ["".join(chosen) for chosen in itertools.product(*choices)]

    @property
    def is_pattern(self) -> bool:
        """Whether the name has a placeholder."""
        return any(_PLACEHOLDER.search(name) for name in self.names)

    def matches(self, logged: str) -> bool:
        """Whether `logged` is one of the names."""
        return any(pattern.fullmatch(logged) for pattern in self._patterns)

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        return [re.compile(_pattern(name)) for name in self.names]


def _pattern(name: str) -> str:
    """A name with placeholders as a regular expression."""
    parts = _PLACEHOLDER.split(name)
    return "".join(_of_placeholder(part) if place % 2 else re.escape(part) for place, part in enumerate(parts))


def _of_placeholder(placeholder: str) -> str:
    if len(placeholder) == 1 and placeholder.isupper():
        return r"\d+"
    return r".+" if placeholder in MAY_HAVE_SLASHES else r"[^/]+"
