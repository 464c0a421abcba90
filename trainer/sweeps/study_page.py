"""The part of the report page that is about a sweep: its trials, their curves, and their values over each parameter."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import log10
from pathlib import Path

from trainer.observe.page_charts import Json, chart, color_of, compact, interval, is_share, without_tags
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
    # from its log, without a lock, so that a running sweep is not disturbed
    study = Study.load(folder)
    parameters = [parameter.name for parameter in study.spec.space]
    best_trials = study.finished()

    best = []
    for trial in best_trials[:MAX_BEST]:
        best.append([_trial_text(trial), trial.commands])
    best_runs = []
    # the other tabs of the page compare four runs
    for trial in best_trials[:4]:
        run_folder = trial.runs[0].folder
        if (run_folder / METRICS).is_file():
            best_runs.append(run_folder)

    facts: Json = {"trials": len(study.trials)}
    facts |= Counter(trial.state for trial in study.trials)
    facts[study.spec.mode] = study.spec.metric
    return {
        "facts": facts,
        "best": best,
        "columns": ["trial", "state", "value", "half width", *parameters, "steps", "seconds", "error"],
        "trials": [_row(trial, parameters) for trial in study.trials],
        "charts": _charts(study, parameters),
        "runs": best_runs,
    }


def _charts(study: Study, parameters: Sequence[str]) -> list[Json]:
    """Returns the curves of all runs, and the values of the trials over each parameter."""
    metric = study.spec.metric
    curves: list[Json] = []
    are_shares = True
    for trial in study.trials:
        for run in trial.runs:
            metrics = read_metrics(run.folder / METRICS)
            are_shares = are_shares and is_share(metric, metrics)
            curve = _curve(trial, metric_by_step(metrics, metric))
            # the legend has one entry for all runs of a trial
            curve["showlegend"] = run is trial.runs[0]
            curves.append(curve)
    has_legend = len(study.trials) <= MAX_LEGEND
    layout = {"hovermode": "closest", "showlegend": has_legend}
    charts = [chart(metric, "one line per run", curves, wide=True, layout=layout)]

    for name in parameters:
        values = {trial.parameters[name] for trial in study.trials}
        # a parameter that has had one value so far would be a single column of points
        if len(values) > 1:
            charts.append(_parameter_chart(study, name, are_shares))
    return charts


def _row(trial: Trial, parameters: Sequence[str]) -> object:
    """Returns the row of a trial in the table, with a column for each of these parameters."""
    row: list[object] = [trial.number, trial.state, trial.value, trial.half_width]
    for name in parameters:
        row.append(_as_number(trial.parameters[name]))
    row += [trial.steps, trial.seconds, trial.error]
    return compact(row)


def _curve(trial: Trial, points: Mapping[int, float]) -> Json:
    """Returns the trace of one run of a trial through its values of the metric by step."""
    return {
        "x": list(points),
        "y": list(points.values()),
        "line": {"color": color_of(trial.number)},
        "name": f"trial {trial.number}",
        "legendgroup": str(trial.number),
        "text": _trial_text(trial),
        "hovertemplate": "%{y:.4~g}<br>%{text}",
    }


@dataclass(frozen=True)
class _Axis:
    """The axis of a parameter.

    Attributes:
        positions: Position of each trial, in the unit of the axis; logarithms if `is_log`.
        layout: Plotly's layout of the axis.
        is_log: True for a logarithmic axis.
    """

    positions: list[float]
    layout: Json
    is_log: bool = False


def _axis_of(name: str, values: Sequence[str | float]) -> _Axis:
    """Returns the axis of the parameter `name`. It is logarithmic for learning rates, and for positive values of which
    the largest is at least ten times the smallest. It has a tick for each value if there are few."""
    numbers = [value for value in values if isinstance(value, float)]
    # a single word among numbers, such as null, makes all of them words: an axis has either numbers or ticks
    if not numbers or len(numbers) < len(values):
        return _axis_of_words(values)

    layout: Json = {"type": "linear", "exponentformat": "e"}
    distinct = list(dict.fromkeys(numbers))
    if len(distinct) <= MAX_TICKS:
        layout["tickvals"] = distinct
        layout["ticktext"] = [f"{value:g}" for value in distinct]

    last_part = name.rpartition(".")[2]
    is_rate = last_part in ("lr", "learning_rate")
    smallest = min(distinct)
    has_wide_range = max(distinct) >= 10 * smallest
    is_log = smallest > 0 and (is_rate or has_wide_range)
    if is_log:
        layout["type"] = "log"
        numbers = [log10(value) for value in numbers]
    return _Axis(numbers, layout, is_log)


def _axis_of_words(values: Sequence[str | float]) -> _Axis:
    """Returns an axis with one position for each distinct value, in order of first appearance."""
    position_by_word: dict[str, float] = {}
    positions = []
    for value in values:
        next_position = float(len(position_by_word))
        position = position_by_word.setdefault(str(value), next_position)
        positions.append(position)

    layout: Json = {"type": "linear", "exponentformat": "e"}
    layout["tickvals"] = list(range(len(position_by_word)))
    layout["ticktext"] = [without_tags(word) for word in position_by_word]
    return _Axis(positions, layout)


def _parameter_chart(study: Study, name: str, are_shares: bool) -> Json:
    """Returns a chart of the trials' values over one parameter, with a trace for each trial. Trials with the same value
    of the parameter are drawn side by side.

    Args:
        study: The study.
        name: Name of the parameter.
        are_shares: True if the values of the metric are between 0 and 1.
    """
    finished = [trial for trial in study.trials if trial.value is not None]
    values = [_as_number(trial.parameters[name]) for trial in finished]
    axis = _axis_of(name, values)
    positions = _side_by_side(axis.positions)
    traces = []
    for trial, position in zip(finished, positions, strict=True):
        # plotly takes the values themselves, also for a logarithmic axis
        x = 10**position if axis.is_log else position
        traces.append(_point(trial, x, are_shares))

    layout = {
        "hovermode": "closest",
        "showlegend": False,
        "xaxis": axis.layout,
    }
    return chart(name, study.spec.metric, traces, layout=layout)


def _point(trial: Trial, x: float, are_shares: bool) -> Json:
    """Returns the trace of the value of a finished trial, with its interval."""
    value = trial.value
    half_width = trial.half_width
    trace: Json = {
        "x": [x],
        "y": [value],
        "mode": "markers",
        "text": [_trial_text(trial)],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"size": 8, "color": color_of(trial.number)},
    }
    if value is not None and half_width:
        trace["error_y"] = interval([value], [half_width], are_shares=are_shares)
    return trace


def _side_by_side(positions: Sequence[float]) -> list[float]:
    """Moves equal positions apart by `_GAP` of the axis, around the position that they share."""
    if not positions:
        return []
    width = max(positions) - min(positions)
    gap = _GAP * (width or 1.0)
    totals = Counter(positions)
    counts: Counter[float] = Counter()
    moved = []
    for position in positions:
        last_index = totals[position] - 1
        offset = counts[position] - last_index / 2
        counts[position] += 1
        moved.append(position + gap * offset)
    return moved


def _as_number(value: str | int | float) -> str | float:
    """Converts a parameter's value to a number if possible."""
    with suppress(ValueError):
        return float(value)
    return value


def _trial_text(trial: Trial) -> str:
    """Returns one line about a trial: its number, state, value and parameters."""
    value = "-"
    if trial.value is not None:
        value = f"{trial.value:.4g}"
    if trial.half_width:
        value += f" ±{trial.half_width:.3g}"
    text = f"trial {trial.number} ({trial.state}): {value}"
    for name, parameter in trial.parameters.items():
        text += f", {name}={parameter}"
    return without_tags(text)
