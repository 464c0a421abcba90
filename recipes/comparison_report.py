"""Results of compared runs: a table with confidence intervals, sentences on who is better than whom, pictures."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

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


@dataclass(frozen=True)
class Point:
    """One validation: accuracy, the mean of the data sources. samples: answers that were sampled up to here."""

    step: int
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


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the width of its 95% confidence interval; None where no spread is known."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.half is None else f" ± {self.half:.3f}")

    def is_above(self, other: Interval) -> bool:
        """Whether the two intervals have nothing in common and this is the higher one."""
        if self.half is None or other.half is None:
            return False
        return self.mean - self.half > other.mean + other.half


Value = Callable[[RunResult], float]
VALUES: dict[str, Value] = {
    "sampled": lambda run: run.points[-1].sampled,
    "greedy": lambda run: run.points[-1].greedy,
    "sampled, mean of the run": lambda run: mean(point.sampled for point in run.points[1:]),  # how fast it learns
}


def interval(values: Sequence[float], groups: Sequence[Sequence[float]]) -> Interval:
    """The mean of `values`, with Student's interval for the spread that all groups have in common.

    groups: the values of each algorithm, these included. A few seeds say little on one algorithm's spread; all of them
    together do, if it is about the same for each, which is assumed.
    """
    freedom = sum(len(group) - 1 for group in groups)
    if freedom == 0:
        return Interval(mean(values), None)
    squares = sum((value - mean(group)) ** 2 for group in groups for value in group)
    return Interval(mean(values), student_t(freedom) * (squares / freedom / len(values)) ** 0.5)


def of(results: Sequence[RunResult], name: str, value: Value) -> Interval:
    """The interval of a value over the seeds of an algorithm."""
    groups: dict[str, list[float]] = {}
    for result in results:
        groups.setdefault(result.algorithm, []).append(value(result))
    return interval(groups[name], list(groups.values()))


def ranked(results: Sequence[RunResult]) -> list[str]:
    """The algorithms that were measured, best sampled accuracy first."""
    names = dict.fromkeys(result.algorithm for result in results)
    return sorted(names, key=lambda name: -of(results, name, VALUES["sampled"]).mean)


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
    draw(results, ranked(results), to / "comparison.png")
    print(f"\npicture: {to / 'comparison.png'}")
    if not write:
        return
    put_between_marks(HERE / "COMPARISON.md", text)
    draw(results, ranked(results), HERE / "comparison.png")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def _cost(results: Sequence[RunResult], name: str) -> tuple[float, float, int]:
    """Samples and processor seconds of a run of this algorithm, and how many runs there are."""
    runs = [result for result in results if result.algorithm == name]
    return mean(run.points[-1].samples for run in runs), mean(run.cpu_s for run in runs), len(runs)


def markdown(results: Sequence[RunResult], names: Sequence[str], failures: Sequence[str] = ()) -> str:
    """The table, best sampled accuracy first, and what it says."""
    order, rows = ranked(results), []
    for name in order:
        samples, seconds, seeds = _cost(results, name)
        cells = [str(of(results, name, value)) for value in VALUES.values()]
        rows.append([name, *cells, f"{samples:,.0f}", f"{seconds:.0f}", str(seeds)])
    lines = [*_table(["algorithm", *VALUES, "samples", "processor seconds", "seeds"], rows), ""]
    found = {name: of(results, name, VALUES["sampled"]) for name in order}
    better = {name: [other for other in order if found[name].is_above(found[other])] for name in order}
    pairs = "; ".join(f"{name} is above {', '.join(others)}" for name, others in better.items() if others)
    known = f"{pairs}. Of all other pairs this says nothing." if pairs else "no pair can be told apart."
    lines.append(textwrap.fill(f"Sampled accuracy at the end, where 95% intervals do not touch: {known}", 122))
    missing = [name for name in names if name not in order]
    lines += ["", f"Not measured: {', '.join(missing)}."] if missing else []
    return "\n".join([*lines, *(f"Failed: {failure}" for failure in failures)])


def put_between_marks(page: Path, text: str) -> None:
    """Replaces what stands between the marks BEGIN and END of a page."""
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", flags=re.DOTALL)
    new, found = between.subn(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page.read_text())
    if found != 1:
        raise ValueError(f"{page}: expected {BEGIN} .. {END} once, found {found}")
    page.write_text(new)


def draw(results: Sequence[RunResult], names: Sequence[str], file: Path) -> None:
    """A panel for each of the algorithms: its curves with the reference behind them, mean and 95% interval."""
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(max(7, 3.5 * columns), max(4, 2.5 * rows)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for panel, name in zip(panels, names, strict=False):
        lines = [(name, title, color, title) for title, color in _COLORS.items()]
        if name != REFERENCE and any(result.algorithm == REFERENCE for result in results):
            lines.insert(0, (REFERENCE, "sampled", "#9aa0a6", f"{REFERENCE}, sampled"))
        for algorithm, column, color, label in lines:
            _draw_curve(panel, results, algorithm, column, color, label)
        panel.set(title=name, xlabel="samples, thousands", ylabel="accuracy", ylim=(0, 1))
        panel.grid(axis="y", color="#e4e6e9")
        panel.label_outer()
    figure.axes[0].legend(frameon=False, loc="lower right", fontsize=8)
    for panel in figure.axes[len(names) :]:
        panel.set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


def _draw_curve(panel: Axes, results: Sequence[RunResult], algorithm: str, column: str, color: str, label: str) -> None:
    def at(moment: int, column: str) -> Interval:
        return of(results, algorithm, lambda run: getattr(run.points[moment], column))

    moments = range(min(len(result.points) for result in results))
    x = [at(moment, "samples").mean / 1000 for moment in moments]
    found = [at(moment, column) for moment in moments]
    means, halves = np.array([one.mean for one in found]), np.array([one.half or 0.0 for one in found])
    panel.plot(x, means, color=color, linewidth=1.8, marker="o", markersize=3, label=label)
    panel.fill_between(x, means - halves, means + halves, color=color, alpha=0.18, linewidth=0)
