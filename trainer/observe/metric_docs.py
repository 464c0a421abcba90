"""Reads the table of all metrics in trainer/METRICS.md; `find(name)` returns the line that explains a logged name.

A test (tests/conftest.py) fails if a run logs a metric that is not in METRICS.md, so code that logs a new metric needs
a new line there.
"""

import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PAGE = Path(__file__).parents[1] / "METRICS.md"

_LINE = re.compile(r"\| `(.+?)` \| (.*) \| (.*) \| (.*) \|")
_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")


@dataclass(frozen=True)
class DocumentedMetric:
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
        # split with a group: texts at even positions, and between them the alternatives
        names = [""]
        for index, part in enumerate(_ALTERNATIVES.split(self.name)):
            words = part.split(",") if index % 2 else [part]
            beginnings = names
            names = []
            for beginning in beginnings:
                for word in words:
                    names.append(beginning + word)
        return names

    def matches(self, logged: str) -> bool:
        """Returns True if the line describes the metric `logged`."""
        return self._pattern.fullmatch(logged) is not None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        patterns = [_pattern_of(name) for name in self.names]
        return re.compile("|".join(patterns))


def _pattern_of(name: str) -> str:
    """Returns the regular expression of a name with placeholders."""
    pattern = ""
    # split with a group: texts at even positions, and between them the placeholders
    for index, part in enumerate(_PLACEHOLDER.split(name)):
        if index % 2 == 0:
            pattern += re.escape(part)
        elif part in ("N", "K"):
            pattern += r"\d+"
        # names of the user's data, which can contain slashes
        elif part in ("data_source", "tag"):
            pattern += ".+"
        else:
            pattern += "[^/]+"
    return pattern


@cache
def metrics() -> tuple[DocumentedMetric, ...]:
    """Returns all lines of the table in order."""
    table = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        name, formula, unit, healthy = match.groups()
        # in a table of Markdown, a bar in a cell has a backslash
        formula = formula.replace(r"\|", "|")
        table.append(DocumentedMetric(name, formula, unit, healthy))
    return tuple(table)


@cache
def find(name: str) -> DocumentedMetric | None:
    """Returns the line that describes a logged name, or None. A line without placeholders takes precedence over
    patterns, and a longer pattern over a shorter one."""
    matching = [metric for metric in metrics() if metric.matches(name)]
    return min(matching, key=_precedence, default=None)


def _precedence(metric: DocumentedMetric) -> tuple[bool, int]:
    """Returns the sort key of a line that matches a name; the smallest key describes it best."""
    has_placeholder = _PLACEHOLDER.search(metric.name) is not None
    return has_placeholder, -len(metric.name)
