"""What the page of `trainer.report` shows, as plain data of a bounded size: charts, findings, configurations, samples.

Takes `Run`s, and the study whose best runs they are; gives what json can hold. Charts are plotly's traces and layouts,
where a line names its run and metric in place of numbers. Curves of long runs are thinned out, samples are taken evenly
over the steps and long texts are cut; `notes` say so, and the page shows them.
"""

from __future__ import annotations

import base64
import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.console import format_seconds
from trainer.final_report import ValidationMean, all_validation_means
from trainer.metric_docs import find
from trainer.reports.health import findings_of
from trainer.reports.run_data import METRICS, Answer, Run, groups, run_titles, stage_seconds
from trainer.tracking import read_metrics

if TYPE_CHECKING:
    from trainer.sweeps.study import Trial

COLORS = ("#3b6fb6", "#e08a2e", "#3f9b5f", "#b5495b", "#7a6bb0", "#8c6d4f", "#c77fb2", "#5f9ea8", "#a9a844", "#9aa0a8")
MAX_POINTS, MAX_BARS, MAX_LEGEND, MAX_TICKS = 1500, 120, 24, 6
MAX_PICTURE_BYTES = 1_500_000
MAX_TEXT = 6000
SAMPLE_BYTES = 5_000_000
MAX_SAMPLES = 8000

PANELS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("Reward in training, mean over the samples of a step", "score", {"critic/score/mean": "", "actor/face_score": ""}),
    ("Loss", "", {"train/loss": ""}),
    ("Success of episodes", "share", {"env/success": ""}),
    ("Response length", "tokens", {f"response_length/{x}": x for x in ("mean", "max", "min")}),
    ("Answers cut off", "share", {"response_length/clip_ratio": ""}),
    (
        "Prompts that teach nothing: all answers equally good",
        "share",
        {"frac_reward_zero_std": "all equal", "groups/all_right": "all right", "groups/all_wrong": "all wrong"},
    ),
    ("Entropy", "nats", {"actor/entropy": ""}),
    ("Distance to the reference (KL)", "nats", {"actor/kl_loss": "in the loss", "critic/kl": "in the reward"}),
    ("Step of the policy (KL to the sampler)", "nats", {"actor/ppo_kl": ""}),
    ("Tokens clipped", "share", {"actor/pg_clipfrac": "policy", "critic/vf_clipfrac": "values"}),
    ("Gradient norm", "", {"actor/grad_norm": "actor", "critic/grad_norm": "critic", "train/grad_norm": ""}),
    ("Learning rate", "", {"actor/lr": "actor", "critic/lr": "critic", "train/lr": ""}),
    ("Sampler against trainer, difference of probabilities", "", {"training/rollout_probs_diff_mean": "mean"}),
    ("Rewards that failed", "share", {"reward/error_rate": "all", "reward/timeout_rate": "late"}),
    ("Episodes that failed", "share", {"env/error_rate": ""}),
    ("Throughput", "tokens per second", {"perf/throughput": "per device", "system/tps": "all"}),
    (
        "Memory of the fullest worker",
        "GiB",
        {f"actor/perf/{x}_gb": x for x in ("host_rss", "max_memory_allocated", "max_memory_reserved")},
    ),
    ("Devices that wait in generation", "share", {"rollout/idle_frac": ""}),
)
"""Charts of a run: title, unit, and what each metric's line is called. Only what was logged is drawn."""

Json = dict[str, Any]


def page_data(runs: Sequence[Run], study: Json | None = None, sample_bytes: int = SAMPLE_BYTES) -> Json:
    """Everything on the page.

    Args:
        runs: to show, or to compare.
        study: `read_study`, whose best runs these are; None for runs alone.
        sample_bytes: about how much all texts of samples may take.
    """
    prompts: dict[tuple[tuple[str, str], ...], int] = {}
    samples: list[list[Any]] = []
    shown = []
    for place, (run, title) in enumerate(zip(runs, run_titles(runs), strict=True)):
        total, kept = _samples(run.folder, sample_bytes // len(runs), MAX_SAMPLES // len(runs))
        for answer in kept:
            row = asdict(answer) | {"prompt": prompts.setdefault(answer.prompt, len(prompts))}
            samples.append([place, *map(_short, row.values())])
        note = f"{len(kept):,} of {total:,} samples are on this page (of each step the best, the worst, and the same "
        note += f"prompts where they come again); all are in {run.folder / 'samples'}"
        shown.append(_run(run, title, [note] if len(kept) < total else []))
    names = list(dict.fromkeys(name for run in shown for name in run["series"]))
    docs = {name: doc for name in names if (doc := find(name)) is not None}
    seen = {name for run in runs for metrics in run.steps.values() for name, value in metrics.items() if value}
    parts = {name: name.split("/")[1] for name in names if re.fullmatch(r"reward/[^/]+/mean", name)}
    panels = [*PANELS, ("What the reward returned, means", "", parts)]
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
        "prompts": [[[role, _short(text)] for role, text in prompt] for prompt in prompts],
        "fields": ["run", *(x.name for x in fields(Answer))],
        "samples": samples,
    }


def read_study(folder: Path) -> Json:
    """What the page shows of a sweep, which may still run; `runs` has the run folders of its best trials, each trial's
    first."""
    from trainer.sweeps.study import Study
    from trainer.sweeps.study_spec import metric_by_step

    study = Study.load(folder)
    metric, mode, best = study.question.metric, study.question.mode, study.finished()
    parameters = [parameter.name for parameter in study.question.space]
    columns = ["trial", "state", "value", "half width", *parameters, "steps", "seconds", "error"]
    rows, curves, shares = [], [], []
    for trial in study.trials:
        own = [_number_of(trial.parameters[name]) for name in parameters]
        steps, seconds = max(run.steps for run in trial.runs), sum(run.seconds for run in trial.runs)
        rows.append([trial.number, trial.state, trial.value, trial.half_width, *own, steps, seconds, trial.error])
        for place, run in enumerate(trial.runs):
            steps_of_run = read_metrics(run.folder / METRICS)
            shares.append(_is_share(metric, steps_of_run))
            points = metric_by_step(steps_of_run, metric)
            curve: Json = {"x": list(points), "y": list(points.values()), "line": {"color": _color(trial)}}
            named = {"name": f"trial {trial.number}", "legendgroup": str(trial.number), "showlegend": place == 0}
            curves.append(curve | named | {"text": _told(trial), "hovertemplate": "%{y:.4~g}<br>%{text}"})
    varied = [name for name in parameters if len({trial.parameters[name] for trial in study.trials}) > 1]
    of_curves = {"hovermode": "closest", "showlegend": len(study.trials) <= MAX_LEGEND}
    firsts = [trial.runs[0].folder for trial in best[:4]]
    return {
        "facts": {"trials": len(rows), **Counter(trial.state for trial in study.trials), mode: metric},
        "best": [[_told(trial), trial.commands] for trial in best[:5]],
        "columns": columns,
        "trials": _short(rows),
        "charts": [
            _chart(metric, "a line for each run", curves, True, of_curves),
            *(_effect(study.trials, name, metric, all(shares)) for name in varied),
        ],
        "runs": [run for run in firsts if (run / METRICS).is_file()],
    }


def _run(run: Run, title: str, notes: list[str]) -> Json:
    every = math.ceil(len(run.steps) / MAX_POINTS)
    steps = [*list(run.steps)[:-1:every], run.last_step] if every > 1 else list(run.steps)
    thinned = [f"the curves show one step in {every}, and the last"] if every > 1 else []
    findings = [asdict(finding) for finding in findings_of(run)]
    of = "" if run.total_steps is None else f" of {run.total_steps}"
    counts = [f"{n} {grade}" for grade in ("bad", "look") if (n := sum(x["grade"] == grade for x in findings))]
    return {
        "title": title.replace("<", "‹"),  # plotly reads some tags in names of lines
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
            {"name": file.name, "src": f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"}
            for kind in ("png", "gif")
            for file in run.folder.glob(f"before_after.{kind}")
            if file.stat().st_size <= MAX_PICTURE_BYTES
        ],
    }


def _chart(title: str, unit: str, traces: list[Json], wide: bool = False, layout: Json | None = None) -> Json:
    return {"title": title, "unit": unit, "traces": traces, "wide": wide, "layout": layout or {}}


def _panel(runs: Sequence[Run], shown: list[Json], title: str, unit: str, names: Mapping[str, str]) -> Json:
    """In color differ the lines of one run; of several, the runs."""
    traces: list[Json] = []
    for place, run in enumerate(shown):
        for nth, (name, label) in enumerate((name, label) for name, label in names.items() if name in run["series"]):
            own = {"color": COLORS[(place if len(runs) > 1 else nth) % len(COLORS)], "width": 1.8}
            own["dash"] = ("solid", "dash", "dot")[nth % 3] if len(runs) > 1 else "solid"
            told = f"{run['title']} {label}".strip() if len(runs) > 1 else label or name
            traces.append({"run": place, "metric": name, "line": own, "name": told})
    values = [x[name] for run in runs for x in run.steps.values() for name in names if name in x]
    is_from_zero = 0 <= min(values) < 0.3 * max(values) or max(values) == 0
    return _chart(title, unit, traces, layout={"yaxis": {"rangemode": "tozero" if is_from_zero else "normal"}})


def _time_chart(run: Run, shown: Json) -> Json:
    places, stages = stage_seconds(run.steps, MAX_BARS)
    bars = [
        {"type": "bar", "x": places, "y": _short(list(y)), "name": name, "hovertemplate": "%{y:.3~g} s"}
        for name, y in stages.items()
    ]
    layout = {"barmode": "stack", "bargap": 0.1}
    return _chart(f"Time of a step by stage, {shown['title']}", "seconds", bars, True, layout)


def _validation_charts(runs: Sequence[Run]) -> list[Json]:
    """Of one run a chart for each measure, with a line for each source; of several a chart for each source, where runs
    are compared by a measure that they have in common, else each has its core measure. With 95% intervals."""
    found: dict[tuple[str, bool], dict[int, dict[str, ValidationMean]]] = {}
    for place, run in enumerate(runs):
        last = {name: value for metrics in run.steps.values() for name, value in metrics.items()}
        for mean in all_validation_means(last):
            found.setdefault((mean.source, mean.greedy), {}).setdefault(place, {}).setdefault(mean.variable, mean)
    sources, titles = list(dict.fromkeys(source for source, _ in found)), run_titles(runs)
    charts: dict[str, list[Json]] = {}
    for (source, greedy), of_runs in found.items():
        common = set.intersection(*(set(own) for own in of_runs.values()))
        told = f"{source}{' (greedy)' * greedy}"
        for place, own in of_runs.items():
            mean = own[("acc" if "acc" in common else min(common)) if common else "acc" if "acc" in own else min(own)]
            steps = {step: metrics for step, metrics in runs[place].steps.items() if mean.metric in metrics}
            widths = [metrics.get(mean.interval, 0.0) for metrics in steps.values()]
            name, title = (told, mean.name) if len(runs) == 1 else (f"{titles[place]} {mean.name}", told)
            color = COLORS[(sources.index(source) if len(runs) == 1 else place) % len(COLORS)]
            trace: Json = {"x": list(steps), "y": [_short(metrics[mean.metric]) for metrics in steps.values()]}
            trace |= {"name": name.replace("<", "‹"), "mode": "lines+markers"}
            trace |= {"line": {"color": color, "dash": "dash" if greedy else "solid"}}
            if any(widths):
                means = [metrics[mean.metric] for metrics in steps.values()]
                trace["error_y"] = _interval(means, widths, is_share=_is_share(mean.metric, runs[place].steps))
            charts.setdefault(f"Validation, {title}", []).append(trace)
    return [_chart(title, "with 95% interval", traces, len(traces) > 2) for title, traces in charts.items()]


def _effect(trials: Sequence[Trial], name: str, metric: str, is_share: bool) -> Json:
    """A chart of the trials' values over one parameter, with a trace for each trial.

    Trials with the same value of the parameter are drawn beside each other. The axis is logarithmic for a parameter
    that was searched so, for learning rates, and where the largest value is at least ten times the smallest.
    """
    own = [trial for trial in trials if trial.value is not None]
    x = [_number_of(trial.parameters[name]) for trial in own]
    numbers = [value for value in x if isinstance(value, float)]
    is_numeric = 0 < len(numbers) == len(x)
    is_rate = name.rpartition(".")[2] in ("lr", "learning_rate")
    is_log = is_numeric and min(numbers) > 0 and (is_rate or max(numbers) >= 10 * min(numbers))
    words = [] if is_numeric else list(dict.fromkeys(map(str, x)))
    at = [math.log10(value) if is_log else value for value in numbers] if is_numeric else []
    at = at or [float(words.index(str(value))) for value in x]
    gap = 0.02 * (max(at) - min(at) or 1.0) if at else 0.0
    traces: list[Json] = []
    for place, trial in enumerate(own):
        alike = [other for other, value in enumerate(x) if value == x[place]]
        moved = at[place] + gap * (alike.index(place) - (len(alike) - 1) / 2)
        trace: Json = {"x": [10**moved if is_log else moved], "y": [trial.value], "mode": "markers"}
        trace |= {"text": [_told(trial)], "hovertemplate": "%{text}<extra></extra>"}
        trace |= {"marker": {"size": 8, "color": _color(trial)}}
        if trial.half_width and trial.value is not None:
            trace["error_y"] = _interval([trial.value], [trial.half_width], is_share=is_share)
        traces.append(trace)
    axis: Json = {"type": "log" if is_log else "linear", "exponentformat": "e"}
    ticks = dict.fromkeys(numbers) if is_numeric else dict.fromkeys(range(len(words)))
    if words or len(ticks) <= MAX_TICKS:
        told = words or [f"{value:g}" for value in ticks]
        axis |= {"tickvals": list(ticks), "ticktext": [word.replace("<", "‹") for word in told]}
    return _chart(name, metric, traces, layout={"hovermode": "closest", "showlegend": False, "xaxis": axis})


def _is_share(metric: str, steps: Mapping[int, Mapping[str, float]]) -> bool:
    """True for a metric that lies between 0 and 1: `acc`, and any where all logged scores of training do."""
    ends = [(x["critic/score/min"], x["critic/score/max"]) for x in steps.values() if "critic/score/min" in x]
    return "/acc/" in metric or (bool(ends) and all(0 <= low and high <= 1 for low, high in ends))


def _interval(values: Sequence[float], widths: Sequence[float], *, is_share: bool) -> Json:
    """Error bars of plotly for values with these half widths; those of a share end at 0 and at 1."""
    up = [min(width, 1 - value) if is_share else width for value, width in zip(values, widths, strict=True)]
    down = [min(width, value) if is_share else width for value, width in zip(values, widths, strict=True)]
    return {"symmetric": False, "array": _short(up), "arrayminus": _short(down), "thickness": 1, "width": 2}


def _color(trial: Trial) -> str:
    return COLORS[trial.number % len(COLORS)]


def _values(known: Mapping[int, float], steps: list[int]) -> list[Any]:
    """[values], one for each of `steps`, null where there is none; [steps, values] for what is logged at few of them,
    which is never thinned out."""
    if len(known) <= len(steps) // 2:
        return [list(known), _short(list(known.values()))]
    return [[None if step not in known else _short(known[step]) for step in steps]]


def _short(value: Any) -> Any:
    """Numbers with five digits, long texts cut."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, list):
        return [_short(one) for one in value]
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]} ... (cut here; {len(value):,} characters)"
    return value


def _number_of(value: str | int | float) -> str | float:
    """A choice of a parameter, as a number where it is one."""
    with suppress(ValueError):
        return float(value)
    return value


def _told(trial: Trial) -> str:
    interval = f" ±{trial.half_width:.3g}" if trial.half_width else ""
    given = ", ".join(f"{name}={value}" for name, value in trial.parameters.items())
    value = "-" if trial.value is None else f"{trial.value:.4g}"
    return f"trial {trial.number} ({trial.state}): {value}{interval}, {given}".replace("<", "‹")


def _samples(folder: Path, most_bytes: int, most_rows: int) -> tuple[int, list[Answer]]:
    """How many there are, and what fits, evenly over the steps: of each the best and the worst, then others."""
    found = list(groups(folder))
    every = max(1, math.ceil(len(found) / max(1, most_rows // 2)))
    kept: list[Answer] = []
    for group in found[::every]:
        room = every * most_bytes // len(found)
        # best, worst, one whose reward failed, then prompts in an order that is the same in all steps
        scores = [math.nan if score is None else score for score in group.scores]
        ranked = sorted((row for row, score in enumerate(scores) if score == score), key=scores.__getitem__)
        failed = [row for row, score in enumerate(scores) if score != score]
        by_prompt = sorted(range(len(scores)), key=lambda row: (zlib.crc32(group.uids[row].encode()), row))
        chosen = list(dict.fromkeys([*ranked[-1:], *ranked[:1], *failed[:1], *by_prompt]))
        for place, answer in enumerate(group.read(chosen[: max(2, every * most_rows // len(found))])):
            room -= 120 + sum(len(text[:MAX_TEXT].encode()) for text in (answer.output, answer.prompt[-1][1]))
            if room < 0 and place >= 2:
                break
            kept.append(answer)
    return sum(len(group.uids) for group in found), kept
