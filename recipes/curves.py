"""`python -m recipes.curves LABEL=RUN ... --metrics NAME=TITLE ... --to FILE.png`: runs side by side, as one picture.

One panel for each metric, one line for each run. RUN is a run folder; NAME is a metric of its metrics.jsonl. Where the
run logged NAME/ci95 too, the half width of an interval, it is drawn as a band.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trainer.tracking import read_metrics

COLORS = ("#3b6fb6", "#e08a2e", "#3f9b5f", "#b5495b", "#7a6bb0")

Steps = Mapping[int, Mapping[str, float]]


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m recipes.curves", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN", type=_named)
    parser.add_argument("--metrics", nargs="+", required=True, metavar="NAME=TITLE", type=_named)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args(argv)
    runs = [(label, read_metrics(Path(run) / "metrics.jsonl")) for label, run in options.runs]
    draw(runs, options.metrics, options.to)
    print(f"wrote {options.to}")
    return 0


def draw(runs: Sequence[tuple[str, Steps]], metrics: Sequence[tuple[str, str]], target: Path) -> None:
    """Writes the picture. runs: metrics by step, with a label; metrics: name and title of each panel."""
    figure = Figure(figsize=(5.5 * len(metrics), 4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for panel, (name, title) in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        panel.set_title(title)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        for (label, steps), color in zip(runs, COLORS, strict=False):
            _line(panel, steps, name, label, color)
        panel.legend(frameon=False, fontsize=9)
    figure.savefig(target, dpi=110)


def _line(panel: Axes, steps: Steps, name: str, label: str, color: str) -> None:
    x = [step for step, metrics in steps.items() if name in metrics]
    y = [steps[step][name] for step in x]
    panel.plot(x, y, color=color, linewidth=2, marker="o" if len(x) < 20 else None, markersize=4, label=label)
    half = [steps[step].get(f"{name}/ci95", 0.0) for step in x]
    if any(half):
        low, high = ([value + sign * width for value, width in zip(y, half, strict=True)] for sign in (-1, 1))
        panel.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _named(argument: str) -> tuple[str, str]:
    name, separator, value = argument.rpartition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{argument!r}: expected two parts with = between them")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
