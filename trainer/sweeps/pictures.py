"""The pictures of a study, as SVG for the page and as PNG: learning curves, parallel coordinates, slices, importance.

Takes what `read_study` gives. Every trial has one colour in all of them, by the rank of its value, and in an SVG its
drawing has an id that ends with `trial-7`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.sweeps.importance import Importance
from trainer.sweeps.runner import short_names
from trainer.sweeps.space import Choices, Parameter
from trainer.sweeps.study import StudyRecord, TrialRecord

WORST_TO_BEST = LinearSegmentedColormap.from_list("value", ["#35a3a3", "#4a78d0", "#a24fb5", "#d9480f"])
_PLAIN = "#9aa3ad"
_AXIS = "#8a9099"
_SIZE, _BROAD = (4.7, 3.2), (8.0, 3.5)  # inches, of a page's column and of its whole width
_DPI = 130
_MOST_POINTS = 400
"""Of a curve that is drawn, so that a page of many long runs stays small."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.edgecolor": _AXIS,
    "xtick.color": _AXIS,
    "ytick.color": _AXIS,
}
_STYLE |= {"xtick.labelcolor": "#1c2126", "ytick.labelcolor": "#1c2126", "font.family": "DejaVu Sans"}


@dataclass(frozen=True)
class Picture:
    """A picture of the page. name: of its file. told: what it shows, in a sentence. broad: takes the whole width."""

    name: str
    told: str
    size: tuple[float, float]
    draw: Callable[[Axes], None]

    @property
    def broad(self) -> bool:
        return self.size[0] > _SIZE[0]

    def svg(self) -> str:
        """As an element of a page, whose width it takes."""
        buffer = io.StringIO()
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.name}):
            self._figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        text = buffer.getvalue()
        head, rest = text[text.index("<svg") :].split(">", 1)
        return re.sub(r' (width|height)="[^"]*"', "", head) + ">" + rest

    def png(self, folder: Path) -> Path:
        """Writes FOLDER/NAME.png."""
        path = folder / f"{self.name}.png"
        with matplotlib.rc_context(_STYLE):
            self._figure.savefig(path, dpi=_DPI, facecolor="white")
        return path

    @cached_property
    def _figure(self) -> Figure:
        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=self.size, layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots()
            axes.spines[["top", "right"]].set_visible(False)
            self.draw(axes)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # it is laid out; it need not be again for the second format
        return figure


class Colours:
    """Of trials, by the rank of their value among all trials: a run that broke would else make all others alike. Equal
    values have one rank. Trials without a value, and failed ones, are grey."""

    def __init__(self, record: StudyRecord) -> None:
        values = {trial.value for trial in record.trials if _has_place(trial) and trial.value is not None}
        self.worst_to_best = sorted(values, reverse=record.question.mode == "min")
        self.norm = Normalize(0, max(1, len(values) - 1))

    def of(self, trial: TrialRecord) -> str:
        if not _has_place(trial) or trial.value is None:
            return _PLAIN
        alone = len(self.worst_to_best) == 1
        return to_hex(WORST_TO_BEST(1.0 if alone else self.norm(self.worst_to_best.index(trial.value))))

    def bar(self, axes: Axes) -> None:
        """The legend of the colours: values at some of the ranks."""
        count = len(self.worst_to_best)
        found = axes.get_figure()
        if count < 2 or found is None:
            return
        colours = ScalarMappable(self.norm, WORST_TO_BEST)
        ranks = sorted({round(place) for place in np.linspace(0, count - 1, 5)})
        bar = found.colorbar(colours, ax=axes, label="value, coloured by rank", pad=0.01, aspect=30)
        bar.set_ticks(ranks, labels=[f"{self.worst_to_best[rank]:.3g}" for rank in ranks])


def _has_place(trial: TrialRecord) -> bool:
    return trial.state in ("complete", "pruned") and is_number(trial.value)


def is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def pictures(record: StudyRecord, importance: Importance) -> list[Picture]:
    """Those that have something to show."""
    colours = Colours(record)
    curves = {trial.number: curve_of(trial, record.question.metric) for trial in record.trials}
    drawn = [trial for trial in record.trials if curves[trial.number]]
    placed = [trial for trial in record.trials if _has_place(trial)]
    found = []
    if drawn:
        told = (
            "Each curve is the mean over the trial's seeds. Its colour, the same in all pictures, is the rank of the "
            "trial's value among all trials, not how far apart they are; failed ones are grey. Crosses end pruned "
            "trials, dots failed ones."
        )
        found.append(Picture("curves", told, _BROAD, lambda axes: _draw_curves(axes, record, drawn, curves, colours)))
    parameters = record.question.space.parameters
    if len(parameters) > 1 and len(placed) > 1:
        told = "Parallel coordinates: a line for each trial, dashed if it was pruned."
        size = (max(_BROAD[0], 1.5 * (len(parameters) + 1)), _BROAD[1])
        found.append(Picture("parallel", told, size, lambda axes: _draw_parallel(axes, record, placed, colours)))
    if importance.shares:
        shares = importance.shares
        found.append(
            Picture("importance", "Importance of the parameters.", _SIZE, lambda axes: _draw_shares(axes, shares))
        )
    complete = record.finished()
    for place, parameter in enumerate(parameters if complete else ()):
        told = f"{record.question.metric} against {parameter.name}, with 95% intervals over seeds."
        found.append(Picture(f"slice-{place + 1}", told, _SIZE, _slice(record, parameter, complete, colours)))
    return found


def curve_of(trial: TrialRecord, metric: str) -> list[tuple[int, float]]:
    """Step and mean over the runs that have it; what is no number is left out. Thinned where it is long."""
    histories = [run.history(metric) for run in trial.runs]
    points = []
    for step in sorted({step for history in histories for step in history}):
        values = [value for history in histories if is_number(value := history.get(step))]
        if values:
            points.append((step, sum(values) / len(values)))
    if len(points) <= _MOST_POINTS:
        return points
    return [points[place] for place in np.linspace(0, len(points) - 1, _MOST_POINTS).round().astype(int)]


# ------------------------------------------------------------------------------------------------------------- drawing


def _draw_curves(
    axes: Axes,
    record: StudyRecord,
    trials: Sequence[TrialRecord],
    curves: dict[int, list[tuple[int, float]]],
    colours: Colours,
) -> None:
    best = next((trial.number for trial in record.finished()), None)
    for trial in trials:
        steps, values = zip(*curves[trial.number], strict=True)
        width = 2.6 if trial.number == best else 1.3
        line = axes.plot(steps, values, color=colours.of(trial), linewidth=width, zorder=2 + width)[0]
        if len(steps) == 1:
            line.set_marker("o")
        line.set_gid(f"curves-trial-{trial.number}")
        if trial.state in ("pruned", "failed"):
            mark = "x" if trial.state == "pruned" else "o"
            end = axes.plot(steps[-1], values[-1], mark, color=colours.of(trial), markersize=6, zorder=6)[0]
            end.set_gid(f"curves-end-trial-{trial.number}")
    if best is not None and curves.get(best):
        step, value = curves[best][-1]
        axes.annotate(f"trial {best}", (step, value), (5, 0), textcoords="offset points", va="center", fontsize=9)
        axes.margins(x=0.09)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(record.question.metric, fontsize=10)
    axes.grid(axis="y", color=_AXIS, alpha=0.25)
    colours.bar(axes)


def _draw_parallel(axes: Axes, record: StudyRecord, trials: Sequence[TrialRecord], colours: Colours) -> None:
    names = short_names([parameter.name for parameter in record.question.space.parameters])
    scales = [_Scale.of(parameter) for parameter in record.question.space.parameters]
    values = [trial.value for trial in trials if trial.value is not None]
    scales.append(_Scale.between(min(values), max(values), log=False))
    for trial in trials:
        given = [*(trial.parameters[p.name] for p in record.question.space.parameters), trial.value]
        heights = [scale.place(value) for scale, value in zip(scales, given, strict=True)]
        style = "--" if trial.state == "pruned" else "-"
        line = axes.plot(range(len(heights)), heights, style, color=colours.of(trial), linewidth=1.5, alpha=0.85)[0]
        line.set_gid(f"parallel-trial-{trial.number}")
    for x, scale in enumerate(scales):
        axes.axvline(x, color=_AXIS, linewidth=1, zorder=1)
        for label, height in scale.ticks():
            axes.text(x + 0.02, height, label, fontsize=8.5, va="center", zorder=7)
    axes.set_xticks(range(len(scales)), [*names, record.question.metric])
    axes.set_xlim(-0.1, len(scales) - 0.75)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _slice(
    record: StudyRecord, parameter: Parameter, trials: Sequence[TrialRecord], colours: Colours
) -> Callable[[Axes], None]:
    return lambda axes: _draw_slice(axes, record, parameter, trials, colours)


def _draw_slice(
    axes: Axes, record: StudyRecord, parameter: Parameter, trials: Sequence[TrialRecord], colours: Colours
) -> None:
    if isinstance(parameter, Choices):
        labels = [option.label for option in parameter.options]
        axes.set_xticks(range(len(labels)), labels, rotation=0 if sum(map(len, labels)) < 36 else 25)
        axes.set_xlim(-0.6, len(labels) - 0.4)
    elif parameter.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    for trial in trials:
        place = trial.parameters[parameter.name]
        if isinstance(parameter, Choices):
            same = [other.number for other in trials if other.parameters[parameter.name] == place]
            place = labels.index(str(place)) + _beside(sorted(same).index(trial.number), len(same))
        assert trial.value is not None
        bars = axes.errorbar(place, trial.value, trial.half_width, color=colours.of(trial), fmt="o", markersize=5)
        bars.lines[0].set_gid(f"slice-{parameter.name}-trial-{trial.number}")
        for interval in bars.lines[2]:
            interval.set_gid(f"slice-{parameter.name}-interval-trial-{trial.number}")
    axes.set_xlabel(parameter.name)
    axes.set_ylabel(record.question.metric, fontsize=8)
    axes.grid(axis="y", color=_AXIS, alpha=0.25)


def _beside(place: int, count: int) -> float:
    """So that trials of one choice stand beside each other."""
    return 0.0 if count == 1 else 0.5 * (place / (count - 1) - 0.5)


def _draw_shares(axes: Axes, shares: dict[str, float]) -> None:
    names = list(shares)
    places = range(len(names), 0, -1)
    axes.barh(places, list(shares.values()), color="#3f7cc4", height=0.6)
    axes.set_yticks(places, short_names(names))
    for place, share in zip(places, shares.values(), strict=True):
        axes.text(share + 0.01, place, f"{share:.0%}", va="center", fontsize=9)
    axes.set_xlim(0, 1.1 * max(shares.values()))
    axes.set_xlabel("share of the importance")


@dataclass(frozen=True)
class _Scale:
    """An axis of the parallel coordinates. labels: of a parameter with choices; else low, high, log count."""

    labels: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0
    log: bool = False

    @classmethod
    def of(cls, parameter: Parameter) -> _Scale:
        if isinstance(parameter, Choices):
            return cls(tuple(option.label for option in parameter.options))
        return cls.between(parameter.low, parameter.high, parameter.log)

    @classmethod
    def between(cls, low: float, high: float, log: bool) -> _Scale:
        return cls(low=low, high=high, log=log)

    def place(self, value: object) -> float:
        """0 at the bottom, 1 at the top."""
        if self.labels:
            return self.labels.index(str(value)) / max(1, len(self.labels) - 1)
        low, high, number = (self._scaled(each) for each in (self.low, self.high, float(str(value))))
        return (number - low) / (high - low) if high > low else 0.5

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value

    def ticks(self) -> list[tuple[str, float]]:
        if self.labels:
            return [(label, self.place(label)) for label in self.labels]
        low, high = self._scaled(self.low), self._scaled(self.high)
        shares = np.linspace(0, 1, 5) if high > low else [0.5]
        places = [low + share * (high - low) for share in shares]
        return [
            (f"{math.exp(at) if self.log else at:.3g}", float(share)) for at, share in zip(places, shares, strict=True)
        ]
