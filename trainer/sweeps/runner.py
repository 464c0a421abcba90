"""The loop of a sweep: looks at what runs, starts what fits, until the queue is empty.

A trial is a choice of parameters; it has a run for each seed. This sweep claims a trial, gives its runs places as they
become free, reports their mean to Optuna's pruner as they go on, starts a run again where its end has a cure, and ends
the trial when all its runs have.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.sweeps.checks import Combinations, missing_metric, words_of
from trainer.sweeps.engine import Engine
from trainer.sweeps.options import Means
from trainer.sweeps.owners import BEAT_EVERY_S, Sweeper
from trainer.sweeps.retry import Cause, Diagnosis, diagnose, is_retried, smaller
from trainer.sweeps.slots import Pool, Slot, shared_memory
from trainer.sweeps.space import Value
from trainer.sweeps.study import METRICS, Attempt, RunRecord, Study
from trainer.sweeps.targets import FOLDER, NAME, RESUME, SEED, Target
from trainer.sweeps.trial import Launcher, Numbers, Process, end_of
from verl_lite.errors import ClusterLostError, UserError

if TYPE_CHECKING:
    from optuna.trial import Trial

    from trainer.sweeps.table import SweepView

LOOK_EVERY_S = 0.3
_DEVICES_EVERY_S = 3.0
"""Between looks at devices of which none was free."""
_QUEUE_EVERY_S = 2.0
"""Between looks at a queue that was empty: the last trials run."""


@dataclass
class ActiveRun:
    """A run of a trial that this sweep works on. extra: words that cure an earlier end. avoid: devices that it lost.
    logged: bytes of its log before this attempt. begun: its step then. total: steps that it will have, as far as is
    known."""

    record: RunRecord
    numbers: Numbers
    extra: list[str] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    process: Process | None = None
    slot: Slot | None = None
    logged: int = 0
    begun: int = 0
    asked_to_end: float | None = None
    total: int | None = None

    @property
    def is_final(self) -> bool:
        return self.record.state in ("done", "failed", "stopped")


@dataclass
class ActiveTrial:
    """A trial that this sweep owns."""

    number: int
    trial: Trial
    values: dict[str, Value]
    folder: Path
    runs: list[ActiveRun]
    config: Mapping[str, object]
    pruned: bool = False
    error: str = ""
    reported: set[int] = field(default_factory=set)


class Runner:
    """Works on a study until nothing is left to do. active: the trials that this sweep runs, by number."""

    def __init__(
        self,
        study: Study,
        engine: Engine,
        sweeper: Sweeper,
        pool: Pool,
        launcher: Launcher,
        target: Target,
        combinations: Combinations,
        means: Means,
        view: SweepView,
    ) -> None:
        self.study, self.engine, self.sweeper, self.pool = study, engine, sweeper, pool
        self.means, self.view, self.active = means, view, dict[int, ActiveTrial]()
        self._launcher, self._target, self._combinations = launcher, target, combinations
        self._looked_at_devices = self._nothing_until = 0.0
        self._told: set[str] = set()
        self._checked_owners = time.monotonic()
        self._metric_seen = bool(engine.trials("COMPLETE"))
        self.steps_of_a_run: int | None = None

    def work(self) -> None:
        """Until nothing is left. Whatever ends it, no run is left running."""
        try:
            while self.step():
                time.sleep(LOOK_EVERY_S)
        except ClusterLostError:
            self.active.clear()  # nothing can be asked of these runs; their records are as after kill -9
            raise
        finally:
            self.stop_all()

    def step(self) -> bool:
        """Looks once at everything; whether there is more to do."""
        self._let_go_of_lost_trials()
        for trial in list(self.active.values()):
            for run in trial.runs:
                self._look_at(trial, run)
            self._report(trial)
            self._end_if_over(trial)
        waits = self._start_what_fits()
        self.view.update(self)
        return waits or bool(self.active)

    # ------------------------------------------------------------------------------------------------------- starting

    def _start_what_fits(self) -> bool:
        """Starts runs while there is room; whether some wait for devices that others have."""
        if time.monotonic() - self._looked_at_devices < _DEVICES_EVERY_S and self.pool.why_not():
            return True
        if self.pool.size == 0:
            raise UserError("no device is left to the sweep:\n  " + "\n  ".join(self.pool.why_not()))
        while len(self.running()) < self.pool.size and (self._next_run() or self._has_claimable()):
            waiting = self._next_run()
            slot = self.pool.take(waiting[1].avoid if waiting else ())
            if slot is None:
                return self._without_a_slot()
            found = waiting or self._claim()
            if found is None:
                self.pool.give_back(slot)
                break
            self._start(*found, slot)
        return self._is_undecided()

    def running(self) -> list[tuple[ActiveTrial, ActiveRun]]:
        """Runs that have a process, with their trials."""
        return [(trial, run) for trial in self.active.values() for run in trial.runs if run.process is not None]

    def _without_a_slot(self) -> bool:
        self._looked_at_devices = time.monotonic()
        reasons = self.pool.why_not()
        if not reasons:
            return True
        busy = bool(self.running())
        if not busy and not self.means.wait:
            raise UserError(
                "no device is free:\n  " + "\n  ".join(reasons) + "\nWait for them with --wait, or choose others "
                "with --devices"
            )
        for reason in reasons:
            self._tell_once(f"{reason}; {'passed over' if busy else 'waiting'}")
        return True

    def _next_run(self) -> tuple[ActiveTrial, ActiveRun] | None:
        """A run that waits for a place, of the oldest trial."""
        pairs = ((trial, run) for trial in self.active.values() if not trial.pruned for run in trial.runs)
        return next((pair for pair in pairs if pair[1].record.state == "waiting"), None)

    def _has_claimable(self) -> bool:
        if time.monotonic() < self._nothing_until:
            return False
        if next(self._candidates(), None) is not None:
            return True
        self._nothing_until = time.monotonic() + _QUEUE_EVERY_S
        return False

    def _candidates(self) -> Iterator[int]:
        """Numbers of trials that nobody runs: those whose sweep died come first."""
        for state in ("RUNNING", "WAITING"):
            for trial in self.engine.trials(state):
                owner = self.sweeper.owner(self.study.trial_folder(trial.number))
                if trial.number not in self.active and (owner is None or not self.sweeper.is_alive(owner)):
                    yield trial.number

    def _is_undecided(self) -> bool:
        """Whether nothing is left but trials of a sweep elsewhere of which it is not known yet whether it lives."""
        if self.active:
            return False
        owners = {self.sweeper.owner(self.study.trial_folder(trial.number)) for trial in self.engine.trials("RUNNING")}
        undecided = [owner for owner in owners if owner is not None and self.sweeper.is_undecided(owner)]
        for owner in undecided:
            self._tell_once(f"waiting to see whether {self.sweeper.who(owner)} still lives")
        return bool(undecided)

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.view.event(text)

    def _claim(self) -> tuple[ActiveTrial, ActiveRun] | None:
        """Makes a trial this sweep's; None if others were faster, or nothing is left."""
        for number in self._candidates():
            if not self.sweeper.claim(self.study.trial_folder(number)) or not self.engine.is_open(number):
                continue  # another sweep was faster, or its last act was to end the trial
            trial = self._begin(number)
            if trial is not None:
                self.active[number] = trial
                if found := self._next_run():
                    return found
        return None

    def _begin(self, number: int) -> ActiveTrial | None:
        """A claimed trial with its runs, new or as another sweep left them; None if the command would refuse it."""
        optuna_trial, values = self.engine.begin(number)
        folder = self.study.trial_folder(number)
        problem = self._combinations.problem(values)
        if problem is not None:
            error = f"{Cause.WRONG_INPUT}: {' '.join(problem.splitlines()[:2])}"
            # pruned without a value is the worst that a trial can be to Optuna's samplers, which learn nothing of FAIL
            self.engine.end(optuna_trial, "PRUNED" if self._combinations.skip_invalid else "FAIL", error=error)
            self.view.event(f"trial {number} is not run: {problem}")
            return None
        seeds: tuple[int | None, ...] = self.study.question.seeds or (None,)
        runs = [self._active_run(folder / ("run" if seed is None else f"seed-{seed}"), seed, values) for seed in seeds]
        config = self._combinations.config(values)
        total = config.get("trainer.total_training_steps")
        for run in runs:
            run.total = total if isinstance(total, int) else None
        done = optuna_trial.storage.get_trial(optuna_trial._trial_id).intermediate_values
        return ActiveTrial(number, optuna_trial, values, folder, runs, config, reported=set(done))

    def _active_run(self, folder: Path, seed: int | None, values: Mapping[str, Value]) -> ActiveRun:
        words = [*self._target.words, *words_of(self.study.question, values)]
        words += [] if seed is None else [f"{SEED}={seed}"]
        command = ["python", *words]
        numbers = Numbers(folder / METRICS, self.study.question.metric)
        if not folder.with_suffix(".json").exists():
            return ActiveRun(RunRecord(seed, folder, command), numbers)
        record = RunRecord.load(folder)
        run = ActiveRun(record, numbers)
        for attempt in record.attempts:
            run.extra = attempt.extra
            if attempt.ended is None:
                last_words = record.log.stat().st_mtime if record.log.exists() else 0.0
                attempt.ended, attempt.cause = max(attempt.started, last_words), Cause.SWEEP_DIED
        if record.state in ("running", "stopped"):
            record.state = "waiting"
        numbers.update()
        return run

    def _start(self, trial: ActiveTrial, run: ActiveRun, slot: Slot) -> None:
        record = run.record
        record.folder.parent.mkdir(parents=True, exist_ok=True)
        settings = [*run.extra, *self._slot_settings(trial, slot)]
        own = {FOLDER: record.folder, NAME: f"{self.study.folder.name}-{trial.number:04}-{record.folder.name}"}
        settings += [f"{key}={value}" for key, value in own.items() if self._target.has(key)]
        if record.attempts and self._target.has(RESUME):
            settings.append(f"{RESUME}=auto")
        run.logged = record.log.stat().st_size if record.log.exists() else 0
        run.process = self._launcher.start([sys.executable, *record.command[1:], *settings], record.log, slot)
        run.slot, run.asked_to_end, record.state = slot, None, "running"
        run.begun = run.numbers.step
        attempt = Attempt(time.time(), slot.name, run.process.pid, self.sweeper.number, list(run.extra))
        record.attempts.append(attempt)
        record.save()
        again = f", attempt {len(record.attempts)}" if len(record.attempts) > 1 else ""
        self.view.event(f"{self.name(trial, run)} starts on {slot.name}{again}: {shown_values(trial.values)}")

    def _slot_settings(self, trial: ActiveTrial, slot: Slot) -> list[str]:
        words = [word for word in slot.settings if self._target.has(word.partition("=")[0])]
        if slot.name.startswith("gpu"):
            if self._target.has("trainer.n_gpus_per_node"):
                words.append(f"trainer.n_gpus_per_node={len(slot.devices)}")
            words += shared_memory(trial.config, self.means.share)
        return words

    # -------------------------------------------------------------------------------------------------------- looking

    def _look_at(self, trial: ActiveTrial, run: ActiveRun) -> None:
        if run.process is None or run.slot is None:
            return
        status = run.process.poll()
        run.numbers.update()
        if run.numbers.values:
            self._metric_seen = True
        if status is None:
            self._look_for_metric(trial, run)
            if self._is_out_of_patience(run):
                self.view.event(f"{self.name(trial, run)} did not end within {self.means.grace_s:g} s, and is killed")
                run.process.kill()
            return
        devices = set(run.slot.devices)
        found = self._file_end(run, status)
        if run.record.state != "stopped":
            self._after(trial, run, found, devices)
        run.record.save()

    def _is_out_of_patience(self, run: ActiveRun) -> bool:
        return run.asked_to_end is not None and time.monotonic() - run.asked_to_end > self.means.grace_s

    def _file_end(self, run: ActiveRun, status: int) -> Diagnosis:
        """What is to be done when a run has ended, whatever the reason: its attempt is filed, its place given back.
        One that was asked to end, and did, is stopped."""
        assert run.process is not None and run.slot is not None, "it has run"
        run.process.clean()
        run.numbers.update()
        found = diagnose(status, end_of(run.record.log, since=run.logged))
        stopped = run.asked_to_end is not None and status != 0
        attempt = run.record.attempts[-1]
        attempt.ended, attempt.status, attempt.lines = time.time(), status, list(found.lines)
        attempt.cause = Cause.STOPPED if stopped else found.cause
        if stopped:
            run.record.state = "stopped"
        self.pool.give_back(run.slot, lost=found.cause == Cause.LOST_DEVICE and not stopped)
        run.process = run.slot = None
        return found

    def _look_for_metric(self, trial: ActiveTrial, run: ActiveRun) -> None:
        """A validation without the metric, before any run had it: the metric's name is wrong, and all runs in vain."""
        metric, family = self.study.question.metric, self.study.question.metric.partition("/")[0]
        if self._metric_seen or family != "val-core":
            return
        if any(name.startswith("val-core/") for name in run.numbers.names):
            raise UserError(missing_metric(metric, run.numbers.names, self.name(trial, run)))

    def _after(self, trial: ActiveTrial, run: ActiveRun, found: Diagnosis, devices: set[str]) -> None:
        """What is done about a run that ended by itself."""
        record, question = run.record, self.study.question
        name = self.name(trial, run)
        if found.cause == Cause.DONE:
            record.value = self._value(run)
            if record.value is None or record.value != record.value:
                problem = missing_metric(question.metric, run.numbers.names, name)
                record.state, trial.error = "failed", problem
                record.attempts[-1].lines = [problem]
                if not self._metric_seen:
                    raise UserError(problem)
                return
            record.state = "done"
            self.steps_of_a_run = run.numbers.step
            self.view.event(f"{name} done: {question.metric} {record.value:.4g} after {run.numbers.step} steps")
            return
        before = [attempt.cause or "" for attempt in record.attempts[:-1]]
        again = is_retried(found.cause, before, self.means.retries)
        cure = "once more"
        if again and found.cause == Cause.OUT_OF_MEMORY:
            config = self._combinations.config(trial.values, run.extra)
            words = smaller(config)
            again, cure = bool(words) or not config, f"with {' '.join(words)}"
            keys = {word.partition("=")[0] for word in words}
            run.extra = [word for word in run.extra if word.partition("=")[0] not in keys] + words
        elif found.cause == Cause.LOST_DEVICE:
            run.avoid |= devices
            cure = "on another device if there is one"
        elif found.cause == Cause.DEVICE_TAKEN:
            cure = "when a device is free"
        record.state = "waiting" if again else "failed"
        self.view.event(f"{name} failed ({found.error}); {f'again, {cure}' if again else 'not again'}")
        if not again:
            trial.error = trial.error or found.error
            if found.cause == Cause.WRONG_INPUT:
                self._drop_waiting(trial)

    def _value(self, run: ActiveRun) -> float | None:
        return run.numbers.value(self.study.question.take, self.study.question.mode)

    def _drop_waiting(self, trial: ActiveTrial) -> None:
        for run in trial.runs:
            if run.record.state == "waiting":
                run.record.state = "stopped"
                run.record.save()

    # -------------------------------------------------------------------------------------------------- Optuna's part

    def _report(self, trial: ActiveTrial) -> None:
        """Tells the pruner each step that all runs of the trial that have begun have reached, and asks it."""
        if self.study.plan.pruner == "none" or trial.pruned:
            return
        begun = [run for run in trial.runs if run.record.attempts and run.record.state != "failed"]
        steps = set.intersection(*(set(run.numbers.values) for run in begun)) if begun else set()
        for step in sorted(steps - trial.reported):
            trial.reported.add(step)
            trial.trial.report(sum(run.numbers.values[step] for run in begun) / len(begun), step)
            if not all(run.is_final for run in trial.runs) and trial.trial.should_prune():
                trial.pruned = True
                self.view.event(f"trial {trial.number} is pruned at step {step}")
                for run in trial.runs:
                    self._ask_to_end(run)
                self._drop_waiting(trial)
                return

    def _ask_to_end(self, run: ActiveRun) -> None:
        if run.process is not None and run.asked_to_end is None:
            run.asked_to_end = time.monotonic()
            run.process.interrupt()

    def _end_if_over(self, trial: ActiveTrial) -> None:
        if not all(run.is_final for run in trial.runs) or trial.number not in self.active:
            return
        del self.active[trial.number]
        values = [run.record.value for run in trial.runs if run.record.state == "done" and run.record.value is not None]
        if trial.pruned and len(values) < len(trial.runs):
            self.engine.end(trial.trial, "PRUNED")
        elif len(values) == len(trial.runs):
            self.engine.end(trial.trial, "COMPLETE", sum(values) / len(values))
        else:
            part = f" ({len(values)} of {len(trial.runs)} runs are done)" if values else ""
            self.engine.end(trial.trial, "FAIL", error=(trial.error or "a run was stopped") + part)

    # ---------------------------------------------------------------------------------------------------------- ending

    def _let_go_of_lost_trials(self) -> None:
        """Another sweep takes over the trials of one that was silent for long (suspended, cut off). If that was this
        one, its runs of them end: two runs must not write to one folder."""
        if time.monotonic() - self._checked_owners < BEAT_EVERY_S:
            return
        self._checked_owners = time.monotonic()
        for trial in list(self.active.values()):
            if self.sweeper.owner(trial.folder) != self.sweeper.number:
                self.view.event(f"trial {trial.number} was taken over by another sweep: this one was silent for long")
                del self.active[trial.number]
                for run in trial.runs:
                    if run.process is not None and run.slot is not None:
                        run.process.kill()
                        self.pool.give_back(run.slot)

    def stop_all(self) -> None:
        """Ends all runs: politely, then not. They go on from their checkpoints when the study does."""
        running = self.running()
        for _, run in running:
            self._ask_to_end(run)
        if running:
            self.view.event(f"stopping {len(running)} runs, which have {self.means.grace_s:g} s to save what they have")
        for _, run in running:
            assert run.process is not None, "it runs"
            while (status := run.process.poll()) is None:
                if self._is_out_of_patience(run):
                    run.process.kill()
                time.sleep(0.05)
            self._file_end(run, status)
            if status == 0 and run.numbers.values:  # it was at its end just then
                run.record.state, run.record.value = "done", self._value(run)
            run.record.save()
        self.active.clear()

    # -------------------------------------------------------------------------------------------------------- in words

    def name(self, trial: ActiveTrial, run: ActiveRun) -> str:
        seed = "" if run.record.seed is None else f" seed {run.record.seed}"
        return f"trial {trial.number}{seed}"


def shown_values(values: Mapping[str, Value]) -> str:
    """Parameters in a line, numbers and keys short."""
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values.values()]
    return ", ".join(f"{name}={text}" for name, text in zip(short_names(values), texts, strict=True)) or "no parameters"


def short_names(keys: Iterable[str]) -> list[str]:
    """Keys by their last part, where that is enough to tell them apart."""
    names = list(keys)
    lasts = [name.rpartition(".")[2] for name in names]
    return [name if lasts.count(last) > 1 else last for name, last in zip(names, lasts, strict=True)]
