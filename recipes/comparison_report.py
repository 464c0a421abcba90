"""Outcomes of compared runs: a table with confidence intervals, sentences on who is better than whom, pictures."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

HERE = Path(__file__).parent
BEGIN, END = "<!-- written by python -m recipes.compare --write -->", "<!-- end -->"
REFERENCE = "grpo"
"""Drawn in grey behind each of the others."""

_STUDENT_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""97.5% quantiles for 1, 2, .. degrees of freedom; the last serves for more, where it is a little too wide."""

_SAMPLED, _GREEDY, _GREY = "#3b6fb6", "#e08a2e", "#9aa0a6"


@dataclass(frozen=True)
class Point:
    """One validation: accuracy, the mean of the data sources. samples: answers that were sampled up to here."""

    step: int
    samples: float
    sampled: float
    greedy: float


@dataclass(frozen=True)
class Outcome:
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


def interval(values: Sequence[float], groups: Sequence[Sequence[float]]) -> Interval:
    """The mean of `values`, with Student's interval for the spread that all groups have in common.

    groups: the values of each algorithm, these included. A few seeds say little on one algorithm's spread; all of them
    together do, if it is about the same for each, which is assumed.
    """
    freedom = sum(len(group) - 1 for group in groups)
    if freedom == 0:
        return Interval(statistics.mean(values), None)
    squares = sum((value - statistics.mean(group)) ** 2 for group in groups for value in group)
    quantile = _STUDENT_T[min(freedom, len(_STUDENT_T)) - 1]
    return Interval(statistics.mean(values), quantile * (squares / freedom / len(values)) ** 0.5)


def report(
    outcomes: Sequence[Outcome], names: Sequence[str], failures: Sequence[str], to: Path, *, write: bool
) -> None:
    """Prints the table and draws comparison.png in folder `to`. write: both go into recipes/ too, and table and curve
    of each recipe into its folder, if its page has the marks. names: the algorithms; failures: a sentence each."""
    text = markdown(outcomes, names, failures)
    print(f"\n{text}")
    if not outcomes:
        return
    draw_comparison(outcomes, to / "comparison.png")
    print(f"\npicture: {to / 'comparison.png'}")
    if write:
        put_between_marks(HERE / "README.md", text)
        draw_comparison(outcomes, HERE / "comparison.png")
        for name in measured(outcomes, names):
            page = HERE / name / "README.md"
            if page.exists() and BEGIN in page.read_text():
                put_between_marks(page, own_table(outcomes, name))
                draw_curve(outcomes, name, page.with_name("curve.png"))


# -------------------------------------------------------------------------------------------------------------- words


def markdown(outcomes: Sequence[Outcome], names: Sequence[str], failures: Sequence[str] = ()) -> str:
    """The table, best sampled accuracy first, and what it says."""
    rows = [table_row(outcomes, name) for name in ranked(outcomes, names)]
    head = ["algorithm", "sampled", "greedy", "sampled, mean of the run", "samples", "processor seconds", "seeds"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *rows]
    lines += ["", *verdicts(outcomes, names)]
    missing = [name for name in names if name not in measured(outcomes, names)]
    lines += [f"Not measured: {', '.join(missing)}."] if missing else []
    lines += [f"Failed: {failure}" for failure in failures]
    return "\n".join(lines)


def table_row(outcomes: Sequence[Outcome], name: str) -> str:
    runs = [outcome for outcome in outcomes if outcome.algorithm == name]
    seconds = statistics.mean(run.cpu_s for run in runs)
    samples = statistics.mean(run.points[-1].samples for run in runs)
    cells = [name, *(str(of(outcomes, name, value)) for value in (at_the_end, greedy_at_the_end, over_the_run))]
    return f"| {' | '.join([*cells, f'{samples:,.0f}', f'{seconds:.0f}', str(len(runs))])} |"


def own_table(outcomes: Sequence[Outcome], name: str) -> str:
    """What stands on the page of one recipe."""
    runs = [outcome for outcome in outcomes if outcome.algorithm == name]
    beside = [] if name == REFERENCE else [each for each in measured(outcomes, [REFERENCE])]
    head = ["accuracy on 512 held-out questions", "before", "after", *(f"{other}, after" for other in beside)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for title, start, end in (
        ("sampled", runs[0].points[0].sampled, at_the_end),
        ("greedy", runs[0].points[0].greedy, greedy_at_the_end),
    ):
        cells = [title, f"{start:.3f}", *(str(of(outcomes, each, end)) for each in (name, *beside))]
        lines.append(f"| {' | '.join(cells)} |")
    samples = statistics.mean(run.points[-1].samples for run in runs)
    cost = f"{runs[0].points[-1].step} steps, {samples:,.0f} samples"
    seconds = statistics.mean(run.cpu_s for run in runs)
    return "\n".join(
        [*lines, "", f"Mean and 95% interval of {len(runs)} seeds; {cost}, {seconds:.0f} processor seconds."]
    )


def verdicts(outcomes: Sequence[Outcome], names: Sequence[str]) -> list[str]:
    """Who is better than whom, where the intervals say so, and that nothing is known of the others."""
    order = ranked(outcomes, names)
    lines = []
    for title, value in (("Sampled accuracy at the end", at_the_end), ("Sampled accuracy over the run", over_the_run)):
        found = {name: of(outcomes, name, value) for name in order}
        better = {name: [other for other in order if found[name].is_above(found[other])] for name in order}
        told = [f"{name} is above {', '.join(others)}" for name, others in better.items() if others]
        found_out = (
            "; ".join(told) + ". Of all other pairs this says nothing." if told else "no pair can be told apart."
        )
        lines += [textwrap.fill(f"{title}, where 95% intervals do not touch: {found_out}", 122), ""]
    return lines


def at_the_end(run: Outcome) -> float:
    """Sampled accuracy after the last step."""
    return run.points[-1].sampled


def greedy_at_the_end(run: Outcome) -> float:
    """Greedy accuracy after the last step."""
    return run.points[-1].greedy


def over_the_run(run: Outcome) -> float:
    """Mean sampled accuracy of the validations after the start: how fast it learns."""
    return statistics.mean(point.sampled for point in run.points[1:])


def of(outcomes: Sequence[Outcome], name: str, value: Callable[[Outcome], float]) -> Interval:
    """The interval of a value over the seeds of an algorithm."""
    groups: dict[str, list[float]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.algorithm, []).append(value(outcome))
    return interval(groups[name], list(groups.values()))


def measured(outcomes: Sequence[Outcome], names: Sequence[str]) -> list[str]:
    """Those of `names` that have an outcome."""
    there = {outcome.algorithm for outcome in outcomes}
    return [name for name in names if name in there]


def ranked(outcomes: Sequence[Outcome], names: Sequence[str]) -> list[str]:
    """The measured ones, best sampled accuracy first."""
    return sorted(measured(outcomes, names), key=lambda name: -of(outcomes, name, at_the_end).mean)


def put_between_marks(page: Path, text: str) -> None:
    """Replaces what stands between the marks BEGIN and END of a page."""
    old = page.read_text()
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", flags=re.DOTALL)
    new, found = between.subn(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", old)
    if found != 1:
        raise ValueError(f"{page}: expected {BEGIN} .. {END} once, found {found}")
    page.write_text(new)


# ----------------------------------------------------------------------------------------------------------- pictures


def draw_comparison(outcomes: Sequence[Outcome], file: Path) -> None:
    """All algorithms at the end with their intervals, and each one's curves with the reference behind them."""
    names = ranked(outcomes, list(dict.fromkeys(outcome.algorithm for outcome in outcomes)))
    rows = -(-len(names) // 4)
    figure = Figure(figsize=(15, 1.5 + 2.5 * rows), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, 5, width_ratios=[1.5, 1, 1, 1, 1])
    _draw_ends(figure.add_subplot(grid[:, 0]), outcomes, names)
    for place, name in enumerate(names):
        panel = figure.add_subplot(grid[place // 4, 1 + place % 4])
        _draw_curves(panel, outcomes, name)
        panel.set_title(name, fontsize=11)
        if place % 4:
            panel.set_yticklabels([])
        if place == 0:
            panel.legend(frameon=False, loc="lower right", fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


def draw_curve(outcomes: Sequence[Outcome], name: str, file: Path) -> None:
    """One algorithm's curves."""
    figure = Figure(figsize=(7, 4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    _draw_curves(panel, outcomes, name)
    panel.set_ylabel("accuracy, mean of three tasks")
    panel.set_title(f"{name}: mean and 95% interval over seeds", fontsize=11)
    panel.legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(file, dpi=100)


def _draw_ends(panel: Axes, outcomes: Sequence[Outcome], names: Sequence[str]) -> None:
    for value, color, label in ((at_the_end, _SAMPLED, "sampled"), (greedy_at_the_end, _GREEDY, "greedy")):
        for place, name in enumerate(reversed(names)):
            found = of(outcomes, name, value)
            panel.plot([found.mean - (found.half or 0), found.mean + (found.half or 0)], [place] * 2, color=color)
            panel.plot(found.mean, place, "o", color=color, markersize=5, label=label if place == 0 else None)
    panel.set_yticks(range(len(names)), list(reversed(names)))
    panel.set_title("accuracy at the end, 95% interval", fontsize=11)
    panel.legend(frameon=False, loc="upper left", fontsize=9)
    panel.grid(axis="x", color="#e4e6e9", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_curves(panel: Axes, outcomes: Sequence[Outcome], name: str) -> None:
    if name != REFERENCE and any(outcome.algorithm == REFERENCE for outcome in outcomes):
        _band(panel, outcomes, REFERENCE, lambda point: point.sampled, _GREY, f"{REFERENCE}, sampled")
    _band(panel, outcomes, name, lambda point: point.greedy, _GREEDY, "greedy")
    _band(panel, outcomes, name, lambda point: point.sampled, _SAMPLED, "sampled")
    panel.set_xlabel("samples, thousands", fontsize=9)
    panel.set_ylim(0, 1)
    panel.grid(axis="y", color="#e4e6e9", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _band(
    panel: Axes, outcomes: Sequence[Outcome], name: str, value: Callable[[Point], float], color: str, label: str
) -> None:
    def at(moment: int, of_point: Callable[[Point], float]) -> Callable[[Outcome], float]:
        return lambda run: of_point(run.points[moment])

    moments = range(min(len(outcome.points) for outcome in outcomes))
    x = np.array([of(outcomes, name, at(moment, lambda point: point.samples)).mean for moment in moments]) / 1000
    found = [of(outcomes, name, at(moment, value)) for moment in moments]
    means, halves = np.array([one.mean for one in found]), np.array([one.half or 0.0 for one in found])
    panel.plot(x, means, color=color, linewidth=1.8, marker="o", markersize=3, label=label)
    panel.fill_between(x, means - halves, means + halves, color=color, alpha=0.18, linewidth=0)
