"""A tracker is given what the run's record says, by a thread that reads it: nothing that a tracker does slows or ends
the training, and what it has not taken stays in the record, for the next try or `python -m trainer.sync RUN`."""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from contextlib import suppress
from pathlib import Path

from trainer.tracking.record import METRICS, SAMPLES, Message, messages
from trainer.tracking.trackers import TrackedRun, Tracker, TrackerFactory

FINISH_TIMEOUT_S = 15.0
TRIES = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0


class Follower:
    """Gives one tracker what the record has and it has not; how far it came is kept in RUN/{tracker}_taken.json."""

    def __init__(self, name: str, factory: TrackerFactory, run: TrackedRun) -> None:
        self._factory, self._run_dir, self._run = factory, run.run_dir, run
        self._tracker: Tracker | None = None
        self._file = taken_file(run.run_dir, name)
        text = self._file.read_text(encoding="utf-8") if self._file.is_file() else "{}"
        self.taken: dict[str, int] = {METRICS: 0, SAMPLES: 0, "step": -1, "at": -1, "tries": 0, "refused": 0}
        self.taken |= json.loads(text)
        self._step_before = self.taken["step"]  # of an earlier process

    def catch_up(self) -> None:
        """Hands over what is new. Raises what the tracker raises; a message that it has raised at in three tries
        is left out, if it takes the one that comes next."""
        for file in (METRICS, SAMPLES):
            failure: Exception | None = None
            for message in messages(self._run_dir / file, self.taken[file]):
                self._tracker = self._tracker or self._factory(self._run)
                try:
                    self._send(message, self._tracker)
                except Exception as error:  # the one door to code of others, which may raise anything
                    if failure is None:
                        tries = self.taken["tries"] + 1 if self.taken["at"] == message.end else 1
                        self.taken |= {"at": message.end, "tries": tries}
                        self._keep()
                        if tries >= TRIES:
                            failure = error
                            continue
                    raise
                self.taken["refused"] += failure is not None
                failure = None
                self.taken |= {file: message.end, "step": max(self.taken["step"], message.step)}
                self._keep()
            if failure is not None:
                raise failure

    def lacking(self) -> int:
        """How many messages it has not taken."""
        return sum(len(messages(self._run_dir / file, self.taken[file])) for file in (METRICS, SAMPLES))

    def finish(self) -> None:
        """Ends the tracker, where it was begun."""
        if self._tracker is not None:
            self._tracker.finish()

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

    def _keep(self) -> None:
        new = self._file.with_suffix(".new")
        with suppress(OSError):  # then it may have some steps twice after a resumption
            new.write_text(json.dumps(self.taken), encoding="utf-8")
            os.replace(new, self._file)


class BackgroundTracker(threading.Thread):
    """A follower in a thread of its own. The tracker is made with the first message, when the run's cluster is up: a
    process that a tracker starts while Ray starts would pass for one of the cluster's, and be ended with it."""

    def __init__(self, name: str, factory: TrackerFactory, run: TrackedRun) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self._of, self._run, self._follower = name, run, Follower(name, factory, run)
        self._news, self._is_ending, self._warned = threading.Event(), False, False
        self.start()

    def wake(self) -> None:
        """Says that there is something new in the record."""
        self._news.set()

    def finish(self) -> None:
        """Waits a little for a tracker that is behind; then the run ends without it."""
        self._is_ending = True
        self._news.set()
        self.join(FINISH_TIMEOUT_S)
        if self.is_alive():
            self._warn("does not finish")
        if lacking := self._follower.lacking():
            again = shlex.join(["python", "-m", "trainer.sync", str(self._run.run_dir)])
            self._run.console.note(f"tracker {self._of} lacks {lacking} messages: {again}")

    def run(self) -> None:
        """What the thread does, until `finish`."""
        failures, paused_until, is_last = 0, 0.0, False
        while not is_last:
            self._news.wait()
            self._news.clear()
            is_last = self._is_ending
            if time.monotonic() < paused_until and not is_last:
                continue
            try:
                self._follower.catch_up()
                failures = 0
                if is_last:
                    self._follower.finish()
                if self._follower.taken["refused"]:
                    self._warn("refuses a message, which it will not get")
            except Exception as error:
                paused_until = time.monotonic() + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(10, failures))
                failures += 1
                self._warn(f"raises {type(error).__name__}: {error}")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._run.console.note(f"tracker {self._of} {what}; the run goes on, and its own record has everything")
        self._warned = True


def taken_file(run_dir: Path, tracker: str) -> Path:
    """Where it is kept how far a tracker came."""
    return run_dir / f"{tracker}_taken.json"
