"""Where the numbers of a run go: the console, the run's own record, dashboards. No tracker stops or slows the training.

metrics.jsonl is always written; `trainer.logger` adds the console's lines and trackers. Each tracker is given what the
record says by a thread of its own, and what it has not taken stays there, for the next try or `python -m trainer.sync
RUN`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.console import Console, following
from trainer.evaluate.sample import Sample
from trainer.tracking.record import METRICS, SAMPLES, Message, Record, messages, read_metrics
from trainer.tracking.trackers import (
    OWN,
    TRACKERS,
    TrackedRun,
    Tracker,
    TrackerFactory,
    check_trackers,
    register_tracker,
)
from verl_lite.config import RunOptions, uncounted

__all__ = ["TRACKERS", "Follower", "TrackedRun", "Tracking", "check_trackers", "read_metrics", "register_tracker"]
FINISH_TIMEOUT_S = 15.0
PAUSE_S = 60.0  # after a failure of a tracker


class Tracking:
    """The record and all trackers of a run as one; a context that ends them, and the console's progress bar, when it is
    left. Inside, what workers print is shown where the console is verbose.

    Raises UserError for a name in `trainer.logger` that is not known, and for one whose package is missing.
    """

    after_first_step: Callable[[], None] | None = None

    def __init__(self, run_dir: Path, config: RunOptions, console: Console) -> None:
        names = list(config.trainer.logger)
        check_trackers(names)
        with uncounted():
            trainer, options = config.trainer, dataclasses.asdict(config)
            name = trainer.experiment_name or Path(run_dir).name
            run = TrackedRun(Path(run_dir), trainer.project_name, name, options, console)
        self.note = console.note
        self._console, self._shows = console, "console" in names
        self._following = following(run.run_dir / "logs", console)
        self._record = Record(run.run_dir, console.note)
        self._trackers = [Follower(name, TRACKERS.get_fn(name), run) for name in names if name not in OWN]

    def __enter__(self) -> Tracking:
        self._following.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()
        self._following.__exit__(None, None, None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends numbers of one step. step: training steps done; 0 = before the first."""
        self._console.advance(step)
        if self._shows:
            self._console.log(metrics, step)
        self._record.log(metrics, step)
        self._wake()
        if step > 0 and (callback := self.after_first_step) is not None:
            self.after_first_step = None
            callback()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Sends what the policy wrote, with its scores."""
        self._record.log_samples(samples, step)
        self._wake()

    def show(self, text: str) -> None:
        """Prints text of several lines, where `trainer.logger` names the console."""
        if self._shows:
            self._console.progress(text)

    def finish(self) -> None:
        """Ends all trackers; waits a little for those that are behind."""
        self._console.stop()
        for tracker in self._trackers:
            if not tracker.finish(FINISH_TIMEOUT_S):
                tracker.warn("does not finish")

    def _wake(self) -> None:
        for tracker in self._trackers:
            tracker.wake()


class Follower(threading.Thread):
    """Gives one tracker what the record has and it has not; how far it came is kept in RUN/{tracker}_taken.json. The
    tracker is made with the first message, when the run's cluster is up: a process that a tracker starts while Ray
    starts would pass for one of the cluster's, and be ended with it."""

    def __init__(self, name: str, factory: TrackerFactory, run: TrackedRun) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self._of, self._factory, self._run = name, factory, run
        self._tracker: Tracker | None = None
        self._file = run.run_dir / f"{name}_taken.json"
        self._taken: dict[str, int] = {METRICS: 0, SAMPLES: 0, "step": -1}
        self._taken |= json.loads(self._file.read_text(encoding="utf-8")) if self._file.is_file() else {}
        self._step_before = self._taken["step"]  # of an earlier process
        self._news, self._is_ending, self._warned = threading.Event(), False, False
        self.start()

    def wake(self) -> None:
        """Says that there is something new in the record."""
        self._news.set()

    def finish(self, patience_s: float) -> bool:
        """Ends the tracker when it has caught up; False for one that did not in that time, and is left alone."""
        self._is_ending = True
        self._news.set()
        self.join(patience_s)
        return not self.is_alive()

    def lacking(self) -> int:
        """How many messages it has not taken."""
        return sum(len(messages(self._run.run_dir / file, self._taken[file])) for file in (METRICS, SAMPLES))

    def run(self) -> None:
        """What the thread does, until `finish`."""
        paused_until, is_last = 0.0, False
        while not is_last:
            self._news.wait()
            self._news.clear()
            is_last = self._is_ending
            if time.monotonic() < paused_until and not is_last:
                continue
            try:
                self._catch_up()
                if is_last and self._tracker is not None:
                    self._tracker.finish()
            except Exception as error:  # the one door to code of others, which may raise anything
                paused_until = time.monotonic() + PAUSE_S
                self.warn(f"raises {type(error).__name__}: {error}")

    def _catch_up(self) -> None:
        for file in (METRICS, SAMPLES):
            for message in messages(self._run.run_dir / file, self._taken[file]):
                self._tracker = self._tracker or self._factory(self._run)
                self._send(message, self._tracker)
                self._taken |= {file: message.end, "step": max(self._taken["step"], message.step)}
                new = self._file.with_suffix(".new")
                with suppress(OSError):  # then it may have some steps twice after a resumption
                    new.write_text(json.dumps(self._taken), encoding="utf-8")
                    os.replace(new, self._file)

    def _send(self, message: Message, tracker: Tracker) -> None:
        is_known = message.step < self._step_before or (
            message.step == self._step_before and message.metrics is not None and message.is_repeatable
        )
        if is_known and not getattr(tracker, "forgets", False):
            return  # one that cannot forget has each step once and in order
        if message.metrics is None:
            tracker.log_samples(message.samples, message.step)
        else:
            tracker.log(message.metrics, message.step)

    def warn(self, what: str) -> None:
        """One warning for each tracker of a run."""
        if not self._warned:
            again = shlex.join(["python", "-m", "trainer.sync", str(self._run.run_dir)])
            self._run.console.note(f"tracker {self._of} {what}; the run goes on, and afterwards {again} sends the rest")
        self._warned = True
