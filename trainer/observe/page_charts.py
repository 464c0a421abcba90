"""The charts of the report page: traces and layouts of plotly as json values of bounded size.

A line of a chart names its run and metric instead of containing the numbers, which are in the data of the run
(`page_data.py`). Only validation, with its intervals, and the times by stage have their own numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from trainer.observe.final_report import ValidationMean, all_validation_means
from trainer.observe.health import MEMORY
from trainer.observe.run_data import RecordedRun, Steps, run_titles, stage_seconds
from verl_lite.json_types import JsonObject

COLORS = ("#3b6fb6", "#e08a2e", "#3f9b5f", "#b5495b", "#7a6bb0", "#8c6d4f", "#c77fb2", "#5f9ea8", "#a9a844", "#9aa0a8")
DASHES = ("solid", "dash", "dot")
MAX_BARS = 120  # of the chart of times
MAX_TEXT = 6000  # characters of a text


_LINE_WIDTH = 1.8
_LENGTHS = {f"response_length/{name}": name for name in ("mean", "max", "min")}
_MEMORY = {f"{role}/perf/{name}_gb": name for role in ("actor", "train") for name in MEMORY}
# main_rm logs `accuracy` and `margin`, DPO the other names, which are those of TRL
_ACCURACIES = {
    "train/accuracy": "training",
    "val/accuracy": "validation",
    "train/rewards/accuracies": "training",
    "val/rewards/accuracies": "validation",
}
_MARGINS = {
    "train/margin": "training",
    "val/margin": "validation",
    "train/rewards/margins": "training",
    "val/rewards/margins": "validation",
}


class PanelSpec(NamedTuple):
    """A chart of a run.

    Attributes:
        title: Title of the chart.
        unit: Label of its y axis.
        labels: Label of the line of each metric. A metric that was not logged has no line.
    """

    title: str
    unit: str
    labels: Mapping[str, str]


PANELS: tuple[PanelSpec, ...] = (
    PanelSpec(
        "Reward in training, mean over the samples of a step",
        "score",
        {"critic/score/mean": "", "actor/face_score": ""},
    ),
    PanelSpec("Loss", "", {"train/loss": "training", "val/loss": "validation"}),
    PanelSpec("Accuracy on pairs of answers", "share", _ACCURACIES),
    PanelSpec("Margin of pairs of answers", "", _MARGINS),
    PanelSpec(
        "Log-probabilities of the answers",
        "nats",
        {"train/logps/chosen": "chosen", "train/logps/rejected": "rejected"},
    ),
    PanelSpec("Success of episodes", "share", {"env/success": "", "env/own/success": ""}),
    PanelSpec("Response length", "tokens", _LENGTHS),
    PanelSpec("Truncated answers", "share", {"response_length/clip_ratio": ""}),
    PanelSpec(
        "Prompts without gradient: all answers have equal scores",
        "share",
        {"frac_reward_zero_std": "all equal", "groups/all_right": "all right", "groups/all_wrong": "all wrong"},
    ),
    PanelSpec("Entropy", "nats", {"actor/entropy": ""}),
    PanelSpec("Distance to the reference (KL)", "nats", {"actor/kl_loss": "in the loss", "critic/kl": "in the reward"}),
    PanelSpec("Change of the policy in a step (KL to the sampling policy)", "nats", {"actor/ppo_kl": ""}),
    PanelSpec("Clipped tokens", "share", {"actor/pg_clipfrac": "policy", "critic/vf_clipfrac": "values"}),
    PanelSpec("Gradient norm", "", {"actor/grad_norm": "actor", "critic/grad_norm": "critic", "train/grad_norm": ""}),
    PanelSpec("Learning rate", "", {"actor/lr": "actor", "critic/lr": "critic", "train/lr": ""}),
    PanelSpec(
        "Difference of token probabilities, sampler and trainer", "", {"training/rollout_probs_diff_mean": "mean"}
    ),
    PanelSpec("Failed rewards", "share", {"reward/error_rate": "all", "reward/timeout_rate": "timed out"}),
    PanelSpec("Failed episodes", "share", {"env/error_rate": ""}),
    PanelSpec("Throughput", "tokens per second", {"perf/throughput": "per device", "system/tps": "all"}),
    PanelSpec("Memory of the fullest worker", "GiB", _MEMORY),
    PanelSpec("How full the micro-batches are", "share", {"train/micro_batch_fill": ""}),
    PanelSpec("Idle devices in generation", "share", {"rollout/idle_frac": ""}),
    PanelSpec(
        "Weight versions of a sample",
        "",
        {"async/versions_per_sample/mean": "mean", "async/versions_per_sample/max": "max"},
    ),
    PanelSpec("Time of a weight update", "seconds", {"weight_sync/seconds": ""}),
    PanelSpec("Weights sent in an update", "MB", {"weight_sync/megabytes": ""}),
)
"""Charts of a run, in the order of the page."""


def panels_of(names: Iterable[str]) -> list[PanelSpec]:
    """Returns the charts of runs that logged these metrics: `PANELS`, one for the engines of a separate pool, and one
    for the entries that the reward function returns."""
    engine_labels = {}
    entry_labels = {}
    for name in names:
        if name.startswith("rollout/active_frac/"):
            engine_labels[name] = name.rpartition("/")[2]
        elif re.fullmatch(r"reward/[^/]+/mean", name):
            entry_labels[name] = name.split("/")[1]
    return [
        *PANELS,
        PanelSpec("Activity of each engine", "share", engine_labels),
        PanelSpec("Entries of the reward function's result, means", "", entry_labels),
    ]


Json = JsonObject
"""Data of the page, of a chart or of a part of it, as its script reads them."""
_MeansByLine = dict[tuple[str, bool], dict[int, dict[str, ValidationMean]]]
"""Validation means by line of the charts, (data source, greedy), then by number of the run and by variable."""


def charts_of(runs: Sequence[RecordedRun], run_entries: Sequence[Json], panels: Sequence[PanelSpec]) -> list[Json]:
    """Returns all charts of the page: the first panel, validation, the other panels, and the time of each run's stages.

    A panel whose metrics were 0 in all steps is left out, because a feature that is off logs zeros.
    """
    nonzero_metrics: set[str] = set()
    for run in runs:
        for metrics in run.steps.values():
            for name, value in metrics.items():
                if value:
                    nonzero_metrics.add(name)

    charts = []
    for panel in panels:
        if nonzero_metrics & panel.labels.keys():
            charts.append(_panel_chart(runs, run_entries, panel))
    # validation second, beside the reward in training
    charts[1:1] = _validation_charts(runs)
    for run, entry in zip(runs, run_entries, strict=True):
        charts.append(_time_chart(run, entry["title"]))
    return charts


def compared_metrics(names: Sequence[str], panels: Sequence[PanelSpec]) -> list[str]:
    """Returns the metrics for the table that compares runs: those of validation, and all that have a chart."""
    charted: set[str] = set()
    for panel in panels:
        charted.update(panel.labels)
    compared = []
    for name in names:
        if name in charted or name.startswith("val-core/"):
            compared.append(name)
    return compared


def without_tags(title: str) -> str:
    """Replaces `<`, because plotly interprets some tags in names of lines."""
    return title.replace("<", "‹")


def chart(title: str, unit: str, traces: list[Json], wide: bool = False, layout: Json | None = None) -> Json:
    """Returns a chart of the page.

    Args:
        title, unit: Texts of the chart. The unit is the label of the y axis.
        traces: Lines or bars.
        wide: True if the chart is as wide as two.
        layout: Additions to plotly's layout.
    """
    return {
        "title": title,
        "unit": unit,
        "traces": traces,
        "wide": wide,
        "layout": layout or {},
    }


def _panel_chart(runs: Sequence[RecordedRun], run_entries: Sequence[Json], panel: PanelSpec) -> Json:
    """Returns the chart of a panel. Colors distinguish the metrics of a single run, or else the runs."""
    traces: list[Json] = []
    for run_number, entry in enumerate(run_entries):
        series = entry["series"]
        logged_metrics = [name for name in panel.labels if name in series]
        for metric_number, metric in enumerate(logged_metrics):
            label = panel.labels[metric]
            if len(runs) > 1:
                color = color_of(run_number)
                dash = DASHES[metric_number % len(DASHES)]
                legend = f"{entry['title']} {label}".strip()
            else:
                color = color_of(metric_number)
                dash = "solid"
                legend = label or metric
            line = {"color": color, "width": _LINE_WIDTH, "dash": dash}
            # the page takes the values from the run's series, so that a metric is stored once
            trace = {
                "run": run_number,
                "metric": metric,
                "line": line,
                "name": legend,
            }
            traces.append(trace)

    y_axis = {"rangemode": "tozero" if _starts_at_zero(runs, panel) else "normal"}
    return chart(panel.title, panel.unit, traces, layout={"yaxis": y_axis})


def _starts_at_zero(runs: Sequence[RecordedRun], panel: PanelSpec) -> bool:
    """Returns True if the y axis of a panel includes 0, because its values are 0 or vary by much of their size."""
    values = []
    for run in runs:
        for metrics in run.steps.values():
            for name in panel.labels:
                if name in metrics:
                    values.append(metrics[name])
    largest = max(values)
    # an axis from 0 hides small changes of large values
    return largest == 0 or 0 <= min(values) < 0.3 * largest


def color_of(number: int) -> str:
    """Returns the color of a line; after the last color comes the first one again."""
    return COLORS[number % len(COLORS)]


def _time_chart(run: RecordedRun, title: str) -> Json:
    """Returns the chart of a run's times: a stack of bars for each step, with the seconds of each stage.

    Args:
        run: The run.
        title: Its title on the page.
    """
    positions, seconds_by_stage = stage_seconds(run.steps, MAX_BARS)
    bars: list[Json] = []
    for stage, seconds in seconds_by_stage.items():
        bar: Json = {
            "type": "bar",
            "x": positions,
            "y": compact(seconds),
            "name": stage,
            "hovertemplate": "%{y:.3~g} s",
        }
        bars.append(bar)
    layout = {"barmode": "stack", "bargap": 0.1}
    return chart(f"Time of a step by stage, {title}", "seconds", bars, wide=True, layout=layout)


def _validation_charts(runs: Sequence[RecordedRun]) -> list[Json]:
    """Returns the charts of validation metrics with 95% intervals.

    For a single run, there is one chart per metric with one line per data source. For several runs, there is one chart
    per source, which shows a metric that all runs have, or else the core metric of each run.
    """
    means_by_line = _validation_means_by_line(runs)
    sources: list[str] = []
    run_names = run_titles(runs)

    traces_by_title: dict[str, list[Json]] = {}
    for (source, greedy), means_by_run in means_by_line.items():
        source_text = f"{source} (greedy)" if greedy else source
        # sampled and greedy answers of a source have the same color
        if source not in sources:
            sources.append(source)
        for run_number, mean in _compared_means(means_by_run).items():
            if len(runs) == 1:
                title = mean.name
                line_name = source_text
                color = color_of(sources.index(source))
            else:
                title = source_text
                line_name = f"{run_names[run_number]} {mean.name}"
                color = color_of(run_number)
            trace = _validation_trace(runs[run_number], mean, line_name, color)
            traces_by_title.setdefault(f"Validation, {title}", []).append(trace)

    charts = []
    for title, traces in traces_by_title.items():
        charts.append(chart(title, "with 95% interval", traces, wide=len(traces) > 2))
    return charts


def _compared_means(means_by_run: Mapping[int, Mapping[str, ValidationMean]]) -> dict[int, ValidationMean]:
    """Chooses one mean for each run, of a variable that all runs have if there is one.

    Args:
        means_by_run: Means by variable, by number of the run.
    """
    variables_by_run = [set(means) for means in means_by_run.values()]
    common_variables = set.intersection(*variables_by_run)
    compared = {}
    for run_number, means in means_by_run.items():
        variables = common_variables or set(means)
        # acc is the core variable; without it, all runs take the same one
        variable = min(variables)
        if "acc" in variables:
            variable = "acc"
        compared[run_number] = means[variable]
    return compared


def _validation_means_by_line(runs: Sequence[RecordedRun]) -> _MeansByLine:
    """Returns the validation means of all runs, which name the metrics to draw. Their values are not used."""
    means_by_line: _MeansByLine = {}
    for run_number, run in enumerate(runs):
        # of all steps, because most of them have no validation
        last_values: dict[str, float] = {}
        for metrics in run.steps.values():
            last_values.update(metrics)
        for mean in all_validation_means(last_values):
            means_by_run = means_by_line.setdefault((mean.source, mean.greedy), {})
            means_by_variable = means_by_run.setdefault(run_number, {})
            # the first one remains if a run validated with several numbers of samples
            means_by_variable.setdefault(mean.variable, mean)
    return means_by_line


def _validation_trace(run: RecordedRun, mean: ValidationMean, name: str, color: str) -> Json:
    """Returns the line of a validation mean over the steps of a run. It is dashed for greedy samples."""
    steps = []
    values = []
    half_widths = []
    for step, metrics in run.steps.items():
        if mean.metric in metrics:
            steps.append(step)
            values.append(metrics[mean.metric])
            half_widths.append(metrics.get(mean.interval, 0.0))

    dash = "dash" if mean.greedy else "solid"
    trace: Json = {
        "x": steps,
        "y": compact(values),
        "name": without_tags(name),
        "mode": "lines+markers",
        "line": {"color": color, "dash": dash},
    }
    if any(half_widths):
        are_shares = is_share(mean.metric, run.steps)
        trace["error_y"] = interval(values, half_widths, are_shares=are_shares)
    return trace


def is_share(metric: str, steps: Steps) -> bool:
    """Returns True for a metric between 0 and 1: `acc`, or any metric if all logged training scores are in [0, 1]."""
    if "/acc/" in metric:
        return True
    has_scores = False
    for metrics in steps.values():
        if "critic/score/min" in metrics:
            has_scores = True
            is_in_range = 0 <= metrics["critic/score/min"] and metrics["critic/score/max"] <= 1
            if not is_in_range:
                return False
    return has_scores


def interval(values: Sequence[float], widths: Sequence[float], *, are_shares: bool) -> Json:
    """Returns plotly's error bars for values with these half widths. Error bars of a share end at 0 and 1."""
    up = list(widths)
    down = list(widths)
    if are_shares:
        for index, value in enumerate(values):
            up[index] = min(up[index], 1 - value)
            down[index] = min(down[index], value)
    return {
        "symmetric": False,
        "array": compact(up),
        "arrayminus": compact(down),
        "thickness": 1,
        "width": 2,
    }


def compact(value: object) -> object:
    """Rounds numbers to five digits and cuts long texts, also inside lists and dicts."""
    if isinstance(value, float):
        # NaN and infinity are no json, and the page's script could not read any of the data
        if not math.isfinite(value):
            return None
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [compact(entry) for entry in value]
    if isinstance(value, dict):
        return {key: compact(entry) for key, entry in value.items()}
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]} ... (cut here; {len(value):,} characters)"
    return value
