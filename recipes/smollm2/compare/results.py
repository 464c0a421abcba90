"""The results of the comparison: curves of finished runs, their statistics, the table and the picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.tracking import METRICS, read_metrics
from trainer.validation.metrics import student_t

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = "verl_lite"
TRL = "TRL"

REWARD = "critic/score/mean"
SECONDS = "timing_s/step"
ACCURACY = "val-core/smollm2/addition/reward/mean@1"

WINDOW = 10
"""Steps whose mean rewards are compared."""
SMOOTHED = 5
"""Steps of the running mean in the picture."""
ENDS = 5
"""Steps at the start and at the end of a run whose mean reward the table shows."""


@dataclass(frozen=True)
class Curve:
    """A finished run.

    Args:
        rewards: Mean reward of each step.
        seconds: Duration of each step.
        accuracy: Share of right answers to the held-out questions, greedy.
    """

    rewards: Sequence[float]
    seconds: Sequence[float]
    accuracy: float


Curves = Mapping[str, Sequence[Curve]]
"""The finished runs of each side, in the order of the seeds."""


def read_curve(run: Path, steps: int) -> Curve | None:
    """Returns the curve of a run, or None if the run is not finished."""
    metrics = read_metrics(run / METRICS)
    # both sides write the accuracy after everything else
    last_metrics = metrics.get(steps, {})
    if ACCURACY not in last_metrics:
        return None

    rewards = []
    seconds = []
    for step in range(1, steps + 1):
        rewards.append(metrics[step][REWARD])
        seconds.append(metrics[step][SECONDS])
    return Curve(rewards, seconds, last_metrics[ACCURACY])


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and half the width of its 95% interval: Student's t over the values, None for a single one."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    quantile = student_t(len(values) - 1)
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, half


@dataclass(frozen=True)
class Difference:
    """The difference of mean rewards, verl_lite less TRL, over the steps `first` to `last`.

    Args:
        mean: Mean over the seeds.
        half: Half the width of its 95% interval; None with a single seed.
    """

    first: int
    last: int
    mean: float
    half: float | None

    @property
    def agrees(self) -> bool | None:
        """True if the interval contains 0; None without an interval."""
        if self.half is None:
            return None
        return abs(self.mean) <= self.half


def difference(curves: Curves, start: int, stop: int) -> Difference:
    """Compares the mean rewards of both sides over the steps `start` + 1 to `stop`.

    Runs of one seed have the same questions. Their difference is therefore taken first, and the interval is Student's t
    over the differences of the seeds.
    """
    steps = slice(start, stop)
    differences_of_seeds = []
    for ours, theirs in zip(curves[OURS], curves[TRL], strict=True):
        our_mean = statistics.fmean(ours.rewards[steps])
        their_mean = statistics.fmean(theirs.rewards[steps])
        differences_of_seeds.append(our_mean - their_mean)
    mean, half = interval(differences_of_seeds)
    return Difference(start + 1, stop, mean, half)


def agreement(curves: Curves) -> str:
    """Returns a table of the differences in windows of `WINDOW` steps and over all steps, and a sentence on whether the
    curves agree, that is, whether the interval of each window contains 0."""
    steps = number_of_steps(curves)
    windows = []
    for start in range(0, steps, WINDOW):
        stop = min(start + WINDOW, steps)
        windows.append(difference(curves, start, stop))
    whole_run = difference(curves, 0, steps)

    verdicts = {True: "contains 0", False: "does not contain 0", None: "none with one seed"}
    lines = [f"| steps | reward of {OURS} less that of {TRL} | 95% interval |", "|---|---|---|"]
    for window in [*windows, whole_run]:
        mean = _with_half(f"{window.mean:+.3f}", window.half)
        verdict = verdicts[window.agrees]
        lines.append(f"| {window.first} to {window.last} | {mean} | {verdict} |")
    lines += ["", verdict_on(windows)]
    return "\n".join(lines)


def number_of_steps(curves: Curves) -> int:
    """Returns the number of training steps, which all runs have in common."""
    return len(curves[OURS][0].rewards)


def verdict_on(windows: Sequence[Difference]) -> str:
    """Returns a sentence on whether the curves agree in these windows."""
    if windows[0].half is None:
        return "With one seed there is no interval, so whether the curves agree is open: use --seeds 3."
    outside = [window for window in windows if not window.agrees]
    if not outside:
        return "The curves over steps agree: the 95% interval of the difference contains 0 in each window."
    where = ", ".join(f"{window.first} to {window.last}" for window in outside)
    # the intervals of the windows are 95% each and, for equal libraries, independent
    by_chance = 1 - 0.95 ** len(windows)
    return (
        f"The curves over steps do not agree in the steps {where}, where the 95% interval of the difference does not "
        f"contain 0. Equal libraries have such a window in {by_chance:.0%} of comparisons with {len(windows)} windows."
    )


def _with_half(mean: str, half: float | None) -> str:
    """Adds half the width of the interval to a mean, unless there is no interval."""
    if half is None:
        return mean
    return f"{mean} ± {half:.3f}"


def table(curves: Curves, with_time: bool = True) -> str:
    """Returns the table of results. Intervals are over seeds.

    Args:
        curves: The finished runs.
        with_time: Whether the table has the median duration of a step.
    """
    columns = [
        "side",
        "seeds",
        f"reward, first {ENDS} steps",
        f"reward, last {ENDS} steps",
        "held-out accuracy, greedy",
    ]
    if with_time:
        columns.append("seconds per step (median)")
    rows = [columns]
    for side, runs in curves.items():
        first_rewards = [statistics.fmean(run.rewards[:ENDS]) for run in runs]
        last_rewards = [statistics.fmean(run.rewards[-ENDS:]) for run in runs]
        accuracies = [run.accuracy for run in runs]
        cells = [
            side,
            str(len(runs)),
            _with_interval(first_rewards),
            _with_interval(last_rewards),
            _with_interval(accuracies),
        ]
        if with_time:
            seconds: list[float] = []
            for run in runs:
                seconds += run.seconds
            cells.append(f"{statistics.median(seconds):.1f}")
        rows.append(cells)

    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(columns) + "|")
    return "\n".join(lines)


def _with_interval(values: Sequence[float]) -> str:
    mean, half = interval(values)
    return _with_half(f"{mean:.3f}", half)


# ------------------------------------------------------------------------------------------------------------- picture


def draw(curves: Curves, file: Path, with_time: bool = True) -> None:
    """Draws the rewards over steps and over minutes: mean over the seeds, with its 95% interval as a band.

    Args:
        curves: The finished runs.
        file: The picture.
        with_time: Whether the picture has the rewards over minutes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    number_of_panels = 2 if with_time else 1
    figure = Figure(figsize=(5.5 * number_of_panels, 4.2), layout="constrained", facecolor="white")
    # without pyplot, which would look for a screen
    FigureCanvasAgg(figure)
    [panels] = figure.subplots(1, number_of_panels, sharey=True, squeeze=False)

    over_steps = panels[0]
    over_steps.set(title="Reward over steps", xlabel="training step", ylabel="share of right answers, sampled")
    over_steps.xaxis.set_major_locator(MaxNLocator(integer=True))
    steps = list(range(1, number_of_steps(curves) + 1))
    for side, runs in curves.items():
        _draw_band(over_steps, steps, runs, side)

    if with_time:
        over_minutes = panels[1]
        over_minutes.set(title="Reward over time", xlabel="minutes of training steps")
        for side, runs in curves.items():
            _draw_band(over_minutes, mean_minutes(runs), runs, side)

    for panel in panels:
        panel.set_xlim(left=0)
        panel.set_ylim(-0.02, 1.02)
        panel.grid(axis="y", color="#e4e6e9", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    over_steps.legend(loc="upper left", frameon=False)
    figure.suptitle(caption(curves), fontsize=10)
    figure.savefig(file, dpi=110)


def caption(curves: Curves) -> str:
    """Returns the title of the picture, which says what the lines and bands are."""
    seeds = len(curves[OURS])
    window = window_of(number_of_steps(curves))
    smoothed = f"running mean of {window} steps" if window > 1 else "each step"
    if seeds < 2:
        return f"{smoothed}; one seed, therefore without an interval"
    return f"{smoothed}; mean and 95% interval of {seeds} seeds"


def window_of(steps: int) -> int:
    """Returns the number of steps of the running mean; 1, no mean, for short runs."""
    return SMOOTHED if steps > 4 * SMOOTHED else 1


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns at each position the mean of the last `window` values; at the start, of those that exist."""
    means = []
    for stop in range(1, len(values) + 1):
        start = max(0, stop - window)
        means.append(statistics.fmean(values[start:stop]))
    return means


def mean_minutes(runs: Sequence[Curve]) -> list[float]:
    """Returns the time from the first step to the end of each step in minutes, as a mean over the runs."""
    times = [accumulate(run.seconds) for run in runs]
    minutes = []
    for times_of_step in zip(*times, strict=True):
        minutes.append(statistics.fmean(times_of_step) / 60)
    return minutes


def _draw_band(panel: Axes, positions: Sequence[float], runs: Sequence[Curve], label: str) -> None:
    """Draws the mean of the smoothed rewards of the runs, and its interval if there are several runs.

    Args:
        panel: The panel.
        positions: Horizontal position of each step.
        runs: The runs of one side.
        label: Name of the side in the legend.
    """
    window = window_of(len(positions))
    smoothed = [running_mean(run.rewards, window) for run in runs]
    means = []
    lows = []
    highs = []
    for values in zip(*smoothed, strict=True):
        mean, half = interval(values)
        half = half or 0.0
        means.append(mean)
        lows.append(mean - half)
        highs.append(mean + half)

    # markers, so that a short run is visible; those of a long run would cover its line
    marker = "" if len(positions) > 20 else "o"
    [line] = panel.plot(positions, means, linewidth=2, label=label, marker=marker, markersize=3)
    if len(runs) > 1:
        panel.fill_between(positions, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0)
