"""The run as one picture, curve.png, from metrics.jsonl: reward, validation, response length, time per stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trainer.final_report import validation_means
from trainer.tracking import read_metrics

STAGES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")
"""In the order of the step. Validation and saving, which not every step does, are left out of the picture."""

_COLORS = ("#3b6fb6", "#e08a2e", "#3f9b5f", "#b5495b", "#7a6bb0", "#8c6d4f", "#c77fb2", "#5f9ea8", "#a9a844")
_GREY = "#b8bcc2"
_BARS_MAX = 120

Steps = Mapping[int, Mapping[str, float]]
Panel = Callable[[Axes, Steps], None]


def draw_curve(run_dir: Path) -> Path | None:
    """Writes RUN/curve.png and returns its path; None if the run has no training step to show."""
    return draw_panels(run_dir, (_draw_reward, draw_validation, _draw_length, time_panel(STAGES)))


def draw_panels(run_dir: Path, panels: Sequence[Panel]) -> Path | None:
    """The same with any four panels, each of which draws what it finds in the metrics."""
    source = Path(run_dir) / "metrics.jsonl"
    steps = read_metrics(source) if source.exists() else {}
    if not any("timing_s/step" in metrics or "critic/score/mean" in metrics for metrics in steps.values()):
        return None
    figure = Figure(figsize=(12, 7.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes, draw in zip(figure.subplots(2, 2).flat, panels, strict=True):
        draw(axes, steps)
        _finish(axes, max(steps))
    figure.suptitle(Path(run_dir).name, fontsize=13, fontweight="bold")
    path = Path(run_dir) / "curve.png"
    figure.savefig(path, dpi=110)
    return path


def series_panel(title: str, label: str, names: Mapping[str, str]) -> Panel:
    """A panel of metrics over the steps. names: what each is called in the picture, by metric; of a single one the
    values are shown beside their running mean."""

    def draw(panel: Axes, steps: Steps) -> None:
        panel.set_title(title)
        panel.set_ylabel(label)
        for number, (name, shown) in enumerate(names.items()):
            x, y = _series(steps, name)
            if len(names) == 1:
                _draw_with_mean(panel, x, y)
            elif len(x):
                panel.plot(x, y, color=_COLORS[number], linewidth=2, label=shown)
                panel.legend(frameon=False, loc="best", fontsize=9)

    return draw


def time_panel(stages: Sequence[str]) -> Panel:
    """A panel of the seconds of a step, by stage, in this order."""
    return lambda panel, steps: _draw_time(panel, steps, stages)


def _draw_reward(panel: Axes, steps: Steps) -> None:
    panel.set_title("Reward in training, mean over the samples of a step")
    panel.set_ylabel("score")
    _draw_with_mean(panel, *_series(steps, "critic/score/mean"))


def _draw_with_mean(panel: Axes, x: np.ndarray, y: np.ndarray) -> None:
    if len(x) > 20:
        panel.plot(x, y, color=_COLORS[0], alpha=0.3, linewidth=1)
        window = max(5, len(x) // 20)
        panel.plot(x, _smooth(y, window), color=_COLORS[0], linewidth=2, label=f"mean of the last {window} steps")
        panel.legend(frameon=False, loc="lower right", fontsize=9)
    else:
        panel.plot(x, y, color=_COLORS[0], linewidth=2, marker="o", markersize=3)


def draw_validation(panel: Axes, steps: Steps) -> None:
    """A panel of the core measure of each source of the validation."""
    curves: dict[tuple[str, bool, str], list[tuple[int, float]]] = {}
    for step, metrics in steps.items():
        for mean in validation_means(metrics):
            curves.setdefault((mean.source, mean.greedy, mean.name), []).append((step, mean.value))
    names = sorted({name for _, greedy, name in curves if not greedy} or {name for _, _, name in curves})
    panel.set_title("Validation" + (f", {', '.join(names)}" if names else ""))
    panel.set_ylabel("accuracy" if all(name.startswith("acc") for name in names) else "reward")
    sources = sorted({source for source, _, _ in curves})
    for (source, greedy, _), points in sorted(curves.items()):
        label = f"{source} (greedy)" if greedy else source
        style: dict[str, Any] = {"linestyle": "--", "alpha": 0.75} if greedy else {"linestyle": "-"}
        color = _COLORS[sources.index(source) % len(_COLORS)]
        panel.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, linewidth=2, label=label, **style)
    values = [value for points in curves.values() for _, value in points]
    if values and min(values) >= 0 and max(values) <= 1:
        panel.set_ylim(-0.02, 1.02)
    if curves:
        _legend_outside(panel)
    else:
        panel.text(0.5, 0.5, "nothing was validated", ha="center", va="center", transform=panel.transAxes, color="grey")


def _draw_length(panel: Axes, steps: Steps) -> None:
    panel.set_title("Response length")
    panel.set_ylabel("tokens")
    x, mean = _series(steps, "response_length/mean")
    panel.plot(x, mean, color=_COLORS[2], linewidth=2, label="mean")
    for name, style in (("max", "-"), ("min", ":")):
        x, y = _series(steps, f"response_length/{name}")
        panel.plot(x, y, color=_COLORS[2], alpha=0.4, linewidth=1, linestyle=style, label=name)
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False, loc="best", fontsize=9)


def _draw_time(panel: Axes, steps: Steps, names: Sequence[str]) -> None:
    panel.set_title("Time per step, by stage (without validation and saving)")
    panel.set_ylabel("seconds")
    timed = [(step, metrics) for step, metrics in steps.items() if "timing_s/step" in metrics]
    if not timed:
        return
    x = np.array([step for step, _ in timed], dtype=float)
    stages = {name: np.array([metrics.get(f"timing_s/{name}", 0.0) for _, metrics in timed]) for name in names}
    whole = np.array([metrics["timing_s/step"] for _, metrics in timed])
    stages["other"] = np.clip(whole - sum(stages.values()), 0.0, None)
    groups = np.array_split(np.arange(len(x)), min(_BARS_MAX, len(x)))
    places = np.array([x[group].mean() for group in groups])
    widths = np.array([x[group[-1]] - x[group[0]] + 1 for group in groups])
    bottom = np.zeros(len(groups))
    for number, (name, seconds) in enumerate(stages.items()):
        heights = np.array([seconds[group].mean() for group in groups])
        if heights.sum() < 0.005 * whole.mean() * len(groups):
            continue
        color = _GREY if name == "other" else _COLORS[number % len(_COLORS)]
        panel.bar(places, heights, widths, bottom=bottom, color=color, label=name, linewidth=0)
        bottom += heights
    _legend_outside(panel, from_the_top=True)
    panel.set_ylim(0, 1.15 * float(np.percentile(bottom, 98)))


def _legend_outside(panel: Axes, from_the_top: bool = False) -> None:
    """To the right of the panel, where it hides nothing. from_the_top: in the order of a stack, last drawn first."""
    handles, labels = panel.get_legend_handles_labels()
    order = slice(None, None, -1 if from_the_top else 1)
    panel.legend(handles[order], labels[order], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _finish(panel: Axes, last_step: int) -> None:
    panel.set_xlabel("training step")
    panel.set_xlim(0, max(1.0, last_step * 1.02))
    panel.title.set_fontsize(11)
    panel.grid(axis="y", color="#e4e6e9", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _series(steps: Steps, name: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(step, metrics[name]) for step, metrics in steps.items() if name in metrics]
    return np.array([step for step, _ in points]), np.array([value for _, value in points])


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and up to `window` - 1 before it."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)
