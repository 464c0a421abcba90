"""Sends the metrics of a run to the console, to metrics.jsonl and to trackers, without stopping or slowing the
training.

metrics.jsonl is always written; `trainer.logger` adds console lines and trackers. A separate thread calls each tracker.
A tracker that raises is not called again. `read_metrics` reads the whole run for it afterwards, see REPORTS.md.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue

from trainer.observe.console import Console, following
from trainer.observe.trackers import OWN, TRACKERS, TrackedRun, Tracker, check_trackers, register_tracker
from trainer.validation.sample import Sample
from verl_lite.config import RunOptions

__all__ = ["TRACKERS", "TrackedRun", "Tracking", "check_trackers", "read_metrics", "register_tracker"]
FINISH_TIMEOUT_S = 15.0
METRICS = "metrics.jsonl"
TRAINED = "training/global_step"
"""The metric that only lines of a training step contain. Lines of a validation or checkpoint are merged into them."""


class Tracking:
    """The metrics file and all trackers of a run. As a context manager it ends the trackers and the progress bar on
    exit.

    Inside the context, a verbose console also shows the output of workers.

    Raises:
        UserError: if `trainer.logger` has an unknown name, or a name whose package is not installed.
    """

    before_log: Callable[[], object] | None = None
    """Called before each line is written; `trainer.launch.run` restores a deleted run folder in it."""

    def __init__(self, run_dir: Path, config: RunOptions, console: Console) -> None:
        trainer = config.trainer
        check_trackers(trainer.logger, trainer.project_name)
        run_dir = Path(run_dir)
        run = TrackedRun(
            run_dir=run_dir,
            project=trainer.project_name,
            name=trainer.experiment_name or run_dir.name,
            options=dataclasses.asdict(config),
            console=console,
        )
        self.note = console.note
        self._console = console
        self._shows = "console" in trainer.logger
        self._following = following(run_dir / "logs", console)
        self._record = Record(run_dir, console.note)
        # the last logged step, and all metrics that were logged for it
        self._newest: tuple[int, dict[str, float]] = (-1, {})
        # the last step that an earlier process of this run logged
        earlier_steps = read_metrics(run_dir / METRICS)
        self._last_before = max(earlier_steps, default=-1)
        self._trackers = []
        for name in trainer.logger:
            if name not in OWN:
                self._trackers.append(TrackerThread(name, run))

    def __enter__(self) -> Tracking:
        self._following.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()
        self._following.__exit__(None, None, None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs the metrics of one step.

        Args:
            metrics: metrics by name, which are added to those that were logged for the same step.
            step: number of training steps done; 0 is before the first step.
        """
        if self.before_log is not None:
            self.before_log()
        logged = self.logged_at(step) | dict(metrics)
        self._newest = (step, logged)
        self._console.advance(step)
        if self._shows:
            self._console.log(metrics, step)
        self._record.log(metrics, step)

        # trackers cannot delete values: for a step that a resumed run repeats, they keep the first ones. Its newest
        # step is not repeated, and a validation or checkpoint can still add metrics to it
        is_addition = step == self._last_before and TRAINED not in metrics
        if step > self._last_before or is_addition:
            finite_metrics = {}
            for name, value in metrics.items():
                if math.isfinite(value):
                    finite_metrics[name] = value
            self._call(lambda tracker: tracker.log(finite_metrics, step))

    def logged_at(self, step: int) -> dict[str, float]:
        """Returns all metrics that were logged for a step if it is the last logged one, otherwise none."""
        newest_step, metrics = self._newest
        if newest_step != step:
            return {}
        return dict(metrics)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Sends samples of the policy, with their scores, to the trackers."""
        self._call(lambda tracker: tracker.log_samples(samples, step))

    def show(self, text: str) -> None:
        """Prints text, which may have several lines, if `trainer.logger` contains console."""
        if self._shows:
            self._console.progress(text)

    def finish(self) -> None:
        """Ends all trackers, and waits up to FINISH_TIMEOUT_S for each one to send its remaining calls."""
        # the bar first, which would be drawn again while the trackers end
        self._console.stop()
        for tracker in self._trackers:
            tracker.finish()

    def _call(self, call: Callable[[Tracker], object]) -> None:
        for tracker in self._trackers:
            tracker.calls.put(call)


class TrackerThread(threading.Thread):
    """Creates a tracker when the first of its `calls` arrives, and runs the calls in order until `finish` or an
    error."""

    # The tracker is not created earlier: if it starts a process while Ray starts, Ray takes that process for one of
    # the cluster and ends it with the cluster.

    def __init__(self, name: str, run: TrackedRun) -> None:
        # daemon: a tracker that hangs must not keep the process alive after `finish` has given up
        super().__init__(name=f"tracker-{name}", daemon=True)
        self.calls: SimpleQueue[Callable[[Tracker], object] | None] = SimpleQueue()
        self._tracker_name = name
        self._run = run
        self.start()

    def run(self) -> None:
        """Runs the queued calls. An exception of the tracker ends the thread with a warning."""
        tracker: Tracker | None = None
        try:
            while (call := self.calls.get()) is not None:
                if tracker is None:
                    create = TRACKERS.get_fn(self._tracker_name)
                    tracker = create(self._run)
                call(tracker)
            if tracker is not None:
                tracker.finish()
        # a tracker is third-party code, which may raise anything
        except Exception as error:
            self._warn(f"raises {type(error).__name__}: {error}")

    def finish(self) -> None:
        """Ends the tracker after its remaining calls. Warns and returns if that takes longer than FINISH_TIMEOUT_S."""
        self.calls.put(None)
        self.join(FINISH_TIMEOUT_S)
        if self.is_alive():
            self._warn("does not finish")

    def _warn(self, problem: str) -> None:
        self._run.console.note(
            f"tracker {self._tracker_name} {problem}; it is left out. {METRICS} has the whole run, and "
            "trainer/REPORTS.md#trackers the lines that send it to the tracker afterwards"
        )


class Record:
    """Writes metrics.jsonl, with one line {"step", "data"} per call. A resumed run appends to it.

    A value that is not finite is written as null. If the file cannot be written, a warning is shown once and the run
    continues.
    """

    def __init__(self, run_dir: Path, note: Callable[[str], None]) -> None:
        self._path = run_dir / METRICS
        self._note = note
        self._warned = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Appends the line of one call."""
        data: dict[str, float | None] = dict(metrics)
        for name, value in metrics.items():
            # json has no NaN and no infinity
            if isinstance(value, float) and not math.isfinite(value):
                data[name] = None
        row = {"step": step, "data": data}
        # default: numbers of NumPy, which json cannot write
        line = json.dumps(row, default=float)
        try:
            self._append(line.encode() + b"\n")
        except OSError as error:
            # once, because a full disk would add a warning to each step
            if not self._warned:
                self._note(f"cannot write {self._path}: {error}; the run goes on. Make room on that disk")
            self._warned = True

    def _append(self, line: bytes) -> None:
        with self._path.open("a+b") as file:
            # a killed process can leave a part of a line, which must not be joined with this one
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)


def logged_validations(path: Path, last_step: int) -> dict[int, dict[str, float]]:
    """Returns the metrics of the validations in metrics.jsonl up to a step, by step; empty without such a file."""
    validations: dict[int, dict[str, float]] = {}
    for step, metrics in read_metrics(path).items():
        if step > last_step:
            break
        for name, value in metrics.items():
            if name.startswith(("val-", "val/")):
                validation = validations.setdefault(step, {})
                validation[name] = value
    return validations


def read_metrics(path: str | Path) -> dict[int, dict[str, float]]:
    """Returns the metrics by step, in the order of steps, with several lines of one step merged.

    If a resumed run repeated steps, the earlier lines of these steps and of all later steps are left out. Damaged
    lines, such as a line that a crash cut off, are left out too.
    """
    path = Path(path)
    if not path.is_file():
        return {}
    steps: dict[int, dict[str, float]] = {}
    # the text after the last line end is a line that is being written
    *lines, _ = path.read_bytes().split(b"\n")
    for line in lines:
        row = _read_line(line)
        if row is None:
            continue
        step, metrics = row
        # a second training line of a step comes from a resumed run, which repeats this step and all later ones
        last_valid_step = step if TRAINED not in metrics else step - 1
        # the steps are in ascending order, so the last one is the largest
        while steps and next(reversed(steps)) > last_valid_step:
            steps.popitem()
        steps.setdefault(step, {}).update(metrics)
    return steps


def _read_line(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Returns the step of a line and its metrics that are not null; None for an empty or a damaged line."""
    try:
        row = json.loads(line)
        step = int(row["step"])
        metrics = {}
        for name, value in row["data"].items():
            # null stands for NaN and infinity, see `Record`
            if value is not None:
                metrics[name] = float(value)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        # for example because the machine failed while it wrote the line
        return None
    return step, metrics
