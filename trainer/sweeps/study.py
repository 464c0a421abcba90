"""A study on disk: the specification of a sweep, and all its trials with parameters, runs, values and results.

SWEEPS.md lists the files. Every decision is written to the study's log before it takes effect, and the log is
sufficient to continue a sweep. Ray Tune's own state is saved at intervals only, contains less, and is not kept.
"""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import io
import json
import os
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from trainer.checkpoint.files import write_atomically
from trainer.cli import file_mask
from trainer.sweeps.study_spec import STOP, Search, StudySpec, Value
from trainer.validation.metrics import half_width
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject

COMMAND = ("-m", "trainer.main_ppo")
"""The command of a run, after `python`."""

DESCRIPTION = "study.json"
_LOG = "log.jsonl"

# columns of trials.csv before and after those of the parameters
_FIRST_COLUMNS = ("trial", "state", "value", "half_width")
_LAST_COLUMNS = ("steps", "seconds", "error", "runs", "command")


@dataclass
class TrialRun:
    """A run of a trial.

    Args:
        seed: seed of the run; None if the study has no seeds.
        folder: the run folder.
        words: words of the command, after `python`.
        state: waiting | running | done | failed | stopped.
        value: last value of the metric, once the run is done.
        values: values of the metric by step that this process has received.
        waits: the reason why the run waits; empty if it does not.
    """

    seed: int | None
    folder: Path
    words: list[str]
    state: str = "waiting"
    value: float | None = None
    error: str = ""
    seconds: float = 0.0
    steps: int = 0
    values: dict[int, float] = field(default_factory=dict)
    waits: str = ""


@dataclass
class Trial:
    """A choice of parameters, with one run for each seed.

    Args:
        number: number of the trial in the study, from 0.
        parameters: the chosen values by name.
        folder: folder of the trial, which contains those of its runs.
        runs: one run for each seed.
        means: by step, the mean over started runs that was judged.
        is_pruned: True if the pruner has ended the trial.
    """

    number: int
    parameters: dict[str, Value]
    folder: Path
    runs: list[TrialRun]
    means: dict[int, float] = field(default_factory=dict)
    is_pruned: bool = False

    @property
    def state(self) -> str:
        """State of the trial: waiting, running, complete, pruned or failed."""
        states = {run.state for run in self.runs}
        # before `is_pruned`: all runs can have reached their last step before they were asked to end
        if states == {"done"}:
            return "complete"
        if self.is_pruned:
            return "pruned"
        # one failed seed is enough: a mean over the remaining seeds would be too good
        if "failed" in states:
            return "failed"
        if states == {"waiting"}:
            return "waiting"
        return "running"

    @property
    def is_over(self) -> bool:
        return self.state in ("complete", "pruned", "failed")

    @property
    def values(self) -> list[float]:
        """Values of the runs that are done."""
        return [run.value for run in self.runs if run.value is not None]

    @property
    def value(self) -> float | None:
        """The mean over seeds; for a pruned trial the last known mean."""
        if self.state == "complete":
            return statistics.fmean(self.values)
        if self.is_pruned and self.means:
            return self.means[max(self.means)]
        return None

    @property
    def half_width(self) -> float | None:
        """Half width of the 95% interval of the mean over seeds (Student's t); None with fewer than two seeds."""
        if self.state != "complete":
            return None
        return half_width(np.array(self.values), is_share=False)

    @property
    def steps(self) -> int:
        """Steps of its longest run."""
        return max(run.steps for run in self.runs)

    @property
    def seconds(self) -> float:
        """Time of all its runs."""
        return sum(run.seconds for run in self.runs)

    @property
    def error(self) -> str:
        """The first error of its runs; empty if none failed."""
        for run in self.runs:
            if run.error:
                return run.error
        return ""

    @property
    def commands(self) -> list[str]:
        """The commands that repeat the trial, one for each seed."""
        commands = []
        for run in self.runs:
            commands.append(shlex.join(["python", *run.words]))
        return commands


@dataclass
class Study:
    """A study with all its trials, as recorded in its log."""

    folder: Path
    spec: StudySpec
    search: Search
    trials: list[Trial] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path) -> Study:
        """Reads a study. Raises UserError if there is none or if it is damaged."""
        path = folder / DESCRIPTION
        if not path.is_file():
            raise UserError(f"--study {folder}: no study exists there; to start one, add KEY=A,B and --metric")
        try:
            description = json.loads(path.read_text())
            search = Search(**description.pop("search"))
            spec = StudySpec(**description)
            study = cls(folder, spec, search)
            path = folder / _LOG  # for the message of an error
            if path.exists():
                # a crash can leave a part of a line at the end
                complete_lines = path.read_text().split("\n")[:-1]
                for line in complete_lines:
                    study._replay(json.loads(line))
            return study
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"--study: {path} cannot be read ({error}): start a study with another name") from None

    def save(self) -> None:
        """Writes the specification into the study's folder, which must be locked."""
        description = dataclasses.asdict(self.spec)
        description["search"] = dataclasses.asdict(self.search)
        text = json.dumps(description, indent=1)
        write_atomically(self.folder / DESCRIPTION, text)

    def refuse_another(self, spec: StudySpec) -> None:
        """Raises UserError if the study was started with another specification. The message lists the differences and
        the commands that continue either."""
        before = dataclasses.asdict(self.spec)
        changes = ""
        for name, value in dataclasses.asdict(spec).items():
            if value != before[name]:
                changes += f"  {name} was {before[name]}, and is {value}\n"
        if changes:
            folder = shlex.quote(str(self.folder))
            raise UserError(
                f"--study {self.folder} was started with another specification:\n{changes}To continue the old "
                f"study: python -m trainer.sweep --study {folder}; for a new one: --study NAME"
            )

    def begin(self, parameters: Mapping[str, Value]) -> Trial:
        """Adds a trial and returns it."""
        number = len(self.trials)
        event = {"trial": number, "parameters": dict(parameters)}
        self._log(event)
        return self.trials[number]

    def judge(self, trial: Trial, step: int, mean: float, prune: bool) -> None:
        """Records the mean of a trial's runs at a step. With `prune=True` the trial is pruned, and its runs are asked
        to end."""
        event = {
            "trial": trial.number,
            "step": step,
            "mean": mean,
            "prune": prune,
        }
        self._log(event)

    def end(self, trial: Trial, run: TrialRun, state: str, **details: object) -> None:
        """Records the end of a run. After a failure the other runs of the trial are asked to end.

        Args:
            trial: the trial of the run.
            run: the run.
            state: done | failed | stopped.
            details: value, error, seconds and steps of the run, as far as they are known; see `TrialRun`.
        """
        event = {
            "trial": trial.number,
            "seed": run.seed,
            "state": state,
            **details,
        }
        self._log(event)

    def _log(self, event: JsonObject) -> None:
        """Writes an event to the log, and then applies it."""
        path = self.folder / _LOG
        path.touch()
        with path.open("rb+") as file:
            end_of_lines = file.read().rfind(b"\n") + 1
            # overwrites a line that a crash cut off
            file.seek(end_of_lines)
            file.truncate()
            file.write(json.dumps(event).encode() + b"\n")
            file.flush()
            # a decision takes effect only when no crash can lose it
            os.fsync(file.fileno())
        self._replay(event)
        if event.get("prune") or event.get("state") == "failed":
            self.ask_to_end(self.trials[event["trial"]])

    def ask_to_end(self, trial: Trial) -> None:
        """Asks the started runs of a trial to end, by a file that they check on every machine."""
        if trial.folder.exists():
            (trial.folder / STOP).touch()

    def _replay(self, event: JsonObject) -> None:
        """Applies an event of the log to the trials. A continued sweep applies all of them."""
        number = event["trial"]
        # an event of `begin`
        if "parameters" in event:
            new_trial = self._new_trial(number, event["parameters"])
            self.trials.append(new_trial)
            return

        trial = self.trials[number]
        # an event of `judge`
        if "mean" in event:
            trial.means[event["step"]] = event["mean"]
            trial.is_pruned |= event["prune"]
            return

        # an event of `end`
        runs_by_seed = {run.seed: run for run in trial.runs}
        run = runs_by_seed[event["seed"]]
        run.state = event["state"]
        run.value = event.get("value")
        run.error = event.get("error", "")
        run.seconds = event.get("seconds", 0.0)
        run.steps = event.get("steps", 0)

    def _new_trial(self, number: int, parameters: dict[str, Value]) -> Trial:
        """Returns a trial whose runs are waiting."""
        folder = self.folder / "trials" / f"{number:04}"
        # without --seeds, the single run has the seed of the settings
        seeds: Sequence[int | None] = self.spec.seeds or [None]
        runs = []
        for seed in seeds:
            name = "run"
            if seed is not None:
                name = f"seed-{seed}"
            arguments = self.spec.command(parameters, seed)
            run = TrialRun(seed, folder / name, [*COMMAND, *arguments])
            runs.append(run)
        return Trial(number, parameters, folder, runs)

    def finished(self) -> list[Trial]:
        """Returns the complete trials, the best first."""
        complete_trials = [trial for trial in self.trials if trial.state == "complete"]
        is_descending = self.spec.mode == "max"
        complete_trials.sort(key=lambda trial: trial.value or 0.0, reverse=is_descending)
        return complete_trials

    def write_csv(self) -> None:
        """Writes trials.csv, with one line for each trial."""
        names = [parameter.name for parameter in self.spec.space]
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow([*_FIRST_COLUMNS, *names, *_LAST_COLUMNS])
        for trial in self.trials:
            cells: list[object] = [trial.number, trial.state, _as_cell(trial.value), _as_cell(trial.half_width)]
            cells += [trial.parameters[name] for name in names]

            folders = []
            for run in trial.runs:
                folder = run.folder.relative_to(self.folder)
                folders.append(str(folder))
            first_line_of_error, _, _ = trial.error.partition("\n")
            cells += [trial.steps, f"{trial.seconds:.1f}", first_line_of_error]
            cells += [";".join(folders), "\n".join(trial.commands)]
            writer.writerow(cells)
        write_atomically(self.folder / "trials.csv", text.getvalue())


def _as_cell(number: float | None) -> str:
    """Formats a number for trials.csv; a missing number is an empty cell."""
    if number is None:
        return ""
    return f"{number:.6g}"


@contextmanager
def locked(folder: Path, umask: str = "077") -> Iterator[None]:
    """Context manager that creates and locks the study's folder, so that no other sweep works on the study.

    Args:
        folder: The study's folder.
        umask: Umask of its files.

    Raises:
        UserError: If another sweep holds the lock, or the folder is not writable.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(file_mask(umask, folder))
            file = stack.enter_context((folder / "lock").open("a"))
        except OSError as error:
            raise UserError(f"--study {folder}: the folder is not writable: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (folder / "lock").read_text() or "another sweep"
            raise UserError(
                f"--study {folder}: {holder} is working on it: wait for it, or start another study: --study NAME"
            ) from None
        except OSError as error:
            # a file system without locks
            print(f"note: {folder} cannot be locked ({error.strerror}): a second sweep on it would not be noticed")
        # for the message of another sweep; the kernel releases the lock of a killed process
        file.truncate(0)
        print(f"pid {os.getpid()} of user {psutil.Process().username()}", file=file, end="", flush=True)
        yield
