"""Statistics and drawing of curves of several runs: means with 95% intervals over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.validation.metrics import student_t

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHED = 5
"""Steps of the running mean in a picture."""


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and half the width of its 95% interval: Student's t over the values, None for a single one."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    quantile = student_t(len(values) - 1)
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, half


def with_half(mean: str, half: float | None) -> str:
    """Adds half the width of the interval to a mean, unless there is no interval."""
    if half is None:
        return mean
    return f"{mean} ± {half:.3f}"


def with_interval(values: Sequence[float]) -> str:
    """Returns the mean of the values with half the width of its 95% interval, as text."""
    mean, half = interval(values)
    return with_half(f"{mean:.3f}", half)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table whose first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- picture


def new_figure(width: float) -> Figure:
    """Returns an empty figure of 4.2 inches height and the given width in inches.

    It does without pyplot, which would look for a screen.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def style(panel: Axes) -> None:
    """Gives a panel horizontal lines, and no frame at the top and on the right. The horizontal axis starts at 0."""
    panel.set_xlim(left=0)
    panel.grid(axis="y", color="#e4e6e9", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


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


def caption(steps: int, seeds: int) -> str:
    """Returns the title of a picture, which says what the lines and bands are."""
    window = window_of(steps)
    smoothed = f"running mean of {window} steps" if window > 1 else "each step"
    if seeds < 2:
        return f"{smoothed}; one seed, therefore without an interval"
    return f"{smoothed}; mean and 95% interval of {seeds} seeds"


def draw_band(panel: Axes, positions: Sequence[float], runs: Sequence[Sequence[float]], label: str) -> None:
    """Draws the mean of the smoothed values of the runs, and its interval if there are several runs.

    Args:
        panel: The panel.
        positions: Horizontal position of each step.
        runs: The values of the steps, of each run.
        label: Name of the line in the legend.
    """
    window = window_of(len(positions))
    smoothed = [running_mean(values, window) for values in runs]
    means = []
    lows = []
    highs = []
    for values_of_step in zip(*smoothed, strict=True):
        mean, half = interval(values_of_step)
        half = half or 0.0
        means.append(mean)
        lows.append(mean - half)
        highs.append(mean + half)

    # markers, so that a short run is visible; those of a long run would cover its line
    marker = "" if len(positions) > 20 else "o"
    [line] = panel.plot(positions, means, linewidth=2, label=label, marker=marker, markersize=3)
    if len(runs) > 1:
        panel.fill_between(positions, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0)
