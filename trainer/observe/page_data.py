"""The data of the report page as json values of bounded size: charts, findings, configurations and samples.

Input are `RecordedRun`s, and for a sweep its study. Charts are traces and layouts of plotly, in which a line names its
run and metric instead of containing the numbers. Curves of long runs are thinned out, samples are selected evenly over
the steps, and long texts are cut. The page shows `notes` about what was left out.
"""

from __future__ import annotations

import base64
import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import NamedTuple, overload

from trainer.observe.console import format_seconds
from trainer.observe.final_report import ValidationMean, all_validation_means
from trainer.observe.health import MEMORY, findings_of
from trainer.observe.metric_docs import find
from trainer.observe.run_data import (
    Messages,
    RecordedAnswer,
    RecordedGroup,
    RecordedRun,
    groups,
    run_titles,
    stage_seconds,
)
from verl_lite.json_types import JsonObject

COLORS = ("#3b6fb6", "#e08a2e", "#3f9b5f", "#b5495b", "#7a6bb0", "#8c6d4f", "#c77fb2", "#5f9ea8", "#a9a844", "#9aa0a8")
DASHES = ("solid", "dash", "dot")
MAX_POINTS = 1500  # of a curve
MAX_BARS = 120  # of the chart of times
MAX_PICTURE_BYTES = 1_500_000
MAX_TEXT = 6000  # characters of a text
SAMPLE_BYTES = IMAGE_BYTES = 5_000_000  # of all runs together
PUBLIC_SAMPLE_BYTES = 150_000
MAX_SAMPLES = 8000
_FOLDERS = re.compile(r"(?<![\w/:.…])~?/(?:[^\s/,;:'\"()\[\]{}=]+/)+")
"""The folders of an absolute path. A path within a URL or after another folder does not match."""


def _of_pairs(*names: str) -> dict[str, str]:
    splits = {"train": "training", "val": "validation"}
    return {f"{split}/{name}": label for name in names for split, label in splits.items()}


class PanelSpec(NamedTuple):
    """A chart of a run. labels: the label of each metric's line; a metric that was not logged has no line."""

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
    PanelSpec("Accuracy on pairs of answers", "share", _of_pairs("accuracy", "rewards/accuracies")),
    PanelSpec("Margin of pairs of answers", "", _of_pairs("margin", "rewards/margins")),
    PanelSpec(
        "Log-probabilities of the answers", "nats", {f"train/logps/{name}": name for name in ("chosen", "rejected")}
    ),
    PanelSpec("Success of episodes", "share", {"env/success": "", "env/own/success": ""}),
    PanelSpec("Response length", "tokens", {f"response_length/{name}": name for name in ("mean", "max", "min")}),
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
    PanelSpec(
        "Memory of the fullest worker",
        "GiB",
        {f"{role}/perf/{name}_gb": name for role in ("actor", "train") for name in MEMORY},
    ),
    PanelSpec("How full the micro-batches are", "share", {"train/micro_batch_fill": ""}),
    PanelSpec("Idle devices in generation", "share", {"rollout/idle_frac": ""}),
    PanelSpec(
        "Weight versions of a sample", "", {f"async/versions_per_sample/{name}": name for name in ("mean", "max")}
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


def page_data(runs: Sequence[RecordedRun], study: Json | None = None, sample_bytes: int = SAMPLE_BYTES) -> Json:
    """Returns all data of the page.

    Args:
        runs: Runs to show or to compare.
        study: Result of `trainer.sweeps.study_page.read_study` if these are the best runs of a sweep, else None.
        sample_bytes: Approximate limit for the texts of all samples, in bytes.
    """
    # a row of the page names its prompt by number, because the answers of a group share it
    prompt_numbers: dict[Messages, int] = {}
    sample_rows: list[list[object]] = []
    run_entries: list[Json] = []

    # the runs share the limits equally, so that a comparison shows samples of all of them
    for run_number, (run, title) in enumerate(zip(runs, run_titles(runs), strict=True)):
        total_answers, answers = _samples(run.folder, sample_bytes // len(runs), MAX_SAMPLES // len(runs))
        for answer in answers:
            row = asdict(answer)
            row["prompt"] = prompt_numbers.setdefault(answer.prompt, len(prompt_numbers))
            sample_rows.append([run_number, *map(compact, row.values())])
        images, total_images = _images(run.folder, answers, IMAGE_BYTES // len(runs))

        entry = _run(run, title, _notes_on_samples(run, len(answers), total_answers, len(images), total_images))
        entry["images"] = images
        run_entries.append(entry)

    logged_metrics: dict[str, None] = {}  # in order of first appearance
    for entry in run_entries:
        logged_metrics |= dict.fromkeys(entry["series"])
    metric_names = list(logged_metrics)
    panels = panels_of(metric_names)

    return {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "colors": COLORS,
        "runs": run_entries,
        "study": study,
        "metrics": metric_names,
        "docs": _docs(metric_names),
        "charts": _charts(runs, run_entries, panels),
        "compared": _compared_metrics(metric_names, panels),
        "prompts": [[[role, compact(text)] for role, text in prompt] for prompt in prompt_numbers],
        "fields": ["run", *(field.name for field in fields(RecordedAnswer))],
        "samples": sample_rows,
    }


def _notes_on_samples(run: RecordedRun, answers: int, total_answers: int, images: int, total_images: int) -> list[str]:
    """Returns what the page leaves out of the samples. answers, images: numbers of those on the page."""
    notes = []
    if answers < total_answers:
        notes.append(
            f"{answers:,} of {total_answers:,} samples are on this page (for each step the best, the worst, and "
            f"repeated prompts); all are in {run.folder / 'samples'}"
        )
    if images < total_images:
        notes.append(f"{images:,} of {total_images:,} images of these samples are on this page")
    return notes


def _docs(metric_names: Sequence[str]) -> dict[str, Json]:
    """Returns the explanations of trainer/METRICS.md by metric. A user's own metrics have none."""
    docs = {}
    for name in metric_names:
        doc = find(name)
        if doc is not None:
            docs[name] = {"formula": doc.formula, "unit": doc.unit, "healthy": doc.healthy}
    return docs


def _charts(runs: Sequence[RecordedRun], run_entries: Sequence[Json], panels: Sequence[PanelSpec]) -> list[Json]:
    """Returns all charts of the page: the first panel, validation, the other panels, and the time of each run's stages.

    A panel whose metrics were 0 in all steps is left out, because a feature that is off logs zeros.
    """
    nonzero_metrics: set[str] = set()
    for run in runs:
        for metrics in run.steps.values():
            nonzero_metrics.update(name for name, value in metrics.items() if value)

    panel_charts = []
    for panel in panels:
        if nonzero_metrics & panel.labels.keys():
            panel_charts.append(_panel_chart(runs, run_entries, panel))
    time_charts = [_time_chart(run, entry["title"]) for run, entry in zip(runs, run_entries, strict=True)]
    return [*panel_charts[:1], *_validation_charts(runs), *panel_charts[1:], *time_charts]


def _compared_metrics(names: Sequence[str], panels: Sequence[PanelSpec]) -> list[str]:
    """Returns the metrics for the table that compares runs: those of validation, and all that have a chart."""
    charted: set[str] = set()
    for panel in panels:
        charted.update(panel.labels)
    return [name for name in names if name.startswith("val-core/") or name in charted]


def _run(run: RecordedRun, title: str, notes: list[str]) -> Json:
    """Returns the page's entry of a run. notes: what the page leaves out of the samples."""
    steps = list(run.steps)
    stride = math.ceil(len(steps) / MAX_POINTS)
    if stride > 1:
        # the last step is always drawn, because the facts name it
        steps = [*steps[:-1:stride], run.last_step]
        notes = [f"the curves show one in {stride} steps, and the last step", *notes]

    findings = findings_of(run)
    grade_counts = Counter(finding.grade for finding in findings)
    grade_texts = [f"{grade_counts[grade]} {grade}" for grade in ("bad", "look") if grade_counts[grade]]
    total_steps_text = "" if run.total_steps is None else f" of {run.total_steps}"

    return {
        "title": title.replace("<", "‹"),  # plotly interprets some tags in names of lines
        "folder": str(run.folder),
        "facts": {
            "State": run.state,
            "Steps": f"{run.last_step}{total_steps_text}",
            "Time in steps": format_seconds(run.seconds()),
            "Last written": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.modified)),
            "Findings": ", ".join(grade_texts) or "all ok",
        },
        "notes": [*run.notes, *notes],
        "steps": steps,
        "series": {name: _series_values(dict(points), steps) for name, points in run.series().items()},
        "findings": [asdict(finding) for finding in findings],
        "config": {key: [option.value, option.source] for key, option in run.config.items()},
        "pictures": _pictures(run.folder),
    }


def _pictures(run_dir: Path) -> list[Json]:
    """Returns the pictures of images before and after training. A picture that is too large for a page is left out."""
    pictures = []
    for kind in ("png", "gif"):
        file = run_dir / f"before_after.{kind}"
        if file.is_file() and file.stat().st_size <= MAX_PICTURE_BYTES:
            pictures.append({"name": file.name, "src": _data_uri(file, kind)})
    return pictures


def _data_uri(file: Path, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


def chart(title: str, unit: str, traces: list[Json], wide: bool = False, layout: Json | None = None) -> Json:
    """Returns a chart of the page. wide: True if it has the width of two. layout: plotly's layout."""
    return {"title": title, "unit": unit, "traces": traces, "wide": wide, "layout": layout or {}}


def _panel_chart(runs: Sequence[RecordedRun], run_entries: Sequence[Json], panel: PanelSpec) -> Json:
    """Returns the chart of a panel. Colors distinguish the metrics of a single run, or else the runs."""
    traces: list[Json] = []
    for run_number, entry in enumerate(run_entries):
        logged_metrics = [name for name in panel.labels if name in entry["series"]]
        for metric_number, metric in enumerate(logged_metrics):
            label = panel.labels[metric]
            if len(runs) > 1:
                color = COLORS[run_number % len(COLORS)]
                dash = DASHES[metric_number % len(DASHES)]
                legend = f"{entry['title']} {label}".strip()
            else:
                color = COLORS[metric_number % len(COLORS)]
                dash = "solid"
                legend = label or metric
            line = {"color": color, "width": 1.8, "dash": dash}
            # the page takes the values from the run's series, so that a metric is stored once
            traces.append({"run": run_number, "metric": metric, "line": line, "name": legend})

    values = []
    for run in runs:
        for metrics in run.steps.values():
            values += [metrics[name] for name in panel.labels if name in metrics]
    # an axis from 0 hides small changes of large values
    starts_at_zero = 0 <= min(values) < 0.3 * max(values) or max(values) == 0
    return chart(
        panel.title,
        panel.unit,
        traces,
        layout={"yaxis": {"rangemode": "tozero" if starts_at_zero else "normal"}},
    )


def _time_chart(run: RecordedRun, title: str) -> Json:
    """Returns stacked bars of the seconds of each stage. title: title of the run."""
    positions, seconds_by_stage = stage_seconds(run.steps, MAX_BARS)
    bars: list[Json] = []
    for stage, seconds in seconds_by_stage.items():
        bars.append(
            {"type": "bar", "x": positions, "y": compact(seconds), "name": stage, "hovertemplate": "%{y:.3~g} s"}
        )
    layout = {"barmode": "stack", "bargap": 0.1}
    return chart(f"Time of a step by stage, {title}", "seconds", bars, wide=True, layout=layout)


def _validation_charts(runs: Sequence[RecordedRun]) -> list[Json]:
    """Returns the charts of validation metrics with 95% intervals.

    For a single run, there is one chart per metric with one line per data source. For several runs, there is one chart
    per source, which shows a metric that all runs have, or else the core metric of each run.
    """
    means_by_line = _validation_means_by_line(runs)
    sources = list(dict.fromkeys(source for source, _ in means_by_line))
    titles = run_titles(runs)

    traces_by_title: dict[str, list[Json]] = {}
    for (source, greedy), means_by_run in means_by_line.items():
        source_text = f"{source} (greedy)" if greedy else source
        variables_by_run = [set(means) for means in means_by_run.values()]
        common_variables = set.intersection(*variables_by_run)
        for run_number, means in means_by_run.items():
            # acc is the core variable; without it, all runs take the same one
            variables = common_variables or means.keys()
            mean = means["acc" if "acc" in variables else min(variables)]
            if len(runs) == 1:
                title = mean.name
                line_name = source_text
                color = COLORS[sources.index(source) % len(COLORS)]
            else:
                title = source_text
                line_name = f"{titles[run_number]} {mean.name}"
                color = COLORS[run_number % len(COLORS)]
            trace = _validation_trace(runs[run_number], mean, line_name, color)
            traces_by_title.setdefault(f"Validation, {title}", []).append(trace)

    return [chart(title, "with 95% interval", traces, len(traces) > 2) for title, traces in traces_by_title.items()]


def _validation_means_by_line(
    runs: Sequence[RecordedRun],
) -> dict[tuple[str, bool], dict[int, dict[str, ValidationMean]]]:
    """Returns validation means by (data source, greedy), number of the run, and variable.

    Their values are of no use here; they name the metrics.
    """
    means_by_line: dict[tuple[str, bool], dict[int, dict[str, ValidationMean]]] = {}
    for run_number, run in enumerate(runs):
        last_values: dict[str, float] = {}
        for metrics in run.steps.values():
            last_values.update(metrics)
        for mean in all_validation_means(last_values):
            means_by_run = means_by_line.setdefault((mean.source, mean.greedy), {})
            # the first one remains if a run validated with several numbers of samples
            means_by_run.setdefault(run_number, {}).setdefault(mean.variable, mean)
    return means_by_line


def _validation_trace(run: RecordedRun, mean: ValidationMean, name: str, color: str) -> Json:
    """Returns the line of a validation mean over the steps of a run. It is dashed for greedy samples."""
    validated = {step: metrics for step, metrics in run.steps.items() if mean.metric in metrics}
    values = [metrics[mean.metric] for metrics in validated.values()]
    half_widths = [metrics.get(mean.interval, 0.0) for metrics in validated.values()]
    trace: Json = {
        "x": list(validated),
        "y": compact(values),
        "name": name.replace("<", "‹"),
        "mode": "lines+markers",
        "line": {"color": color, "dash": "dash" if mean.greedy else "solid"},
    }
    if any(half_widths):
        trace["error_y"] = interval(values, half_widths, are_shares=is_share(mean.metric, run.steps))
    return trace


def is_share(metric: str, steps: Mapping[int, Mapping[str, float]]) -> bool:
    """Returns True for a metric between 0 and 1: `acc`, or any metric if all logged training scores are in [0, 1]."""
    if "/acc/" in metric:
        return True
    scored_steps = [metrics for metrics in steps.values() if "critic/score/min" in metrics]
    if not scored_steps:
        return False
    return all(0 <= metrics["critic/score/min"] and metrics["critic/score/max"] <= 1 for metrics in scored_steps)


def interval(values: Sequence[float], widths: Sequence[float], *, are_shares: bool) -> Json:
    """Returns plotly's error bars for values with these half widths. Error bars of a share end at 0 and 1."""
    up = list(widths)
    down = list(widths)
    if are_shares:
        for index, value in enumerate(values):
            up[index] = min(up[index], 1 - value)
            down[index] = min(down[index], value)
    return {"symmetric": False, "array": compact(up), "arrayminus": compact(down), "thickness": 1, "width": 2}


def _series_values(value_by_step: Mapping[int, float], steps: Sequence[int]) -> list[object]:
    """Returns a metric's values as the page reads them.

    The result is [values] with one value or None for each of `steps`, or [steps, values] for a metric that is logged
    at few steps, which is never thinned out.
    """
    # with fewer values than gaps, the steps of the values take less room than a None for each gap
    if len(value_by_step) <= len(steps) // 2:
        return [list(value_by_step), compact(list(value_by_step.values()))]
    return [[compact(value_by_step.get(step)) for step in steps]]


def compact(value: object) -> object:
    """Rounds numbers to five digits and cuts long texts, also inside lists and dicts."""
    if isinstance(value, float):
        # NaN and infinity are no json, and the page's script could not read any of the data
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, list):
        return [compact(entry) for entry in value]
    if isinstance(value, dict):
        return {key: compact(entry) for key, entry in value.items()}
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]} ... (cut here; {len(value):,} characters)"
    return value


@overload
def without_folders(value: str, folders: Sequence[str] = ()) -> str: ...
@overload
def without_folders(value: object, folders: Sequence[str] = ()) -> object: ...
def without_folders(value: object, folders: Sequence[str] = ()) -> object:
    """Replaces each absolute path by `…/` and its last part in all texts of a JSON-compatible value.

    Args:
        value: A text, or lists and dicts of texts. Other values are returned as they are.
        folders: Folders that are replaced as a whole, because their names can contain spaces; longest first.
    """
    if isinstance(value, str):
        for folder in folders:
            value = value.replace(f"{folder}/", "…/")
        return _FOLDERS.sub("…/", value)
    if isinstance(value, list):
        return [without_folders(entry, folders) for entry in value]
    if isinstance(value, dict):
        return {key: without_folders(entry, folders) for key, entry in value.items()}
    return value


def known_folders(runs: Sequence[RecordedRun]) -> list[str]:
    """Returns the folders of the runs, of the user and of all absolute paths in their options, longest first."""
    folders = {str(Path.home())}
    for run in runs:
        folders.add(str(run.folder.absolute().parent))
        for option in run.config.values():
            if option.value.startswith("/"):
                folders.add(str(Path(option.value).parent))
    # a folder within another one must be replaced before it
    return sorted(folders - {"/"}, key=len, reverse=True)


def _samples(run_dir: Path, most_bytes: int, most_rows: int) -> tuple[int, list[RecordedAnswer]]:
    """Selects the samples of a run for the page, evenly over the steps.

    Args:
        run_dir: The run folder.
        most_bytes: Limit for the texts of the samples. The trees of requests have a second limit of this size, and a
            tree that exceeds it is left out.
        most_rows: Limit for the number of samples.

    Returns:
        The number of all samples of the run, and the selected ones.
    """
    all_groups = list(groups(run_dir))
    total = sum(len(group.uids) for group in all_groups)
    # each step that is read has room for 2 rows, the best and the worst
    stride = max(1, math.ceil(len(all_groups) / max(1, most_rows // 2)))
    answers: list[RecordedAnswer] = []
    # room that a step does not use is left to the next steps, because a tree may need more than that of a step
    tree_room = 0
    for group in all_groups[::stride]:
        text_room = stride * most_bytes // len(all_groups)
        tree_room += text_room
        row_limit = max(2, stride * most_rows // len(all_groups))
        rows = _rows_by_interest(group)[:row_limit]
        for rank, answer in enumerate(group.read(rows)):
            text_room -= _size_on_page(answer)
            if text_room < 0 and rank >= 2:
                break
            tree_size = len(str(answer.requests))
            if tree_size <= tree_room:
                tree_room -= tree_size
            else:
                answer = replace(answer, requests=())
            answers.append(answer)
    return total, answers


def _size_on_page(answer: RecordedAnswer) -> int:
    """Estimates the bytes of an answer on the page, without its tree. All other fields together count as 120."""
    _, last_message = answer.prompt[-1]
    return 120 + sum(len(text[:MAX_TEXT].encode()) for text in (answer.output, last_message))


def _rows_by_interest(group: RecordedGroup) -> list[int]:
    """Returns all rows of a group: the best, the worst and a failed sample, then the others by prompt."""
    scored_rows: list[tuple[float, int]] = []
    failed_rows: list[int] = []
    for row, score in enumerate(group.scores):
        if score is None or math.isnan(score):
            failed_rows.append(row)
        else:
            scored_rows.append((score, row))

    ranked_rows = [row for _, row in sorted(scored_rows)]

    # the order by checksum is the same in all steps, so that the page shows the same prompts over the training
    checksums = [zlib.crc32(uid.encode()) for uid in group.uids]
    rows_by_prompt = sorted(range(len(checksums)), key=checksums.__getitem__)
    return list(dict.fromkeys([*ranked_rows[-1:], *ranked_rows[:1], *failed_rows[:1], *rows_by_prompt]))


def _images(run_dir: Path, answers: Sequence[RecordedAnswer], room: int) -> tuple[dict[str, str], int]:
    """Returns the data URIs of images by path, and the number of all images of the answers. Images of the most answers
    come first, until they fill `room` bytes."""
    counts: Counter[str] = Counter()
    for answer in answers:
        counts.update(answer.images)
    uri_by_path = {}
    # names are digests, so ties mix the steps
    for path in sorted(counts, key=lambda path: (-counts[path], path)):
        with suppress(FileNotFoundError):  # the run has deleted the file in the meantime
            encoded_size = (run_dir / path).stat().st_size * 4 // 3  # base64
            if encoded_size <= room:
                uri_by_path[path] = _data_uri(run_dir / path, "jpeg")
                room -= encoded_size
    return uri_by_path, len(counts)
