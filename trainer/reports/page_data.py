"""What the page of `trainer.report` shows, as plain data of a bounded size: curves, findings, configurations, samples.

Takes `Run`s; gives what json can hold. Curves of long runs are thinned out, samples are taken evenly over the steps and
long texts are cut; `notes` say so, and the page shows them.
"""

from __future__ import annotations

import base64
import math
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.final_report import ValidationMean, all_validation_means
from trainer.metric_docs import find
from trainer.reports.health import BAD, Finding, Points, judge
from trainer.reports.run_data import Failure, Run, read_failure, run_titles
from trainer.reports.run_samples import Answer, Group, groups

MAX_POINTS = 1500
MAX_PICTURE_BYTES = 1_500_000
MAX_TEXT = 6000
SAMPLE_BYTES = 5_000_000
MAX_SAMPLES = 8000
_ANSWERS_OF_A_PROMPT = 2
_ROW_BYTES = 120  # of an answer beside its texts
_PICTURES = ("before_after.png", "before_after.gif")

Json = dict[str, Any]


@dataclass
class _Samples:
    """The answers on the page. prompts: each once; rows: see `_row`."""

    prompts: list[list[list[str]]] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    _places: dict[tuple[tuple[str, str], ...], int] = field(default_factory=dict)

    def add(self, run: int, answer: Answer) -> None:
        place = self._places.setdefault(answer.prompt, len(self.prompts))
        if place == len(self.prompts):
            self.prompts.append([[role, _cut(text)] for role, text in answer.prompt])
        self.rows.append(_row(run, place, answer))


def page_data(runs: Sequence[Run], study: Json | None = None, sample_bytes: int = SAMPLE_BYTES) -> Json:
    """Everything on the page.

    Args:
        runs: to show, or to compare.
        study: `trainer.reports.study.read_study`, whose best runs these are; None for runs alone.
        sample_bytes: about how much all texts of samples may take.
    """
    samples, titles = _Samples(), run_titles(list(runs))
    shown = []
    for number, (run, title) in enumerate(zip(runs, titles, strict=True)):
        notes = _add_samples(samples, number, run, sample_bytes // len(runs), MAX_SAMPLES // len(runs))
        shown.append(_run(run, title, notes))
    names = dict.fromkeys(name for run in runs for name in run.names)
    return {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": shown,
        "study": study,
        "docs": {name: doc for name in names if (doc := _doc(name)) is not None},
        "validation": _validation_lines(runs),
        "prompts": samples.prompts,
        "samples": samples.rows,
    }


def _run(run: Run, title: str, sample_notes: list[str]) -> Json:
    series = run.all_series()
    every = math.ceil(len(run.steps) / MAX_POINTS)
    thinned = [f"the curves show one step in {every}, and the last"] if every > 1 else []
    steps = _thinned(list(run.steps), every)
    options = {key: value.value for key, value in run.config.items()}
    return {
        "title": title,
        "folder": str(run.folder),
        "state": run.state,
        "last_step": run.last_step,
        "total_steps": run.total_steps,
        "seconds": round(run.seconds(), 1),
        "written": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.modified)),
        "notes": [*run.notes, *thinned, *sample_notes],
        "steps": steps,
        "series": {name: _values(points, steps) for name, points in series.items()},
        "findings": [
            *([] if (failure := read_failure(run)) is None else [failure_finding(failure)]),
            *(_finding(finding) for finding in judge(series, options)),
        ],
        "config": {key: [value.value, value.source] for key, value in run.config.items()},
        "pictures": list(_pictures(run.folder)),
    }


def _finding(finding: Finding) -> Json:
    steps = _thinned(list(finding.steps), math.ceil(len(finding.steps) / 50))
    return {**asdict(finding), "steps": steps}


def failure_finding(failure: Failure) -> Json:
    """The error that ended the run, as the page shows it."""
    text = f"the run ended with an error in step {failure.step}: {failure.message}"
    advice = f"run that step again under a debugger: {failure.replay}"
    return {"grade": BAD, "metric": "", "text": text, "steps": [], "cause": "", "advice": advice, "log": failure.log}


# -------------------------------------------------------------------------------------------------------- numbers


def _values(points: Points, steps: list[int]) -> list[Any]:
    """[values], one for each of `steps`, null where there is none; [steps, values] for what is logged at few of them,
    which is never thinned out."""
    if len(points) <= len(steps) // 2:
        return [[step for step, _ in points], [_short(value) for _, value in points]]
    known = dict(points)
    return [[None if step not in known else _short(known[step]) for step in steps]]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _thinned(steps: list[int], every: int) -> list[int]:
    """Every so many, and the last."""
    return steps if every <= 1 else [*steps[:-1:every], steps[-1]]


def _validation_lines(runs: Sequence[Run]) -> list[Json]:
    """A line for each validated source, sampled and greedy: for each run (by its place) the metric, its measure and the
    metric of its interval. Runs that have a measure in common are compared by it; else each has its core measure."""
    found: dict[tuple[str, bool], list[dict[str, ValidationMean]]] = {}
    for place, run in enumerate(runs):
        last = {name: value for metrics in run.steps.values() for name, value in metrics.items()}
        for mean in all_validation_means(last):
            own = found.setdefault((mean.source, mean.greedy), [{} for _ in runs])[place]
            own.setdefault(mean.variable, mean)
    lines = []
    for (source, greedy), of_runs in found.items():
        shown = {place: own for place, own in enumerate(of_runs) if own}
        common = [name for name in next(iter(shown.values())) if all(name in own for own in shown.values())]
        common.sort(key=lambda name: name != "acc")
        core = {place: own.get("acc") or next(iter(own.values())) for place, own in shown.items()}
        chosen = {place: own[common[0]] for place, own in shown.items()} if common else core
        lines.append(
            {
                "source": source,
                "greedy": greedy,
                "names": {place: mean.metric for place, mean in chosen.items()},
                "measures": {place: mean.name for place, mean in chosen.items()},
                "intervals": {place: mean.interval for place, mean in chosen.items()},
            }
        )
    return lines


def _doc(name: str) -> Json | None:
    metric = find(name)
    if metric is None:
        return None
    when = f" ({metric.when})" if metric.when else ""
    return {"formula": metric.formula + when, "unit": metric.unit, "healthy": metric.healthy}


def _pictures(folder: Path) -> Iterable[Json]:
    """What a run of images or clips shows instead of answers."""
    for name in _PICTURES:
        file = folder / name
        if file.is_file() and file.stat().st_size <= MAX_PICTURE_BYTES:
            kind = file.suffix.removeprefix(".")
            yield {"name": name, "data": f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"}
            return


# -------------------------------------------------------------------------------------------------------- samples


def _add_samples(samples: _Samples, run: int, source: Run, most_bytes: int, most_rows: int) -> list[str]:
    """Adds what fits, evenly over the steps; returns what to say about it."""
    found = list(groups(source.folder))
    if not found:
        return []
    every = math.ceil(len(found) / max(1, most_rows // 2))
    kept = [found[place] for place in range(0, len(found), every)]
    total, before = sum(len(group.uids) for group in found), len(samples.rows)
    for group in kept:
        _add_group(samples, run, group, most_bytes // len(kept), max(2, most_rows // len(kept)))
    added = len(samples.rows) - before
    if added == total:
        return []
    of_files = f" from {len(kept)} of {len(found)} steps" if every > 1 else " from every step"
    return [
        f"{added:,} of {total:,} samples are on this page, taken{of_files} (of each the best, the worst, and the same "
        f"prompts where they come again); all are in {source.folder / 'samples'}"
    ]


def _add_group(samples: _Samples, run: int, group: Group, most_bytes: int, most_rows: int) -> None:
    """The best and the worst answer of a step, then others until the room is full."""
    used = 0
    for place, answer in enumerate(group.read(_chosen(group, most_rows))):
        used += _ROW_BYTES + len(answer.output[:MAX_TEXT].encode()) + len(answer.last_message[:MAX_TEXT].encode())
        if used > most_bytes and place >= 2:
            return
        samples.add(run, answer)


def _chosen(group: Group, count: int) -> list[int]:
    """Rows of a step: best, worst, one whose reward failed, then prompts in an order that is the same in all steps, up
    to 2 answers of each first."""
    scored = [row for row, score in enumerate(group.scores) if score is not None]
    failed = [row for row, score in enumerate(group.scores) if score is None]
    ends = []
    if scored:
        ends = [
            max(scored, key=lambda row: group.scores[row] or 0.0),
            min(scored, key=lambda row: group.scores[row] or 0),
        ]
    seen: dict[str, int] = {}
    order = []
    for row, uid in enumerate(group.uids):
        nth = seen[uid] = seen.get(uid, -1) + 1
        order.append((nth >= _ANSWERS_OF_A_PROMPT, zlib.crc32(uid.encode()), nth, row))
    return list(dict.fromkeys([*ends, *failed[:1], *(row for *_, row in sorted(order))]))[:count]


def _row(run: int, prompt: int, answer: Answer) -> list[Any]:
    """In the order in which the page names the entries (samples.js)."""
    return [
        run,
        answer.kind,
        answer.step,
        answer.uid,
        answer.sample,
        answer.data_source,
        prompt,
        _cut(answer.output),
        _cut(answer.gts),
        None if answer.score is None or not math.isfinite(answer.score) else _short(answer.score),
        answer.response_length,
        answer.finish_reason,
        answer.policy_version,
        int(answer.timed_out),
        {name: _short(x) if isinstance(x, float) else _cut(str(x)) for name, x in answer.parts.items()},
    ]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... (cut here; {len(text):,} characters)"
