"""A study on disk: what was asked, and all trials with state, parameters, numbers, folders and commands.

    STUDY/study.json             the question, the plan, where the runs were started
          study.db               Optuna's storage (SQLite), or journal.log where machines share the folder
          trials/0007/seed-2/    a run's own folder: metrics.jsonl, config.yaml, checkpoints ...
          trials/0007/seed-2.json, seed-2.log      its attempts; what it printed
          trials.csv             a line for each trial

`read_study(folder)` gives all of it, at any time, also while sweeps run.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import math
import os
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.checkpoint import write_atomically
from trainer.evaluate.intervals import student_t
from trainer.sweeps.options import Plan, Question
from trainer.sweeps.space import Space, Value, read_space, space_changes
from trainer.sweeps.targets import Target, find_target
from trainer.tracking import read_metrics
from verl_lite.errors import UserError

DESCRIPTION = "study.json"
METRICS = "metrics.jsonl"


@dataclass
class Attempt:
    """One start of a run. ended: None while it runs, or if its sweep was killed. extra: words that this one had
    besides. cause: how it ended, a `retry.Cause`. lines: what it said last."""

    started: float
    slot: str
    pid: int
    sweep: int
    extra: list[str] = field(default_factory=list)
    ended: float | None = None
    status: int | None = None
    cause: str | None = None
    lines: list[str] = field(default_factory=list)


@dataclass
class RunRecord:
    """A run of a trial. seed: None where the study has no seeds. state: waiting | running | done | failed | stopped
    (pruned, or interrupted). command: that reproduces it, in a folder of its own. value: of the metric."""

    seed: int | None
    folder: Path
    command: list[str]
    state: str = "waiting"
    value: float | None = None
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def record(self) -> Path:
        return self.folder.with_suffix(".json")

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def seconds(self) -> float:
        """All attempts that ended, together."""
        return sum(attempt.ended - attempt.started for attempt in self.attempts if attempt.ended is not None)

    def metrics(self) -> dict[int, dict[str, float]]:
        """All numbers by step; empty before there are any."""
        path = self.folder / METRICS
        return read_metrics(path) if path.is_file() else {}

    def history(self, metric: str) -> dict[int, float]:
        """One number by step."""
        return {step: row[metric] for step, row in self.metrics().items() if metric in row}

    def save(self) -> None:
        kept = dataclasses.asdict(self)
        del kept["folder"]
        write_atomically(self.record, json.dumps(kept, indent=1))

    @classmethod
    def load(cls, folder: Path) -> RunRecord:
        """Raises UserError if its file is damaged."""
        path = folder.with_suffix(".json")
        try:
            kept = json.loads(path.read_text())
            attempts = [Attempt(**attempt) for attempt in kept.pop("attempts")]
            return cls(folder=folder, attempts=attempts, **kept)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(damaged(path, error)) from None


@dataclass
class TrialRecord:
    """A trial. state: waiting | running | complete | pruned | failed. value: mean of its runs' (of a pruned one the
    last that was known). parameters: empty while it waits to be chosen. error: first lines of why it failed."""

    number: int
    state: str
    parameters: dict[str, Value]
    value: float | None
    folder: Path
    error: str = ""
    intermediate: dict[int, float] = field(default_factory=dict)
    runs: list[RunRecord] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """Of the runs that are done."""
        return [run.value for run in self.runs if run.state == "done" and run.value is not None]

    @property
    def half_width(self) -> float | None:
        """Of the 95% interval of the mean over seeds (Student's t); None with fewer than two."""
        values = self.values
        if len(values) < 2:
            return None
        return student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))

    @property
    def command(self) -> str:
        """Reproduces the trial: a line for each run."""
        return "\n".join(shlex.join(run.command) for run in self.runs)


@dataclass
class Study:
    """A study to work on. storage: sqlite | journal."""

    folder: Path
    question: Question
    plan: Plan
    storage: str
    cwd: str

    def trial_folder(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:04}"

    def save(self) -> None:
        kept = {
            "question": write_question(self.question, self.cwd),
            "plan": dataclasses.asdict(self.plan),
            "storage": self.storage,
            "cwd": self.cwd,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / DESCRIPTION, json.dumps(kept, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Study:
        """Raises UserError if there is none, or if it is damaged."""
        path = folder / DESCRIPTION
        try:
            kept = json.loads(path.read_text())
            return cls(folder, read_question(kept["question"]), Plan(**kept["plan"]), kept["storage"], kept["cwd"])
        except FileNotFoundError:
            raise UserError(
                f"--study {folder}: there is no study ({DESCRIPTION}). To begin one, give keys with values "
                "(actor.optim.lr=1e-6,3e-6) and --metric as well"
            ) from None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(damaged(path, error)) from None


@dataclass
class StudyRecord(Study):
    """All that is known of a study."""

    trials: list[TrialRecord]

    @cached_property
    def target(self) -> Target:
        return find_target(self.question.command, self.question.options)

    def finished(self) -> list[TrialRecord]:
        """Complete trials, the best first."""
        done = [trial for trial in self.trials if trial.state == "complete" and trial.value is not None]
        return sorted(done, key=lambda trial: trial.value or 0.0, reverse=self.question.mode == "max")


def damaged(path: Path, error: Exception) -> str:
    """What to say of a study's file that cannot be read."""
    told = str(error).partition("\n")[0]
    return f"--study: {path} cannot be read ({told}): put a copy in its place, or begin a study with another name"


def write_question(question: Question, cwd: str) -> dict[str, Any]:
    """What study.json says of it; files with a hash of what is in them."""
    kept = dataclasses.asdict(dataclasses.replace(question, space=Space(())))
    kept["space"] = question.space.written()
    kept["files"] = {name: _hash(Path(cwd) / name) for name in question.files}
    return json.loads(json.dumps(kept))


def read_question(kept: dict[str, Any]) -> Question:
    """The other way."""
    seeds = kept["seeds"]
    return Question(
        **{name: kept[name] for name in ("command", "options", "metric", "mode", "take")},
        files=tuple(kept["files"]),
        settings=tuple(kept["settings"]),
        space=read_space(kept["space"])[0],
        seeds=None if seeds is None else tuple(seeds),
    )


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read: {error.strerror}") from None


def usual_folder(question: Question) -> Path:
    """The folder of a study that was given no name: the same for the same question."""
    text = json.dumps(write_question(question, os.getcwd()), sort_keys=True)
    name = question.command.rpartition("/")[2].removesuffix(".py").rpartition(".")[2]
    return Path("runs/sweeps").absolute() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def refuse_another_question(study: Study, question: Question) -> None:
    """Raises UserError, saying what differs and how to go on, if a study was begun with another question."""
    before = json.loads((study.folder / DESCRIPTION).read_text())["question"]
    now = write_question(question, study.cwd)
    changes = space_changes(before["space"], now["space"])
    changes += [
        f"--config {name} has changed since"
        for name, known in before["files"].items()
        if now["files"].get(name, known) != known
    ]
    before["files"], now["files"] = list(before["files"]), list(now["files"])
    for name in ("command", "options", "files", "settings", "seeds", "metric", "mode", "take"):
        if before[name] != now[name]:
            changes.append(f"{name} was {before[name]}, and is {now[name]}")
    if changes:
        raise UserError(
            f"--study {study.folder} was begun with another question:\n  " + "\n  ".join(changes) + "\nTrials of two "
            "questions cannot be compared. To go on with the old one:\n  python -m trainer.sweep --study "
            f"{shlex.quote(str(study.folder))}\nor give the new one a name of its own: --study NAME"
        )


# ------------------------------------------------------------------------------------------------------------- reading


def read_study(folder: Path) -> StudyRecord:
    """Everything about a study. Raises UserError if there is none."""
    from trainer.sweeps.engine import Engine

    study = Study.load(folder)
    trials = [read_trial(study, frozen) for frozen in Engine(study).trials()]
    return StudyRecord(folder, study.question, study.plan, study.storage, study.cwd, trials)


_STATES = {"WAITING": "waiting", "RUNNING": "running", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}


def read_trial(study: Study, frozen: Any) -> TrialRecord:
    """A trial as Optuna has it, with its runs as they are on the disk."""
    folder = study.trial_folder(frozen.number)
    parameters = frozen.params or frozen.system_attrs.get("fixed_params", {})
    runs = [RunRecord.load(path.with_suffix("")) for path in sorted(folder.glob("*.json"), key=_seed_order)]
    return TrialRecord(
        number=frozen.number,
        state=_STATES[frozen.state.name],
        parameters={p.name: parameters[p.name] for p in study.question.space.parameters if p.name in parameters},
        value=frozen.value,
        folder=folder,
        error=str(frozen.user_attrs.get("error", "")),
        intermediate=dict(frozen.intermediate_values),
        runs=runs,
    )


def _seed_order(path: Path) -> tuple[int, str]:
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdigit() else 0, path.stem


def write_csv(record: StudyRecord, path: Path) -> None:
    """A line for each trial."""
    names = [parameter.name for parameter in record.question.space.parameters]
    before, after = ("trial", "state", record.question.metric, "ci95", "runs"), ("error", "folder", "command")
    rows: list[Sequence[Any]] = [(*before, *names, "seconds", "attempts", *after)]
    for trial in record.trials:
        seconds = sum(run.seconds for run in trial.runs)
        attempts = sum(len(run.attempts) for run in trial.runs)
        values = [trial.parameters.get(name, "") for name in names]
        shown = ["" if number is None else f"{number:.6g}" for number in (trial.value, trial.half_width)]
        first = (trial.number, trial.state, *shown, len(trial.values))
        rows.append((*first, *values, f"{seconds:.1f}", attempts, trial.error, trial.folder, trial.command))
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    write_atomically(path, text.getvalue())
