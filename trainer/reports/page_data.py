"""The data of the report page as json values of bounded size: charts, findings, configurations and samples.

Input are `Run`s, and for a sweep its study. Charts are traces and layouts of plotly, in which a line names its run and
metric instead of containing the numbers. Curves of long runs are thinned out, samples are selected evenly over the
steps, and long texts are cut. The page shows `notes` about what was left out.
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
from typing import Any

from trainer.console import format_seconds
from trainer.final_report import ValidationMean, all_validation_means
from trainer.metric_docs import find
from trainer.reports.health import MEMORY, findings_of
from trainer.reports.run_data import Answer, Run, groups, run_titles, stage_seconds

COLORS = ("#3b6fb6", "#e08a2e", "#3f9b5f", "#b5495b", "#7a6bb0", "#8c6d4f", "#c77fb2", "#5f9ea8", "#a9a844", "#9aa0a8")
MAX_POINTS = 1500
MAX_BARS = 120
MAX_PICTURE_BYTES = 1_500_000
MAX_TEXT = 6000
SAMPLE_BYTES = IMAGE_BYTES = 5_000_000
PUBLIC_SAMPLE_BYTES = 150_000
_FOLDERS = re.compile(r"(?<![\w/:.…])~?/(?:[^\s/,;:'\"()\[\]{}=]+/)+")
"""The folders of an absolute path. A path within a URL or after another folder does not match."""
MAX_SAMPLES = 8000


def _of_pairs(*names: str) -> dict[str, str]:
    splits = {"train": "training", "val": "validation"}
    return {f"{split}/{name}": label for name in names for split, label in splits.items()}


PANELS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("Reward in training, mean over the samples of a step", "score", {"critic/score/mean": "", "actor/face_score": ""}),
    ("Loss", "", {"train/loss": "training", "val/loss": "validation"}),
    ("Accuracy on pairs of answers", "share", _of_pairs("accuracy", "rewards/accuracies")),
    ("Margin of pairs of answers", "", _of_pairs("margin", "rewards/margins")),
    ("Log-probabilities of the answers", "nats", {f"train/logps/{x}": x for x in ("chosen", "rejected")}),
    ("Success of episodes", "share", {"env/success": "", "env/own/success": ""}),
    ("Response length", "tokens", {f"response_length/{x}": x for x in ("mean", "max", "min")}),
    ("Truncated answers", "share", {"response_length/clip_ratio": ""}),
    (
        "Prompts without gradient: all answers have equal scores",
        "share",
        {"frac_reward_zero_std": "all equal", "groups/all_right": "all right", "groups/all_wrong": "all wrong"},
    ),
    ("Entropy", "nats", {"actor/entropy": ""}),
    ("Distance to the reference (KL)", "nats", {"actor/kl_loss": "in the loss", "critic/kl": "in the reward"}),
    ("Change of the policy in a step (KL to the sampling policy)", "nats", {"actor/ppo_kl": ""}),
    ("Clipped tokens", "share", {"actor/pg_clipfrac": "policy", "critic/vf_clipfrac": "values"}),
    ("Gradient norm", "", {"actor/grad_norm": "actor", "critic/grad_norm": "critic", "train/grad_norm": ""}),
    ("Learning rate", "", {"actor/lr": "actor", "critic/lr": "critic", "train/lr": ""}),
    ("Difference of token probabilities, sampler and trainer", "", {"training/rollout_probs_diff_mean": "mean"}),
    ("Failed rewards", "share", {"reward/error_rate": "all", "reward/timeout_rate": "timed out"}),
    ("Failed episodes", "share", {"env/error_rate": ""}),
    ("Throughput", "tokens per second", {"perf/throughput": "per device", "system/tps": "all"}),
    (
        "Memory of the fullest worker",
        "GiB",
        {f"{role}/perf/{x}_gb": x for role in ("actor", "train") for x in MEMORY},
    ),
    ("How full the micro-batches are", "share", {"train/micro_batch_fill": ""}),
    ("Idle devices in generation", "share", {"rollout/idle_frac": ""}),
    ("Weight versions of a sample", "", {f"async/versions_per_sample/{x}": x for x in ("mean", "max")}),
    ("Time of a weight update", "seconds", {"weight_sync/seconds": ""}),
    ("Weights sent in an update", "MB", {"weight_sync/megabytes": ""}),
)
"""Charts of a run: title, unit, and the label of each metric's line. Metrics that were not logged are not drawn."""


def panels_of(names: Iterable[str]) -> list[tuple[str, str, Mapping[str, str]]]:
    """Returns the charts of runs that logged these metrics: `PANELS`, one for the engines of a separate pool, and one
    for the entries that the reward function returns."""
    names = list(names)
    engines = {name: name.rpartition("/")[2] for name in names if name.startswith("rollout/active_frac/")}
    parts = {name: name.split("/")[1] for name in names if re.fullmatch(r"reward/[^/]+/mean", name)}
    entries = ("Entries of the reward function's result, means", "", parts)
    return [*PANELS, ("Activity of each engine", "share", engines), entries]


Json = dict[str, Any]


def page_data(runs: Sequence[Run], study: Json | None = None, sample_bytes: int = SAMPLE_BYTES) -> Json:
    """Returns all data of the page.

    Args:
        runs: Runs to show or to compare.
        study: Result of `trainer.sweeps.study_page.read_study` if these are the best runs of a sweep, else None.
        sample_bytes: Approximate limit for the texts of all samples, in bytes.
    """
    prompts: dict[tuple[tuple[str, str], ...], int] = {}
    samples: list[list[Any]] = []
    shown = []
    for place, (run, title) in enumerate(zip(runs, run_titles(runs), strict=True)):
        total, kept = _samples(run.folder, sample_bytes // len(runs), MAX_SAMPLES // len(runs))
        for answer in kept:
            row = asdict(answer) | {"prompt": prompts.setdefault(answer.prompt, len(prompts))}
            samples.append([place, *map(compact, row.values())])
        images, total_images = _images(run.folder, kept, IMAGE_BYTES // len(runs))
        note = f"{len(kept):,} of {total:,} samples are on this page (for each step the best, the worst, and repeated "
        note += f"prompts); all are in {run.folder / 'samples'}"
        notes = [note] * (len(kept) < total)
        if len(images) < total_images:
            notes.append(f"{len(images):,} of {total_images:,} images of these samples are on this page")
        shown.append(_run(run, title, notes) | {"images": images})
    names = list(dict.fromkeys(name for run in shown for name in run["series"]))
    docs = {name: doc for name in names if (doc := find(name)) is not None}
    seen = {name for run in runs for metrics in run.steps.values() for name, value in metrics.items() if value}
    panels = panels_of(names)
    charts = [_panel(runs, shown, title, unit, of) for title, unit, of in panels if seen & set(of)]
    return {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "colors": COLORS,
        "runs": shown,
        "study": study,
        "metrics": names,
        "docs": {name: {"formula": x.formula, "unit": x.unit, "healthy": x.healthy} for name, x in docs.items()},
        "charts": [*charts[:1], *_validation_charts(runs), *charts[1:], *map(_time_chart, runs, shown)],
        "compared": [x for x in names if x.startswith("val-core/") or any(x in of for _, _, of in panels)],
        "prompts": [[[role, compact(text)] for role, text in prompt] for prompt in prompts],
        "fields": ["run", *(x.name for x in fields(Answer))],
        "samples": samples,
    }


def _run(run: Run, title: str, notes: list[str]) -> Json:
    every = math.ceil(len(run.steps) / MAX_POINTS)
    steps = [*list(run.steps)[:-1:every], run.last_step] if every > 1 else list(run.steps)
    thinned = [f"the curves show one in {every} steps, and the last step"] if every > 1 else []
    findings = [asdict(finding) for finding in findings_of(run)]
    of = "" if run.total_steps is None else f" of {run.total_steps}"
    counts = [f"{n} {grade}" for grade in ("bad", "look") if (n := sum(x["grade"] == grade for x in findings))]
    return {
        "title": title.replace("<", "‹"),  # plotly interprets some tags in names of lines
        "folder": str(run.folder),
        "facts": {
            "State": run.state,
            "Steps": f"{run.last_step}{of}",
            "Time in steps": format_seconds(run.seconds()),
            "Last written": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.modified)),
            "Findings": ", ".join(counts) or "all ok",
        },
        "notes": [*run.notes, *thinned, *notes],
        "steps": steps,
        "series": {name: _values(dict(points), steps) for name, points in run.series().items()},
        "findings": findings,
        "config": {key: [value.value, value.source] for key, value in run.config.items()},
        "pictures": [
            {"name": file.name, "src": _data_uri(file, kind)}
            for kind in ("png", "gif")
            for file in run.folder.glob(f"before_after.{kind}")
            if file.stat().st_size <= MAX_PICTURE_BYTES
        ],
    }


def _data_uri(file: Path, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


def chart(title: str, unit: str, traces: list[Json], wide: bool = False, layout: Json | None = None) -> Json:
    """Returns a chart of the page. wide: True if it has the width of two. layout: plotly's layout."""
    return {"title": title, "unit": unit, "traces": traces, "wide": wide, "layout": layout or {}}


def _panel(runs: Sequence[Run], shown: list[Json], title: str, unit: str, names: Mapping[str, str]) -> Json:
    """Returns a chart of the named metrics. Colors distinguish the metrics of a single run, or else the runs."""
    traces: list[Json] = []
    for place, run in enumerate(shown):
        for nth, (name, label) in enumerate((name, label) for name, label in names.items() if name in run["series"]):
            line = {"color": COLORS[(place if len(runs) > 1 else nth) % len(COLORS)], "width": 1.8}
            line["dash"] = ("solid", "dash", "dot")[nth % 3] if len(runs) > 1 else "solid"
            legend = f"{run['title']} {label}".strip() if len(runs) > 1 else label or name
            traces.append({"run": place, "metric": name, "line": line, "name": legend})
    values = [x[name] for run in runs for x in run.steps.values() for name in names if name in x]
    is_from_zero = 0 <= min(values) < 0.3 * max(values) or max(values) == 0
    return chart(title, unit, traces, layout={"yaxis": {"rangemode": "tozero" if is_from_zero else "normal"}})


def _time_chart(run: Run, shown: Json) -> Json:
    places, stages = stage_seconds(run.steps, MAX_BARS)
    bars = [
        {"type": "bar", "x": places, "y": compact(list(y)), "name": name, "hovertemplate": "%{y:.3~g} s"}
        for name, y in stages.items()
    ]
    layout = {"barmode": "stack", "bargap": 0.1}
    return chart(f"Time of a step by stage, {shown['title']}", "seconds", bars, True, layout)


def _validation_charts(runs: Sequence[Run]) -> list[Json]:
    """Returns the charts of validation metrics with 95% intervals.

    For a single run, there is one chart per metric with one line per data source. For several runs, there is one chart
    per source, which shows a metric that all runs have, or else the core metric of each run.
    """
    found: dict[tuple[str, bool], dict[int, dict[str, ValidationMean]]] = {}
    for place, run in enumerate(runs):
        last = {name: value for metrics in run.steps.values() for name, value in metrics.items()}
        for mean in all_validation_means(last):
            found.setdefault((mean.source, mean.greedy), {}).setdefault(place, {}).setdefault(mean.variable, mean)
    sources = list(dict.fromkeys(source for source, _ in found))
    titles = run_titles(runs)
    charts: dict[str, list[Json]] = {}
    for (source, greedy), of_runs in found.items():
        common = set.intersection(*(set(means) for means in of_runs.values()))
        source_text = f"{source}{' (greedy)' * greedy}"
        for place, by_variable in of_runs.items():
            variables = common or by_variable.keys()
            mean = by_variable["acc" if "acc" in variables else min(variables)]
            steps = {step: metrics for step, metrics in runs[place].steps.items() if mean.metric in metrics}
            widths = [metrics.get(mean.interval, 0.0) for metrics in steps.values()]
            name, title = (source_text, mean.name) if len(runs) == 1 else (f"{titles[place]} {mean.name}", source_text)
            color = COLORS[(sources.index(source) if len(runs) == 1 else place) % len(COLORS)]
            trace: Json = {"x": list(steps), "y": [compact(metrics[mean.metric]) for metrics in steps.values()]}
            trace |= {"name": name.replace("<", "‹"), "mode": "lines+markers"}
            trace |= {"line": {"color": color, "dash": "dash" if greedy else "solid"}}
            if any(widths):
                means = [metrics[mean.metric] for metrics in steps.values()]
                trace["error_y"] = interval(means, widths, are_shares=is_share(mean.metric, runs[place].steps))
            charts.setdefault(f"Validation, {title}", []).append(trace)
    return [chart(title, "with 95% interval", traces, len(traces) > 2) for title, traces in charts.items()]


def is_share(metric: str, steps: Mapping[int, Mapping[str, float]]) -> bool:
    """Returns True for a metric between 0 and 1: `acc`, or any metric if all logged training scores are in [0, 1]."""
    ends = [(x["critic/score/min"], x["critic/score/max"]) for x in steps.values() if "critic/score/min" in x]
    return "/acc/" in metric or (bool(ends) and all(0 <= low and high <= 1 for low, high in ends))


def interval(values: Sequence[float], widths: Sequence[float], *, are_shares: bool) -> Json:
    """Returns plotly's error bars for values with these half widths. Error bars of a share end at 0 and 1."""
    up = [min(width, 1 - value) if are_shares else width for value, width in zip(values, widths, strict=True)]
    down = [min(width, value) if are_shares else width for value, width in zip(values, widths, strict=True)]
    return {"symmetric": False, "array": compact(up), "arrayminus": compact(down), "thickness": 1, "width": 2}


def _values(known: Mapping[int, float], steps: list[int]) -> list[Any]:
    """Returns [values] with one value or None for each of `steps`, or [steps, values] for a metric that is logged at
    few steps, which is never thinned out."""
    if len(known) <= len(steps) // 2:
        return [list(known), compact(list(known.values()))]
    return [[None if step not in known else compact(known[step]) for step in steps]]


def compact(value: Any) -> Any:
    """Rounds numbers to five digits and cuts long texts, also inside lists and dicts."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, list):
        return [compact(entry) for entry in value]
    if isinstance(value, dict):
        return {key: compact(entry) for key, entry in value.items()}
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]} ... (cut here; {len(value):,} characters)"
    return value


def without_folders(value: Any, known: Sequence[str] = ()) -> Any:
    """Replaces each absolute path by `…/` and its last part in all texts of a JSON-compatible value.

    Args:
        known: Folders that are replaced as a whole, because their names can contain spaces; longest first.
    """
    if isinstance(value, str):
        for folder in known:
            value = value.replace(f"{folder}/", "…/")
        return _FOLDERS.sub("…/", value)
    if isinstance(value, list):
        return [without_folders(entry, known) for entry in value]
    if isinstance(value, dict):
        return {key: without_folders(entry, known) for key, entry in value.items()}
    return value


def known_folders(runs: Sequence[Run]) -> list[str]:
    """Returns the folders of the runs, of the user and of all absolute paths in their options, longest first."""
    folders = {str(Path.home())}
    for run in runs:
        folders.add(str(run.folder.absolute().parent))
        for option in run.config.values():
            texts = option.value if isinstance(option.value, list) else [option.value]
            paths = [Path(text) for text in texts if isinstance(text, str) and text.startswith("/")]
            folders |= {str(path.parent) for path in paths}
    return sorted(folders - {"/"}, key=len, reverse=True)


def _samples(folder: Path, most_bytes: int, most_rows: int) -> tuple[int, list[Answer]]:
    """Returns the number of all samples, and those that fit the limits, selected evenly over the steps. Trees have
    a second limit of most_bytes, and are left out if they exceed it."""
    found = list(groups(folder))
    every = max(1, math.ceil(len(found) / max(1, most_rows // 2)))
    kept: list[Answer] = []
    tree_room = 0  # room that a step does not use is left to the next steps: a tree may need more than that of a step
    for group in found[::every]:
        room = every * most_bytes // len(found)
        tree_room += room
        # the best, the worst and a failed sample, then prompts in an order that is the same in all steps
        scores = [math.nan if score is None else score for score in group.scores]
        ranked = sorted((row for row, score in enumerate(scores) if score == score), key=scores.__getitem__)
        failed = [row for row, score in enumerate(scores) if score != score]
        by_prompt = sorted(range(len(scores)), key=lambda row: (zlib.crc32(group.uids[row].encode()), row))
        chosen = list(dict.fromkeys([*ranked[-1:], *ranked[:1], *failed[:1], *by_prompt]))
        for place, answer in enumerate(group.read(chosen[: max(2, every * most_rows // len(found))])):
            room -= 120 + sum(len(text[:MAX_TEXT].encode()) for text in (answer.output, answer.prompt[-1][1]))
            if room < 0 and place >= 2:
                break
            fits = (size := len(str(answer.requests))) <= tree_room
            tree_room -= size * fits
            kept.append(answer if fits else replace(answer, requests=()))
    return sum(len(group.uids) for group in found), kept


def _images(folder: Path, answers: Sequence[Answer], room: int) -> tuple[dict[str, str], int]:
    """Returns the data URIs of images by path, and the number of all images of the answers. Images of the most answers
    come first, until they fill `room` bytes."""
    counts = Counter(path for answer in answers for path in answer.images)
    found = {}
    for path in sorted(counts, key=lambda path: (-counts[path], path)):  # names are digests, so ties mix the steps
        with suppress(FileNotFoundError):  # the run has deleted the file in the meantime
            if (size := (folder / path).stat().st_size * 4 // 3) <= room:
                found[path] = _data_uri(folder / path, "jpeg")
                room -= size
    return found, len(counts)
