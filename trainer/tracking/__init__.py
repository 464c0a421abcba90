"""Where the numbers of a run go: the console, the run's own record, dashboards. No tracker stops or slows the training.

metrics.jsonl is always written; `trainer.logger` adds the console's lines and trackers. Each tracker is called by a
thread of its own; one that raises is left alone, and `python -m trainer.sync RUN` gives it the record afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue

from trainer.console import Console, following
from trainer.evaluate.sample import Sample
from trainer.tracking.trackers import OWN, TRACKERS, TrackedRun, Tracker, check_trackers, register_tracker
from verl_lite.config import RunOptions

__all__ = ["TRACKERS", "TrackedRun", "Tracking", "check_trackers", "read_metrics", "register_tracker"]
FINISH_TIMEOUT_S = 15.0
METRICS = "metrics.jsonl"
TRAINED = "training/global_step"
"""Among the numbers of a training step; those of a validation or a checkpoint join them."""


class Tracking:
    """The record and all trackers of a run as one; a context that ends them, and the console's progress bar, when it is
    left. Inside, what workers print is shown where the console is verbose.

    Raises UserError for a name in `trainer.logger` that is not known, and for one whose package is missing.
    """

    before_log: Callable[[], object] | None = None

    def __init__(self, run_dir: Path, config: RunOptions, console: Console) -> None:
        names = list(config.trainer.logger)
        check_trackers(names)
        trainer, options = config.trainer, dataclasses.asdict(config)
        name = trainer.experiment_name or Path(run_dir).name
        run = TrackedRun(Path(run_dir), trainer.project_name, name, options, console)
        self.note = console.note
        self._console, self._shows = console, "console" in names
        self._following = following(run.run_dir / "logs", console)
        self._record = Record(run.run_dir, console.note)
        self._last_before = max(read_metrics(run.run_dir / METRICS), default=-1)  # step of an earlier process
        self._trackers = [TrackerThread(name, run) for name in names if name not in OWN]

    def __enter__(self) -> Tracking:
        self._following.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()
        self._following.__exit__(None, None, None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends numbers of one step. step: training steps done; 0 = before the first."""
        if self.before_log is not None:
            self.before_log()
        self._console.advance(step)
        if self._shows:
            self._console.log(metrics, step)
        self._record.log(metrics, step)
        # trackers cannot forget: of a step that is done again they have the first time
        if step > self._last_before or (step == self._last_before and TRAINED not in metrics):
            known = {name: value for name, value in metrics.items() if math.isfinite(value)}
            self._call(lambda tracker: tracker.log(known, step))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Sends what the policy wrote, with its scores."""
        self._call(lambda tracker: tracker.log_samples(samples, step))

    def show(self, text: str) -> None:
        """Prints text of several lines, where `trainer.logger` names the console."""
        if self._shows:
            self._console.progress(text)

    def finish(self) -> None:
        """Ends all trackers; waits a little for those that are behind."""
        self._console.stop()
        for tracker in self._trackers:
            tracker.finish()

    def _call(self, call: Callable[[Tracker], object]) -> None:
        for tracker in self._trackers:
            tracker.calls.put(call)


class TrackerThread(threading.Thread):
    """Makes a tracker with the first of its `calls`, and does them in order until `finish`, or until it raises. (Not
    sooner: a process that a tracker starts while Ray starts would pass for one of the cluster's, and be ended with it.)
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self.calls: SimpleQueue[Callable[[Tracker], object] | None] = SimpleQueue()
        self._of, self._run = name, run
        self.start()

    def run(self) -> None:
        """What the thread does."""
        tracker: Tracker | None = None
        try:
            while (call := self.calls.get()) is not None:
                tracker = tracker or TRACKERS.get_fn(self._of)(self._run)
                call(tracker)
            if tracker is not None:
                tracker.finish()
        except Exception as error:  # the one door to code of others, which may raise anything
            self._warn(f"raises {type(error).__name__}: {error}")

    def finish(self) -> None:
        """Ends the tracker when it has caught up; one that does not in time is left alone."""
        self.calls.put(None)
        self.join(FINISH_TIMEOUT_S)
        if self.is_alive():
            self._warn("does not finish")

    def _warn(self, what: str) -> None:
        again = shlex.join(["python", "-m", "trainer.sync", str(self._run.run_dir), "--to", self._of])
        self._run.console.note(f"tracker {self._of} {what}; it is left out, and afterwards {again} gives it the run")


class Record:
    """Writes metrics.jsonl, a line {"step", "data"} per call. A resumed run appends. A number that is not finite is
    written as null. A full disk costs a warning, not the run."""

    def __init__(self, run_dir: Path, note: Callable[[str], None]) -> None:
        self._path, self._note, self._warned = run_dir / METRICS, note, False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        finite = {x: None if isinstance(y, float) and not math.isfinite(y) else y for x, y in metrics.items()}
        text = json.dumps({"step": step, "data": finite}, default=float) + "\n"
        try:
            with self._path.open("a+b") as file:
                if file.tell():
                    file.seek(-1, 2)
                    text = text if file.read(1) == b"\n" else f"\n{text}"  # the machine went down in a line
                file.write(text.encode())
        except OSError as error:
            if not self._warned:
                self._note(f"cannot write {self._path}: {error}; the run goes on. Make room on that disk")
            self._warned = True


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Metrics by step, in order of steps; several lines of one step are joined. Where a resumed run went back, what was
    written of the steps that it did again, and of later ones, is left out, and so is a line that a crash cut off."""
    steps: dict[int, dict[str, float]] = {}
    for line in filter(None, path.read_bytes().split(b"\n")[:-1] if path.is_file() else []):
        try:
            row = json.loads(line)
            step, found = int(row["step"]), {name: float(x) for name, x in row["data"].items() if x is not None}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
            continue  # the machine went down in this line, or something else damaged it
        while steps and (last := next(reversed(steps))) >= step and (TRAINED in found or last > step):
            steps.popitem()
        steps.setdefault(step, {}).update(found)
    return steps
