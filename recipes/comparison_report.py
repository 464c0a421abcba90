"""Results of compared runs: a table with confidence intervals, sentences on who is better than whom, a picture."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trainer.evaluate.intervals import student_t

HERE = Path(__file__).parent
BEGIN, END = "<!-- written by python -m recipes.compare --write -->", "<!-- end -->"
REFERENCE = "grpo"
"""Drawn in grey behind each of the others."""

_COLORS = {"sampled": "#3b6fb6", "greedy": "#e08a2e"}


class Point(NamedTuple):
    """One validation: accuracy, the mean of the data sources. samples: answers that were sampled up to here."""

    samples: float
    sampled: float
    greedy: float


@dataclass(frozen=True)
class RunResult:
    """A finished run. cpu_s: processor seconds of all its processes, start and validation included."""

    algorithm: str
    seed: int
    cpu_s: float
    points: list[Point]


class Interval(NamedTuple):
    """A mean over seeds and half the width of its 95% confidence interval; nan where no spread is known."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if np.isnan(self.half) else f" ± {self.half:.3f}")

    def is_above(self, other: Interval) -> bool:
        """Whether the two intervals have nothing in common and this is the higher one."""
        return self.mean - self.half > other.mean + other.half


Value = Callable[[RunResult], float]
VALUES: dict[str, Value] = {
    "sampled": lambda run: run.points[-1].sampled,
    "greedy": lambda run: run.points[-1].greedy,
    "sampled, mean of the run": lambda run: mean(point.sampled for point in run.points[1:]),  # how fast it learns
}


def intervals(results: Sequence[RunResult], value: Value) -> dict[str, Interval]:
    """By algorithm, the highest mean first: the mean of a value over seeds, with Student's interval for the spread that
    all algorithms have in common.

    A few seeds say little on one algorithm's spread; all of them together do, if it is about the same for each, which
    is assumed.
    """
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for result in results:
        groups[result.algorithm].append(value(result))
    freedom = len(results) - len(groups)
    squares = sum((value - mean(group)) ** 2 for group in groups.values() for value in group)
    wide = student_t(freedom) * (squares / freedom) ** 0.5 if freedom else np.nan
    found = {name: Interval(mean(group), wide / len(group) ** 0.5) for name, group in groups.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1].mean))


def report(
    results: Sequence[RunResult], names: Sequence[str], failures: Sequence[str], to: Path, *, write: bool
) -> None:
    """Prints the table and draws comparison.png in folder `to`; with `write` both go into recipes/ too.

    names: the algorithms. failures: a sentence each.
    """
    text = markdown(results, names, failures)
    print(f"\n{text}")
    if not results:
        return
    if write:
        put_between_marks(HERE / "COMPARISON.md", text)
    for folder in (to, *[HERE] * write):
        draw(results, folder / "comparison.png")
        print(f"\npicture: {folder / 'comparison.png'}")


def markdown(results: Sequence[RunResult], names: Sequence[str], failures: Sequence[str] = ()) -> str:
    """The table, best sampled accuracy first, and what it says."""
    columns = [intervals(results, value) for value in VALUES.values()]
    rows = [["algorithm", *VALUES, "samples", "processor seconds", "seeds"]]
    for name in columns[0]:
        runs = [result for result in results if result.algorithm == name]
        samples, seconds = mean(run.points[-1].samples for run in runs), mean(run.cpu_s for run in runs)
        cells = [str(column[name]) for column in columns]
        rows.append([name, *cells, f"{samples:,.0f}", f"{seconds:.0f}", str(len(runs))])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    found = columns[0]
    better = {name: [other for other in found if found[name].is_above(found[other])] for name in found}
    pairs = "; ".join(f"{name} is above {', '.join(others)}" for name, others in better.items() if others)
    known = f"{pairs}. Of all other pairs this says nothing." if pairs else "no pair can be told apart."
    lines += ["", textwrap.fill(f"Sampled accuracy at the end, where 95% intervals do not touch: {known}", 122)]
    missing = [name for name in names if name not in found]
    lines += ["", f"Not measured: {', '.join(missing)}."] if missing else []
    return "\n".join([*lines, *(f"Failed: {failure}" for failure in failures)])


def put_between_marks(page: Path, text: str) -> None:
    """Replaces what stands between the marks BEGIN and END of a page."""
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", flags=re.DOTALL)
    new, found = between.subn(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page.read_text())
    if found != 1:
        raise ValueError(f"{page}: expected {BEGIN} .. {END} once, found {found}")
    page.write_text(new)


def draw(results: Sequence[RunResult], file: Path) -> None:
    """A panel for each of the algorithms: its curves with the reference behind them, mean and 95% interval."""
    names = list(intervals(results, VALUES["sampled"]))
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(max(7, 3.5 * columns), max(4, 2.5 * rows)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for panel, name in zip(panels, names, strict=False):
        if name != REFERENCE and REFERENCE in names:
            _draw_curve(panel, results, REFERENCE, "sampled", "#9aa0a6", f"{REFERENCE}, sampled")
        for column, color in _COLORS.items():
            _draw_curve(panel, results, name, column, color, column)
        panel.set(title=name, xlabel="samples, thousands", ylabel="accuracy", ylim=(0, 1))
        panel.grid(axis="y", color="#e4e6e9")
        panel.label_outer()
    figure.axes[0].legend(frameon=False, loc="lower right", fontsize=8)
    for panel in figure.axes[len(names) :]:
        panel.set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


def _draw_curve(panel: Axes, results: Sequence[RunResult], name: str, column: str, color: str, label: str) -> None:
    def at(moment: int, column: str) -> Interval:
        return intervals(results, lambda run: getattr(run.points[moment], column))[name]

    moments = range(min(len(result.points) for result in results))
    x = [at(moment, "samples").mean / 1000 for moment in moments]
    means, halves = np.nan_to_num([at(moment, column) for moment in moments]).T
    panel.plot(x, means, color=color, linewidth=1.8, marker="o", markersize=3, label=label)
    panel.fill_between(x, means - halves, means + halves, color=color, alpha=0.18, linewidth=0)
