"""Draws curve.png from a run's metrics.jsonl: reward, validation, response length and time per stage."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trainer.observe.final_report import shown_means
from trainer.observe.run_data import OUTSIDE, Point, Steps, stage_seconds
from trainer.observe.tracking import read_metrics
from verl_lite.errors import printable

Panel = tuple[str, str, Mapping[str, str]]
"""A plot of metrics over the steps: title, label of the y axis, and label of each metric in the legend."""
REWARD: Panel = ("Reward in training, mean over the samples of a step", "score", {"critic/score/mean": ""})
_LENGTHS = {
    "response_length/mean": "mean",
    "response_length/max": "max",
    "response_length/min": "min",
}
LENGTH: Panel = ("Response length", "tokens", _LENGTHS)


# a $ in the name of a data source does not start a formula, which stopped a run if it was no valid one
@rc_context({"text.parse_math": False})
def draw_curve(run_dir: Path, first: Panel = REWARD, second: Panel = LENGTH, last: Panel | None = None) -> Path | None:
    """Writes RUN/curve.png with the given panels and validation, and returns its path.

    Args:
        run_dir: The run folder.
        first, second: Panels on the left side.
        last: Panel at the bottom right. None draws the time by stage.

    Returns:
        The path, or None if the run has no training step.
    """
    run_dir = Path(run_dir)
    steps = read_metrics(run_dir / "metrics.jsonl")
    if not _has_training_step(steps):
        return None

    # without pyplot, which would choose a backend for the whole process and keep the figure in memory
    figure = Figure(figsize=(12, 7.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2).flat
    _draw_series(panels[0], steps, *first)
    _draw_validation(panels[1], steps)
    _draw_series(panels[2], steps, *second)
    if last is None:
        _draw_time(panels[3], steps)
    else:
        _draw_series(panels[3], steps, *last)

    # a run that has only step 0 would have an axis of the width 0
    right_end = max(1.0, max(steps) * 1.02)
    for axes in panels:
        axes.set(xlabel="training step", xlim=(0, right_end))
        _style(axes)
    figure.suptitle(run_dir.name, fontsize=13, fontweight="bold")
    path = run_dir / "curve.png"
    figure.savefig(path, dpi=110)
    return path


def _has_training_step(steps: Steps) -> bool:
    """Returns True if any step has a time or a reward; a validation before the training has neither."""
    for metrics in steps.values():
        if "timing_s/step" in metrics or "critic/score/mean" in metrics:
            return True
    return False


def _style(axes: Axes) -> None:
    """Sets the grid, the frame and the legend of a panel."""
    # the longest title is wider than a panel with a legend
    axes.title.set_fontsize(10)
    axes.grid(axis="y", color="#e4e6e9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _, labels = axes.get_legend_handles_labels()
    if labels:
        # outside the axes, where the legend hides no curve
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _draw_series(panel: Axes, steps: Steps, title: str, y_label: str, labels: Mapping[str, str]) -> None:
    """Draws the running mean of each metric; a panel with a single long series also shows its values."""
    panel.set(title=title, ylabel=y_label)
    for metric, label in labels.items():
        logged_steps = []
        values = []
        for step, metrics in steps.items():
            if metric in metrics:
                logged_steps.append(step)
                values.append(metrics[metric])

        is_long = len(values) > 20
        if is_long and len(labels) == 1:
            window = max(5, len(values) // 20)
            label = f"mean of the last {window} steps"
            panel.plot(logged_steps, values, alpha=0.3, linewidth=1)
            values = _running_means(values, window)
        # a single step has no line, so a short series has markers
        marker = "" if is_long else "o"
        panel.plot(
            logged_steps,
            values,
            linewidth=2,
            # matplotlib leaves a line without a label out of the legend
            label=label or None,
            marker=marker,
            markersize=3,
        )


def _running_means(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean of each value and the values before it, `window` in all; the first ones have fewer."""
    means = []
    for end in range(1, len(values) + 1):
        start = max(0, end - window)
        mean = np.mean(values[start:end])
        means.append(float(mean))
    return means


def _draw_validation(panel: Axes, steps: Steps) -> None:
    """Draws the validation means over the steps, one line per data source, dashed for greedy answers."""
    curves: dict[tuple[str, bool], list[Point]] = {}
    names = set()
    are_shares = True
    for step, metrics in steps.items():
        for mean in shown_means(metrics):
            points = curves.setdefault((mean.source, mean.greedy), [])
            points.append((step, mean.value))
            names.add(mean.name)
            are_shares = are_shares and 0 <= mean.value <= 1
    # the name in training without a rollout, where the data source is the metric
    names.discard("mean")

    title = "nothing was validated"
    if curves:
        title = ", ".join(["Validation", *sorted(names)])
    panel.set(title=title, ylabel="score" if names else "mean")
    for (source, greedy), points in sorted(curves.items()):
        style = "-"
        label = printable(source)
        if greedy:
            style = "--"
            label += " (greedy)"
        validated_steps = [step for step, _ in points]
        values = [value for _, value in points]
        panel.plot(
            validated_steps,
            values,
            style,
            marker="o",
            markersize=4,
            linewidth=2,
            label=label,
        )
    # the whole range of a share, with room for the markers at 0 and 1
    if are_shares:
        panel.set_ylim(-0.02, 1.02)


def _draw_time(panel: Axes, steps: Steps) -> None:
    """Draws the seconds of a step by stage, without validation and saving, which only some steps do."""
    panel.set(title="Time per step, by stage (without validation and saving)", ylabel="seconds")
    positions, seconds_by_stage = stage_seconds(steps, most=120)
    if not positions:
        return

    # bars touch; a single bar has the width 1
    gaps = max(1, len(positions) - 1)
    distance = (positions[-1] - positions[0]) / gaps
    total = np.zeros(len(positions))
    for stage, seconds in seconds_by_stage.items():
        if stage in OUTSIDE:
            continue
        panel.bar(
            positions,
            seconds,
            width=distance or 1.0,
            bottom=total,
            label=stage,
            linewidth=0,
        )
        total += seconds
    # a percentile, because the first step is often much longer than the others
    usual_maximum = float(np.percentile(total, 98))
    # None if all times are 0: matplotlib warns about an axis from 0 to 0
    panel.set_ylim(0, 1.15 * usual_maximum or None)
