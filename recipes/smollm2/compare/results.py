"""The results of the comparison: curves of finished runs, their statistics, the table and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from recipes.curves import caption, draw_band, interval, markdown_table, new_figure, style, with_half, with_interval
from trainer.tracking import METRICS, read_metrics

OURS = "verl_lite"
TRL = "TRL"

REWARD = "critic/score/mean"
SECONDS = "timing_s/step"
ACCURACY = "val-core/smollm2/addition/reward/mean@1"

WINDOW = 10
"""Steps whose mean rewards are compared."""
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
        mean = with_half(f"{window.mean:+.3f}", window.half)
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
            with_interval(first_rewards),
            with_interval(last_rewards),
            with_interval(accuracies),
        ]
        if with_time:
            seconds: list[float] = []
            for run in runs:
                seconds += run.seconds
            cells.append(f"{statistics.median(seconds):.1f}")
        rows.append(cells)

    return markdown_table(rows)


# ------------------------------------------------------------------------------------------------------------- picture


def draw(curves: Curves, file: Path, with_time: bool = True) -> None:
    """Draws the rewards over steps and over minutes: mean over the seeds, with its 95% interval as a band.

    Args:
        curves: The finished runs.
        file: The picture.
        with_time: Whether the picture has the rewards over minutes.
    """
    from matplotlib.ticker import MaxNLocator

    number_of_panels = 2 if with_time else 1
    figure = new_figure(width=5.5 * number_of_panels)
    [panels] = figure.subplots(1, number_of_panels, sharey=True, squeeze=False)

    over_steps = panels[0]
    over_steps.set(title="Reward over steps", xlabel="training step", ylabel="share of right answers, sampled")
    over_steps.xaxis.set_major_locator(MaxNLocator(integer=True))
    steps = list(range(1, number_of_steps(curves) + 1))
    for side, runs in curves.items():
        draw_band(over_steps, steps, _rewards(runs), side)

    if with_time:
        over_minutes = panels[1]
        over_minutes.set(title="Reward over time", xlabel="minutes of training steps")
        for side, runs in curves.items():
            draw_band(over_minutes, mean_minutes(runs), _rewards(runs), side)

    for panel in panels:
        style(panel)
        panel.set_ylim(-0.02, 1.02)
    over_steps.legend(loc="upper left", frameon=False)
    number_of_seeds = len(curves[OURS])
    figure.suptitle(caption(len(steps), number_of_seeds), fontsize=10)
    figure.savefig(file, dpi=110)


def _rewards(runs: Sequence[Curve]) -> list[Sequence[float]]:
    return [run.rewards for run in runs]


def mean_minutes(runs: Sequence[Curve]) -> list[float]:
    """Returns the time from the first step to the end of each step in minutes, as a mean over the runs."""
    times = [accumulate(run.seconds) for run in runs]
    minutes = []
    for times_of_step in zip(*times, strict=True):
        minutes.append(statistics.fmean(times_of_step) / 60)
    return minutes
