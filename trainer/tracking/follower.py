"""A tracker is given what the run's record says, by a thread that reads it: nothing that a tracker does slows or ends
the training, and what it has not taken stays in the record, for the next try or `python -m trainer.sync RUN`."""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from contextlib import suppress

from trainer.tracking.record import METRICS, SAMPLES, Message, messages
from trainer.tracking.trackers import TrackedRun, Tracker, TrackerFactory

PAUSE_S = 60.0  # after a failure


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
