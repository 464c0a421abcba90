"""The part of the report page that is about a sweep: its trials, their curves, and their values over each parameter."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import log10
from pathlib import Path

from trainer.observe.page_data import COLORS, Json, chart, compact, interval, is_share
from trainer.observe.tracking import METRICS, read_metrics
from trainer.sweeps.study import Study, Trial
from trainer.sweeps.study_spec import metric_by_step

MAX_LEGEND = 24
MAX_TICKS = 6
MAX_BEST = 5
_GAP = 0.02
"""Distance between trials with the same value of a parameter, as a share of the axis."""


def read_study(folder: Path) -> Json:
    """Returns the page's data about a sweep, which may still be running. `runs` are the first run folders of the best
    trials."""
    study = Study.load(folder)  # from its log, without a lock, so that a running sweep is not disturbed
    metric = study.spec.metric
    parameters = [parameter.name for parameter in study.spec.space]

    curves: list[Json] = []
    are_shares: list[bool] = []
    for trial in study.trials:
        for number, run in enumerate(trial.runs):
            metrics = read_metrics(run.folder / METRICS)
            are_shares.append(is_share(metric, metrics))
            curves.append(_curve(trial, metric_by_step(metrics, metric), is_first=number == 0))
    layout = {"hovermode": "closest", "showlegend": len(study.trials) <= MAX_LEGEND}
    charts = [chart(metric, "one line per run", curves, wide=True, layout=layout)]
    # a parameter that has had one value so far would be a single column of points
    for name in parameters:
        is_varied = len({trial.parameters[name] for trial in study.trials}) > 1
        if is_varied:
            charts.append(_parameter_chart(study.trials, name, metric, is_share_metric=all(are_shares)))

    best = study.finished()
    first_folders = [trial.runs[0].folder for trial in best[:4]]
    states = Counter(trial.state for trial in study.trials)
    return {
        "facts": {"trials": len(study.trials), **states, study.spec.mode: metric},
        "best": [[_trial_text(trial), trial.commands] for trial in best[:MAX_BEST]],
        "columns": ["trial", "state", "value", "half width", *parameters, "steps", "seconds", "error"],
        "trials": [compact(_row(trial, parameters)) for trial in study.trials],
        "charts": charts,
        "runs": [folder for folder in first_folders if (folder / METRICS).is_file()],
    }


def _row(trial: Trial, parameters: Sequence[str]) -> list[object]:
    """Returns the trial's row of the table. parameters: names of the columns of parameters."""
    row: list[object] = [trial.number, trial.state, trial.value, trial.half_width]
    row += [_as_number(trial.parameters[name]) for name in parameters]
    row.append(max(run.steps for run in trial.runs))
    row.append(sum(run.seconds for run in trial.runs))
    row.append(trial.error)
    return row


def _curve(trial: Trial, points: dict[int, float], *, is_first: bool) -> Json:
    """Returns the trace of one run. is_first: True for the run of the trial that the legend shows."""
    return {
        "x": list(points),
        "y": list(points.values()),
        "line": {"color": _color(trial)},
        "name": f"trial {trial.number}",
        "legendgroup": str(trial.number),
        "showlegend": is_first,
        "text": _trial_text(trial),
        "hovertemplate": "%{y:.4~g}<br>%{text}",
    }


@dataclass(frozen=True)
class _Axis:
    """The axis of a parameter.

    Attributes:
        positions: Position of each trial, in the unit of the axis; logarithms if `is_log`.
        words: Names of the ticks if the values are not numbers.
        numbers: The distinct values if they are.
        is_log: True for a logarithmic axis.
    """

    positions: list[float]
    words: list[str]
    numbers: list[float]
    is_log: bool

    def layout(self) -> Json:
        """Returns plotly's layout, with a tick for each value if there are few."""
        axis: Json = {"type": "log" if self.is_log else "linear", "exponentformat": "e"}
        if self.words:
            labels = [word.replace("<", "‹") for word in self.words]
            return axis | {"tickvals": list(range(len(labels))), "ticktext": labels}
        if len(self.numbers) <= MAX_TICKS:
            return axis | {"tickvals": self.numbers, "ticktext": [f"{value:g}" for value in self.numbers]}
        return axis


def _axis_of(name: str, values: Sequence[str | float]) -> _Axis:
    """Returns the axis of the parameter `name`. It is logarithmic for learning rates, and for positive values of which
    the largest is at least ten times the smallest."""
    numbers = [value for value in values if isinstance(value, float)]
    # a single word among numbers, such as null, makes all of them words: an axis has either numbers or ticks
    if not numbers or len(numbers) < len(values):
        words = list(dict.fromkeys(map(str, values)))
        positions = [float(words.index(str(value))) for value in values]
        return _Axis(positions, words, numbers=[], is_log=False)

    smallest = min(numbers)
    largest = max(numbers)
    is_rate = name.rpartition(".")[2] in ("lr", "learning_rate")
    is_log = smallest > 0 and (is_rate or largest >= 10 * smallest)
    positions = [log10(value) for value in numbers] if is_log else numbers
    distinct = list(dict.fromkeys(numbers))
    return _Axis(positions, [], distinct, is_log)


def _parameter_chart(trials: Sequence[Trial], name: str, metric: str, *, is_share_metric: bool) -> Json:
    """Returns a chart of the trials' values over one parameter, with a trace for each trial. Trials with the same value
    of the parameter are drawn side by side."""
    finished = [trial for trial in trials if trial.value is not None]
    values = [_as_number(trial.parameters[name]) for trial in finished]
    axis = _axis_of(name, values)
    width = max(axis.positions) - min(axis.positions) if axis.positions else 0.0
    gap = _GAP * (width or 1.0)

    traces: list[Json] = []
    for number, trial in enumerate(finished):
        same_value = [other for other, value in enumerate(values) if value == values[number]]
        offset = same_value.index(number) - (len(same_value) - 1) / 2
        x = axis.positions[number] + gap * offset
        # plotly takes the values themselves, also for a logarithmic axis
        trace: Json = {
            "x": [10**x if axis.is_log else x],
            "y": [trial.value],
            "mode": "markers",
            "text": [_trial_text(trial)],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"size": 8, "color": _color(trial)},
        }
        if trial.half_width and trial.value is not None:
            trace["error_y"] = interval([trial.value], [trial.half_width], are_shares=is_share_metric)
        traces.append(trace)
    layout = {"hovermode": "closest", "showlegend": False, "xaxis": axis.layout()}
    return chart(name, metric, traces, layout=layout)


def _color(trial: Trial) -> str:
    return COLORS[trial.number % len(COLORS)]


def _as_number(value: str | int | float) -> str | float:
    """Converts a parameter's value to a number if possible."""
    with suppress(ValueError):
        return float(value)
    return value


def _trial_text(trial: Trial) -> str:
    """Returns one line about a trial: its number, state, value and parameters."""
    half_width = f" ±{trial.half_width:.3g}" if trial.half_width else ""
    parameters = ", ".join(f"{name}={value}" for name, value in trial.parameters.items())
    value = "-" if trial.value is None else f"{trial.value:.4g}"
    return f"trial {trial.number} ({trial.state}): {value}{half_width}, {parameters}".replace("<", "‹")
