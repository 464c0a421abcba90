"""A sweep as people see it: on a terminal a table that is renewed in place, elsewhere a line for each event."""

from __future__ import annotations

import statistics
import time
from typing import IO

import rich.console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainer.console import format_seconds
from trainer.sweeps.runner import ActiveRun, Runner, shown_values
from trainer.sweeps.study import StudyRecord, TrialRecord, read_trial

_UPDATE_EVERY_S = 1.0
_LINE_EVERY_S = 60.0
_WIDTH_OF_FILES = 160
_BEST_SHOWN = 5
_FAILED_SHOWN = 5


class SweepView:
    """file: where to; None = standard output."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self.console = rich.console.Console(file=file, highlight=False)
        if not self.console.is_terminal:
            self.console = rich.console.Console(file=file, highlight=False, width=_WIDTH_OF_FILES)
        self._live: Live | None = None
        self._updated = self._line = time.monotonic()

    def __enter__(self) -> SweepView:
        if self.console.is_terminal:
            self._live = Live(Text("starting"), console=self.console, refresh_per_second=2, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def event(self, text: str) -> None:
        """A line with the time of day."""
        self.console.print(Text(f"{time.strftime('%H:%M:%S')} {text}"), soft_wrap=True)

    def print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)  # a command stays one line

    def update(self, sweep: Runner) -> None:
        """Shows how things are, at most once a second; as a line once a minute where there is no terminal."""
        now = time.monotonic()
        if self._live is not None and now - self._updated >= _UPDATE_EVERY_S:
            self._updated = now
            trials = self._trials(sweep)
            self._live.update(table(sweep, trials))
        elif self._live is None and now - self._line >= _LINE_EVERY_S:
            self._line = now
            trials = self._trials(sweep)
            running = [f"{sweep.name(trial, run)} {progress(run)}" for trial, run in sweep.running()]
            self.event("; ".join([heading(sweep, trials), *running]))

    def _trials(self, sweep: Runner) -> list[TrialRecord]:
        return [read_trial(sweep.study, frozen) for frozen in sweep.engine.trials()]


def heading(sweep: Runner, trials: list[TrialRecord]) -> str:
    """`3 of 12 trials done, 2 running, 1 failed, about 4:10 left`."""
    counts = {state: sum(trial.state == state for trial in trials) for state in ("complete", "pruned", "failed")}
    running = sum(trial.state == "running" for trial in trials)
    parts = [f"{sum(counts.values())} of {len(trials)} trials done", f"{running} running"]
    parts += [f"{counts[state]} {state}" for state in ("pruned", "failed") if counts[state]]
    left = seconds_left(sweep, trials)
    return ", ".join(parts + ([] if left is None else [f"about {format_seconds(left)} left"]))


def seconds_left(sweep: Runner, trials: list[TrialRecord]) -> float | None:
    """Until the queue is empty, if the runs to come take as long as those that are done took; None before one is."""
    done = [run.seconds for trial in trials for run in trial.runs if run.state == "done"]
    if not done:
        return None
    seeds = len(sweep.study.question.seeds or (None,))
    waiting = sum(
        seeds - sum(run.state in ("done", "failed") for run in trial.runs)
        for trial in trials
        if trial.state in ("waiting", "running")
    )
    spent = sum(time.time() - run.record.attempts[-1].started for _, run in sweep.running())
    return max(0.0, waiting * statistics.mean(done) - spent) / max(1, sweep.pool.size)


def run_seconds_left(run: ActiveRun, usual_total: int | None) -> float | None:
    """Of one run, at the pace of this attempt; None if its length or pace is not known."""
    total = run.total or usual_total
    done = run.numbers.step - run.begun
    if not total or done <= 0 or not run.record.attempts:
        return None
    elapsed = time.time() - run.record.attempts[-1].started
    return elapsed / done * max(0, total - run.numbers.step)


def progress(run: ActiveRun) -> str:
    """`step 12/100, 0.43`."""
    total = f"/{run.total}" if run.total else ""
    values = run.numbers.values
    shown = f", {values[max(values)]:.4g}" if values else ""
    return f"step {run.numbers.step}{total}{shown}"


def table(sweep: Runner, trials: list[TrialRecord]) -> Table:
    """What runs, the best so far, and what failed last."""
    question = sweep.study.question
    found = Table(title=heading(sweep, trials), title_justify="left", expand=True)
    for name in ("trial", "state", "parameters", "step", question.metric, "left", "on"):
        found.add_column(name, overflow="fold", no_wrap=name in ("trial", "step", "left"))
    for trial, run in sweep.running():
        number, left = sweep.name(trial, run).removeprefix("trial "), run_seconds_left(run, sweep.steps_of_a_run)
        step, _, value = progress(run).removeprefix("step ").partition(", ")
        state = "running" + (f" ({len(run.record.attempts)}.)" if len(run.record.attempts) > 1 else "")
        shown, where = "" if left is None else format_seconds(left), run.slot.name if run.slot else ""
        found.add_row(number, state, shown_values(trial.values), step, value, shown, where)
    study = StudyRecord(**vars(sweep.study), trials=trials)
    for place, record in enumerate(study.finished()[:_BEST_SHOWN]):
        state, parameters = "done" if place else "best", shown_values(record.parameters)
        found.add_row(str(record.number), state, parameters, "", shown_value(record), "", "")
    for record in [trial for trial in trials if trial.state == "failed"][-_FAILED_SHOWN:]:
        found.add_row(str(record.number), "failed", shown_values(record.parameters), "", record.error, "", "")
    return found


def shown_value(trial: TrialRecord) -> str:
    """`0.512 +- 0.03`, the second half the 95% interval over seeds."""
    if trial.value is None:
        return ""
    width = trial.half_width
    return f"{trial.value:.4g}" + ("" if width is None else f" +- {width:.2g}")
