"""A study of `trainer.sweep`, read for its page: its trials as a table, with the curve of each run.

Takes the folder with trials.csv and study.json; gives what json can hold. It may still be running.
"""

from __future__ import annotations

import csv
import json
import math
import shlex
from pathlib import Path
from typing import Any

from trainer.reports.health import number
from trainer.tracking.record import METRICS, read_metrics

TRIALS, STUDY = "trials.csv", "study.json"
RUNS_COMPARED = 4
_OWN = ("trial", "state", "value", "half_width", "steps", "seconds", "error", "runs", "command")
"""Columns of trials.csv; all others are parameters."""


def is_study(folder: Path) -> bool:
    """Whether this is the folder of a sweep."""
    return (folder / TRIALS).is_file()


def read_study(folder: Path) -> dict[str, Any]:
    """What the page shows of the study; `best` has the run folders of its best trials, each trial's first."""
    file = folder / STUDY
    asked = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    metric, mode = asked.get("metric", ""), asked.get("mode", "max")
    with (folder / TRIALS).open(encoding="utf-8", newline="") as lines:
        trials = [_trial(folder, row, metric) for row in csv.DictReader(lines)]
    complete = [trial for trial in trials if trial["state"] == "complete" and trial["value"] is not None]
    complete.sort(key=lambda trial: trial["value"], reverse=mode == "max")
    best = [folder / trial["runs"][0] for trial in complete if trial["runs"]]
    return {
        "folder": str(folder),
        "command": _words(asked.get("command", "python -m trainer.sweep")),
        "metric": metric,
        "mode": mode,
        "note": _comparison(complete),
        "parameters": list(dict.fromkeys(name for trial in trials for name in trial["parameters"])),
        "trials": trials,
        "best": [run for run in best if (run / METRICS).is_file()][:RUNS_COMPARED],
    }


def _trial(folder: Path, row: dict[str, str], metric: str) -> dict[str, Any]:
    runs = [run for run in (row.get("runs") or "").split(";") if run]
    steps = [read_metrics(folder / run / METRICS) for run in runs]
    curves = [[(step, x[metric]) for step, x in of_run.items() if metric in x] for of_run in steps]
    return {
        "number": int(row["trial"]),
        "state": row.get("state", ""),
        "parameters": {name: _value(text) for name, text in row.items() if name not in _OWN and text},
        "error": row.get("error") or "",
        "runs": runs,
        "curves": [curve for curve in curves if curve],
        "commands": (row.get("command") or "").splitlines(),
        **{name: _number(row.get(name)) for name in ("value", "half_width", "steps", "seconds")},
    }


def _comparison(best: list[dict[str, Any]]) -> str:
    """What the best trial is worth against the next one."""
    if not best:
        return "No trial is complete yet."
    if len(best) == 1:
        return "One trial is complete: there is nothing to compare it with."
    first, second = best[:2]
    gain = abs(first["value"] - second["value"])
    text = f"Trial {first['number']} is {number(gain)} better than trial {second['number']}"
    if first["half_width"] and second["half_width"]:
        width = math.hypot(first["half_width"], second["half_width"])
        text += f", {'more' if gain > width else 'less'} than the 95% interval of that difference, {number(width)}"
    return text + ". The best of many is best partly by luck: run it with new seeds before you believe the number."


def _words(command: str | list[str]) -> str:
    return command if isinstance(command, str) else shlex.join(command)


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _value(text: str) -> float | str:
    value = _number(text)
    return text if value is None else value
