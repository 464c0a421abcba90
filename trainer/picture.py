"""Draws curve.png from a run's metrics.jsonl: reward, validation, response length and time per stage."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trainer.final_report import shown_means
from trainer.reports.run_data import OUTSIDE, Steps, stage_seconds
from trainer.tracking import read_metrics
from verl_lite.errors import printable

Panel = tuple[str, str, Mapping[str, str]]
"""A plot of metrics over the steps: title, label of the y axis, and label of each metric in the legend."""
REWARD: Panel = ("Reward in training, mean over the samples of a step", "score", {"critic/score/mean": ""})
LENGTH: Panel = ("Response length", "tokens", {f"response_length/{name}": name for name in ("mean", "max", "min")})


@rc_context({"text.parse_math": False})  # a $ in the name of a data source does not start a formula
def draw_curve(run_dir: Path, first: Panel = REWARD, second: Panel = LENGTH, last: Panel | None = None) -> Path | None:
    """Writes RUN/curve.png with the given panels and validation, and returns its path. Returns None if the run has no
    training step. last: None draws the time by stage."""
    steps = read_metrics(Path(run_dir) / "metrics.jsonl")
    if not any("timing_s/step" in metrics or "critic/score/mean" in metrics for metrics in steps.values()):
        return None
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
    for axes in panels:
        axes.set(xlabel="training step", xlim=(0, max(1.0, max(steps) * 1.02)))
        axes.title.set_fontsize(10)  # the longest title is wider than a panel with a legend
        axes.grid(axis="y", color="#e4e6e9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[1]:
            # outside the axes, where the legend hides no curve
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    figure.suptitle(Path(run_dir).name, fontsize=13, fontweight="bold")
    path = Path(run_dir) / "curve.png"
    figure.savefig(path, dpi=110)
    return path


def _draw_series(panel: Axes, steps: Steps, title: str, label: str, names: Mapping[str, str]) -> None:
    """Draws the running mean of each metric; a panel with a single long series also shows its values."""
    panel.set(title=title, ylabel=label)
    for name, shown in names.items():
        points = [(step, metrics[name]) for step, metrics in steps.items() if name in metrics]
        x, y = np.array(points).reshape(-1, 2).T
        window = max(5, len(x) // 20) if len(names) == 1 and len(x) > 20 else 1
        if window > 1:
            panel.plot(x, y, alpha=0.3, linewidth=1)
            shown = f"mean of the last {window} steps"
        mean = [y[max(0, place - window) : place].mean() for place in range(1, len(y) + 1)]
        panel.plot(x, mean, linewidth=2, label=shown or None, marker="" if len(x) > 20 else "o", markersize=3)


def _draw_validation(panel: Axes, steps: Steps) -> None:
    curves: dict[tuple[str, bool], list[tuple[int, float]]] = {}
    names = set()
    for step, metrics in steps.items():
        for mean in shown_means(metrics):
            curves.setdefault((mean.source, mean.greedy), []).append((step, mean.value))
            names |= {mean.name} - {"mean"}  # of training without a rollout
    panel.set(title=", ".join(["Validation", *sorted(names)]) if curves else "nothing was validated")
    panel.set(ylabel="score" if names else "mean")
    for (source, greedy), points in sorted(curves.items()):
        label, style = f"{source}{' (greedy)' * greedy}", "--" if greedy else "-"
        panel.plot(*zip(*points, strict=True), style, marker="o", markersize=4, linewidth=2, label=printable(label))
    if all(0 <= value <= 1 for points in curves.values() for _, value in points):
        panel.set_ylim(-0.02, 1.02)


def _draw_time(panel: Axes, steps: Steps) -> None:
    """Draws the seconds of a step by stage, without validation and saving, which only some steps do."""
    panel.set(title="Time per step, by stage (without validation and saving)", ylabel="seconds")
    places, stages = stage_seconds(steps, most=120)
    if not places:
        return
    bottom = np.zeros(len(places))
    width = (places[-1] - places[0]) / max(1, len(places) - 1) or 1.0
    for name, seconds in stages.items():
        if name not in OUTSIDE:
            panel.bar(places, seconds, width, bottom=bottom, label=name, linewidth=0)
            bottom += seconds
    panel.set_ylim(0, 1.15 * float(np.percentile(bottom, 98)) or None)
