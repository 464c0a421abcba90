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

_SAMPLED, _GREEDY, _GREY = "#3b6fb6", "#e08a2e", "#9aa0a6"


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


def ranked(results: Sequence[RunResult], names: Sequence[str]) -> list[str]:
    """Those of `names` that were measured, best sampled accuracy first."""
    measured = {result.algorithm for result in results}
    there = [name for name in names if name in measured]
    return sorted(there, key=lambda name: -of(results, name, VALUES["sampled"]).mean)


def report(
    results: Sequence[RunResult], names: Sequence[str], failures: Sequence[str], to: Path, *, write: bool
) -> None:
    """Prints the table and draws comparison.png in folder `to`. write: both go into recipes/ too, and table and curve
    of each recipe into its folder, if its page has the marks. names: the algorithms; failures: a sentence each."""
    text = markdown(results, names, failures)
    print(f"\n{text}")
    if not results:
        return
    draw_comparison(results, to / "comparison.png")
    print(f"\npicture: {to / 'comparison.png'}")
    if not write:
        return
    put_between_marks(HERE / "COMPARISON.md", text)
    draw_comparison(results, HERE / "comparison.png")
    for name in ranked(results, names):
        page = HERE / name / "README.md"
        if page.exists() and BEGIN in page.read_text():
            put_between_marks(page, own_table(results, name))
            draw_curve(results, name, page.with_name("curve.png"))


# -------------------------------------------------------------------------------------------------------------- words


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def _cost(results: Sequence[RunResult], name: str) -> tuple[float, float, int]:
    """Samples and processor seconds of a run of this algorithm, and how many runs there are."""
    runs = [result for result in results if result.algorithm == name]
    return mean(run.points[-1].samples for run in runs), mean(run.cpu_s for run in runs), len(runs)


def markdown(results: Sequence[RunResult], names: Sequence[str], failures: Sequence[str] = ()) -> str:
    """The table, best sampled accuracy first, and what it says."""
    order, rows = ranked(results, names), []
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


def own_table(results: Sequence[RunResult], name: str) -> str:
    """What stands on the page of one recipe."""
    shown = [name, *(other for other in ranked(results, [REFERENCE]) if other != name)]
    start = next(result for result in results if result.algorithm == name).points[0]
    rows = [
        [title, f"{before:.3f}", *(str(of(results, each, VALUES[title])) for each in shown)]
        for title, before in (("sampled", start.sampled), ("greedy", start.greedy))
    ]
    head = ["accuracy on 512 held-out questions", "before", "after", *(f"{other}, after" for other in shown[1:])]
    samples, seconds, seeds = _cost(results, name)
    steps = max(point.step for result in results if result.algorithm == name for point in result.points)
    cost = f"{steps} steps, {samples:,.0f} samples, {seconds:.0f} processor seconds"
    return "\n".join([*_table(head, rows), "", f"Mean and 95% interval of {seeds} seeds; {cost}."])


def put_between_marks(page: Path, text: str) -> None:
    """Replaces what stands between the marks BEGIN and END of a page."""
    old = page.read_text()
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", flags=re.DOTALL)
    new, found = between.subn(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", old)
    if found != 1:
        raise ValueError(f"{page}: expected {BEGIN} .. {END} once, found {found}")
    page.write_text(new)


# ----------------------------------------------------------------------------------------------------------- pictures


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def draw_comparison(results: Sequence[RunResult], file: Path) -> None:
    """All algorithms at the end with their intervals, and each one's curves with the reference behind them."""
    names = ranked(results, list(dict.fromkeys(result.algorithm for result in results)))
    rows = -(-len(names) // 4)
    figure = _figure(15, 1.5 + 2.5 * rows)
    grid = figure.add_gridspec(rows, 5, width_ratios=[1.5, 1, 1, 1, 1])
    _draw_ends(figure.add_subplot(grid[:, 0]), results, names)
    for place, name in enumerate(names):
        panel = figure.add_subplot(grid[place // 4, 1 + place % 4])
        _draw_curves(panel, results, name)
        panel.set_title(name, fontsize=11)
        if place % 4:
            panel.set_yticklabels([])
        if place == 0:
            panel.legend(frameon=False, loc="lower right", fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


def draw_curve(results: Sequence[RunResult], name: str, file: Path) -> None:
    """One algorithm's curves."""
    figure = _figure(7, 4)
    panel = figure.subplots()
    _draw_curves(panel, results, name)
    panel.set_ylabel("accuracy, mean of three tasks")
    panel.set_title(f"{name}: mean and 95% interval over seeds", fontsize=11)
    panel.legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(file, dpi=100)


def _style(panel: Axes, axis: str) -> None:
    panel.grid(axis=axis, color="#e4e6e9", linewidth=0.8)  # type: ignore[arg-type]
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_ends(panel: Axes, results: Sequence[RunResult], names: Sequence[str]) -> None:
    order = list(reversed(names))
    for title, color in (("sampled", _SAMPLED), ("greedy", _GREEDY)):
        found = [of(results, name, VALUES[title]) for name in order]
        means, halves = [one.mean for one in found], [one.half or 0.0 for one in found]
        panel.errorbar(means, range(len(order)), xerr=halves, fmt="o", color=color, markersize=5, label=title)
    panel.set_yticks(range(len(order)), order)
    panel.set_title("accuracy at the end, 95% interval", fontsize=11)
    panel.legend(frameon=False, loc="upper left", fontsize=9)
    _style(panel, "x")


def _draw_curves(panel: Axes, results: Sequence[RunResult], name: str) -> None:
    lines = [(name, "greedy", _GREEDY, "greedy"), (name, "sampled", _SAMPLED, "sampled")]
    if name != REFERENCE and any(result.algorithm == REFERENCE for result in results):
        lines.insert(0, (REFERENCE, "sampled", _GREY, f"{REFERENCE}, sampled"))
    moments = range(min(len(result.points) for result in results))
    for algorithm, column, color, label in lines:

        def at(moment: int, column: str, algorithm: str = algorithm) -> Interval:
            return of(results, algorithm, lambda run: getattr(run.points[moment], column))

        x = np.array([at(moment, "samples").mean for moment in moments]) / 1000
        found = [at(moment, column) for moment in moments]
        means, halves = np.array([one.mean for one in found]), np.array([one.half or 0.0 for one in found])
        panel.plot(x, means, color=color, linewidth=1.8, marker="o", markersize=3, label=label)
        panel.fill_between(x, means - halves, means + halves, color=color, alpha=0.18, linewidth=0)
    panel.set_xlabel("samples, thousands", fontsize=9)
    panel.set_ylim(0, 1)
    _style(panel, "y")
