"""Reads the table of all metrics in trainer/METRICS.md; `find(name)` returns the line that explains a logged name.

A test (tests/conftest.py) fails if a run logs a metric that is not in METRICS.md, so code that logs a new metric needs
a new line there.
"""

import itertools
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PAGE = Path(__file__).parents[1] / "METRICS.md"

_LINE = re.compile(r"\| `(.+?)` \| (.*) \| (.*) \| (.*) \|")
_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")


@dataclass(frozen=True)
class Metric:
    """A line of the table: one metric, or several whose names differ in one part.

    In a name, {a,b} matches either word, {N} and {K} match a whole number, {data_source} and {tag} match any text, and
    any other placeholder matches text without a slash.
    """

    name: str
    formula: str
    unit: str
    healthy: str

    @property
    def names(self) -> list[str]:
        """The names that result from the alternatives; placeholders are kept."""
        parts = _ALTERNATIVES.split(self.name)  # text at even places, alternatives at odd places
        choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
        return ["".join(chosen) for chosen in itertools.product(*choices)]

    def matches(self, logged: str) -> bool:
        """Returns True if the line describes the metric `logged`."""
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
    """Returns all lines of the table in order."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = (match.groups() for match in map(_LINE.fullmatch, lines) if match is not None)
    return tuple(Metric(name, formula.replace(r"\|", "|"), unit, healthy) for name, formula, unit, healthy in cells)


@cache
def find(name: str) -> Metric | None:
    """Returns the line that describes a logged name, or None. A line without placeholders takes precedence over
    patterns, and a longer pattern over a shorter one."""
    matching = [metric for metric in metrics() if metric.matches(name)]
    return min(matching, key=lambda metric: (bool(_PLACEHOLDER.search(metric.name)), -len(metric.name)), default=None)
