"""Every metric that a run logs: METRICS.md beside this file is the table, by which `find(name)` explains a name.

A test (tests/conftest.py) fails on a metric that a run logs and that is not in METRICS.md. Who logs a new one adds a
line there.
"""

import itertools
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PAGE = Path(__file__).with_name("METRICS.md")

_LINE = re.compile(r"\| `(.+?)` \| (.*) \| (.*) \| (.*) \|")
_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")


@dataclass(frozen=True)
class Metric:
    """A line of the table: one metric, or several that differ in a part of the name.

    In a name, {a,b} stands for each of the words, {N} and {K} for a whole number, {data_source} and {tag} for anything,
    other words for anything without a slash.
    """

    name: str
    formula: str
    unit: str
    healthy: str

    @property
    def names(self) -> list[str]:
        """The name with each of its alternatives; placeholders stay."""
        parts = _ALTERNATIVES.split(self.name)  # text and alternatives in turn
        choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
        return ["".join(chosen) for chosen in itertools.product(*choices)]

    def matches(self, logged: str) -> bool:
        """Whether `logged` is one of the names."""
        return self._pattern.fullmatch(logged) is not None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        def placeholder(word: str) -> str:
            return r"\d+" if word in "NK" else ".+" if word in ("data_source", "tag") else "[^/]+"

        split = [_PLACEHOLDER.split(name) for name in self.names]
        patterns = ([placeholder(x) if at % 2 else re.escape(x) for at, x in enumerate(parts)] for parts in split)
        return re.compile("|".join(map("".join, patterns)))


@cache
def metrics() -> tuple[Metric, ...]:
    """The table, in its order."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = (match.groups() for match in map(_LINE.fullmatch, lines) if match is not None)
    return tuple(Metric(name, formula.replace(r"\|", "|"), unit, healthy) for name, formula, unit, healthy in cells)


@cache
def find(name: str) -> Metric | None:
    """The line of a logged name; one without placeholders before a pattern, the longer pattern first."""
    fitting = [metric for metric in metrics() if metric.matches(name)]
    return min(fitting, key=lambda metric: (bool(_PLACEHOLDER.search(metric.name)), -len(metric.name)), default=None)
