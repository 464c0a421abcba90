"""A tracker behind a thread and a queue, so that nothing that it does slows or ends the training.

The thread makes the tracker, since even its start may fail or hang; with the first message, when the run's cluster is
up: a process that a tracker starts while Ray starts would pass for one of the cluster's, and be ended with it. What it
does not take, because it raises, hangs or is too slow, goes to the run's spool (`trainer.trackers.spool`), and is
offered again before anything newer; after three failures it is left alone for a while.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence

from trainer.evaluate.sample import Sample
from trainer.trackers.base import TrackedRun, Tracker, TrackerFactory
from trainer.trackers.spool import LastStep, Message, Spool

QUEUE_LENGTH = 200
FINISH_TIMEOUT_S = 15.0
FAILURES_BEFORE_A_PAUSE = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0


class BackgroundTracker:
    """A `Tracker` that never raises and never waits, but for a little in `finish`."""

    def __init__(self, name: str, factory: TrackerFactory, run: TrackedRun) -> None:
        self._name, self._factory, self._run = name, factory, run
        self._spool = Spool(run.run_dir, name)
        self._lacks = len(self._spool) > 0  # from an earlier process of this run
        self._seen = LastStep(run.run_dir, name)
        self._messages: queue.Queue[Message | None] = queue.Queue(QUEUE_LENGTH)
        self._in_hand: Message | None = None
        self._tracker: Tracker | None = None
        self._failures, self._paused_until = 0, 0.0
        self._warned = self._has_told = self._is_abandoned = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._put(Message(step, metrics=dict(metrics)))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self._put(Message(step, samples=list(samples)))

    def finish(self) -> None:
        """Waits a little for a tracker that is behind; what it has not taken by then goes to the spool."""
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        try:
            self._messages.put(None, timeout=FINISH_TIMEOUT_S)
        except queue.Full:
            pass  # it hangs: below that is seen
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._is_abandoned = True
            left = [self._in_hand]
            while not self._messages.empty():
                left.append(self._messages.get_nowait())
            for message in filter(None, left):
                self._keep(message)
            self._warn("does not finish; the run ends without it")
        if lacking := len(self._spool):
            self._run.console.note(
                f"tracker {self._name} lacks {lacking} messages: python -m trainer.sync {self._run.run_dir}"
            )

    # ------------------------------------------------------------------------------------------ the driver's thread

    def _put(self, message: Message) -> None:
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            self._keep(message)
            self._warn(f"is more than {QUEUE_LENGTH} messages behind")

    # ----------------------------------------------------------------------------------------- the tracker's thread

    def _work(self) -> None:
        while (message := self._messages.get()) is not None:
            self._in_hand = message
            taken = self._offer(message)
            if self._is_abandoned:
                return  # `finish` has kept what was in hand
            if not taken:
                self._keep(message)
            self._in_hand = None
        self._end()

    def _offer(self, message: Message) -> bool:
        """Whether the tracker took the message, or need not have it."""
        if not self._is_ready() or (self._lacks and not self._catch_up()):
            return False
        assert self._tracker is not None
        if self._seen.has(message, self._tracker):
            self._tell_of_repetition()
            return True
        try:
            message.send(self._tracker)
        except Exception as error:  # the one door to code of others, which may raise anything and must not stop a run
            self._fail(f"raises {type(error).__name__}: {error}")
            return False
        self._failures = 0
        self._note(message)
        return True

    def _is_ready(self) -> bool:
        """Whether there is a tracker that may be called now; makes it where it did not start yet."""
        if time.monotonic() < self._paused_until:
            return False
        if self._tracker is None:
            try:
                self._tracker = self._factory(self._run)
            except Exception as error:  # as above
                self._fail(f"does not start ({type(error).__name__}: {error})")
                return False
        return True

    def _catch_up(self) -> bool:
        """Offers what the tracker lacks, so that its steps come in order. Whether it may be given more: it took all, or
        refuses a few alone, which then wait for the end."""
        assert self._tracker is not None
        self._lacks = False  # the driver may add to the spool meanwhile
        taken, failure = self._spool.hand_over(self._tracker, self._note)
        if failure is not None and not taken:
            self._lacks = True
            self._fail(f"raises {type(failure).__name__}: {failure}")
            return False
        return True

    def _end(self) -> None:
        """Offers the spool once more, unless the last calls failed, and ends the tracker."""
        if self._tracker is None and not len(self._spool):
            return
        if self._failures >= FAILURES_BEFORE_A_PAUSE or not self._is_ready():
            return
        assert self._tracker is not None
        try:
            self._spool.hand_over(self._tracker, self._note)
            self._tracker.finish()
        except Exception as error:  # as above
            self._fail(f"raises {type(error).__name__}: {error}")

    def _fail(self, what: str) -> None:
        self._failures += 1
        if self._failures >= FAILURES_BEFORE_A_PAUSE:
            pause = FIRST_PAUSE_S * 2 ** min(10, self._failures - FAILURES_BEFORE_A_PAUSE)
            self._paused_until = time.monotonic() + min(LONGEST_PAUSE_S, pause)
        self._warn(what)

    # ----------------------------------------------------------------------------------------------- for both threads

    def _keep(self, message: Message) -> None:
        if self._seen.has(message, self._tracker):
            return
        try:
            self._spool.add(message)
            self._lacks = True
        except OSError as error:
            self._warn(f"did not take a message, and it cannot be kept ({error})")
        self._note(message)

    def _note(self, message: Message) -> None:
        try:
            self._seen.note(message, self._tracker)
        except OSError as error:
            self._warn(f"works, but {error}: after a resumption it may have some steps twice")

    def _tell_of_repetition(self) -> None:
        if not self._has_told:
            self._has_told = True
            self._run.console.note(
                f"tracker {self._name} has the steps up to {self._seen.before} already; it is not given them again"
            )

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._run.console.note(
                f"tracker {self._name} {what}; the run goes on. What it does not take is kept in {self._spool.path}"
            )
