"""The thread to which the reward processes belong: it starts them, feeds them, and kills and replaces them.

It sleeps until a process answers, a sample arrives, or the next deadline passes. A sample whose code hangs, or takes
its process down, is failed; the samples that were in that process with it are sent again.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from multiprocessing.connection import wait

from verl_lite.config import RewardConfig
from verl_lite.rewards import RewardItem, RewardResult
from workers.rewards.handle import START_TIMEOUT_S, Outcome, RewardProcess
from workers.rewards.process import Loaded, NotLoaded, ProcessOptions

_BATCH_SECONDS = 0.05
_BATCH_ITEMS_MAX = 256
_FIRST_GUESS_S = 0.005
_UNEXPLAINED_DEATHS_MAX = 3
_MEMORY_CHECK_S = 0.5
_MEMORY_FACTOR_IN_CALL = 2.0


class Supervisor(threading.Thread):
    """Scores what is queued in a process for each of `options`.

    put: gets results by key. fail: gets the reason why nobody will ever be scored. Both may be called at any time, from
    this thread.
    """

    def __init__(
        self,
        config: RewardConfig,
        options: list[ProcessOptions],
        put: Callable[[list[tuple[Hashable, RewardResult]]], None],
        fail: Callable[[str], None],
    ) -> None:
        super().__init__(name="reward-pool", daemon=True)
        self.processes_replaced = 0
        self._config = config
        self._options = options
        self._put, self._fail = put, fail
        self._queue: deque[RewardItem] = deque()  # its ends are thread-safe
        self._alone: set[Hashable] = set()  # samples of lists that failed as a whole: each is called by itself
        self._processes: list[RewardProcess] = []
        self._rate = RateLimit(config.max_rpm)
        self._seconds_per_item = _FIRST_GUESS_S
        self._unexplained_deaths = 0
        self._closing = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)

    def queue(self, items: list[RewardItem]) -> None:
        """Adds samples, from any thread."""
        self._queue.extend(items)
        self._wake()

    def close(self) -> None:
        """Ends all processes, busy or not, and the thread."""
        self._closing = True
        self._wake()
        self.join()

    def run(self) -> None:
        """The thread's work."""
        try:
            for options in self._options:
                self._processes.append(RewardProcess(options))
            while not self._closing:
                self._wait(self._feed())
        finally:  # also when this thread dies of a defect: nobody may wait for it in vain
            for process in self._processes:
                process.kill()
                process.close()
            self._fail("The reward pool is closed." if self._closing else "The reward pool's thread died.")

    # ---------------------------------------------------------------------------------------------------- feeding

    def _feed(self) -> float:
        """Sends samples to the processes that have room. Returns when the rate limit lets the next one go, by
        `time.monotonic`; infinity if that is not what samples wait for."""
        for process in self._processes:
            room = min(self._room(process), len(self._queue))
            if room <= 0:
                continue
            calls = self._rate.calls_now()
            if not calls:
                return self._rate.next_call
            batch = self._next_batch(room if process.style == "batch" else min(room, calls))
            self._rate.count(1 if process.style == "batch" else len(batch))
            process.send(batch)
        return math.inf

    def _room(self, process: RewardProcess) -> int:
        """Samples that a process may get now, no more than its share of the queue."""
        if process.style is None or process.is_retiring:
            return 0
        share = math.ceil(len(self._queue) / len(self._processes))
        if process.style == "async":
            own = math.ceil(self._config.max_concurrent / len(self._processes)) - len(process.in_flight)
            free = self._config.max_concurrent - sum(len(each.in_flight) for each in self._processes)
            return min(share, own, free)
        if process.in_flight:
            return 0
        if process.style == "batch":
            return min(share, self._config.batch_size)
        if self._config.max_memory_mb is not None:
            return 1  # its memory is looked at after each sample
        return min(share, _BATCH_ITEMS_MAX, max(1, int(_BATCH_SECONDS / self._seconds_per_item)))

    def _next_batch(self, size: int) -> list[RewardItem]:
        batch = [self._queue.popleft()]
        while len(batch) < size and batch[0].key not in self._alone and self._queue[0].key not in self._alone:
            batch.append(self._queue.popleft())
        return batch

    # --------------------------------------------------------------------------------------------------- watching

    def _wait(self, feed_again_at: float) -> None:
        """Sleeps until a process answers or dies, `_wake` is called, or a deadline passes; then deals with it."""
        timeout_s = self._config.timeout_s
        until = min(feed_again_at, *(process.deadline(timeout_s) for process in self._processes))
        sleep_s = max(0.0, until - time.monotonic())
        if any(process.in_flight for process in self._processes):  # who runs meanwhile, and what it holds, may change
            sleep_s = min(sleep_s, timeout_s if self._config.max_memory_mb is None else _MEMORY_CHECK_S)
        pipes = [pipe for process in self._processes for pipe in process.pipes]
        ready = wait([self._wake_reader, *pipes], None if math.isinf(sleep_s) else sleep_s)
        if self._wake_reader in ready:
            self._wake_reader.recv(4096)
        for slot, process in enumerate(self._processes):
            if any(pipe in ready for pipe in process.pipes[1:]):
                process.child.read_stderr()
            if process.connection in ready and not self._receive(process):
                self._replace(slot, process.cause_of_death())
            elif time.monotonic() >= process.deadline(timeout_s):
                self._end_overdue(slot)
            else:
                self._watch_memory(slot)

    def _receive(self, process: RewardProcess) -> bool:
        """Takes one message; False if the process is dead instead."""
        message = process.receive()
        if message is None:
            return False
        if isinstance(message, Loaded):
            process.style = message.style
            self._watch_start(process)
        elif isinstance(message, NotLoaded):
            self._give_up(f"The reward function does not load.\n{message.error}")
        else:
            self._settle(process.take(message.results))
            self._unexplained_deaths = 0
            process.is_retiring |= message.is_spoiled
            if not process.in_flight:
                self._seconds_per_item = (self._seconds_per_item + process.seconds_per_item) / 2
        return True

    def _settle(self, outcomes: list[Outcome]) -> None:
        """Hands results out; a sample without one is sent again, alone."""
        self._put([(item.key, result) for item, result in outcomes if result is not None])
        self._alone.difference_update(item.key for item, result in outcomes if result is not None)
        again = [item for item, result in outcomes if result is None]
        self._alone.update(item.key for item in again)
        self._queue.extendleft(reversed(again))

    def _watch_start(self, process: RewardProcess) -> None:
        limit = self._config.max_memory_mb
        if limit is not None and process.child.memory_mb() > limit:
            self._give_up(
                f"A reward process holds {process.child.memory_mb():.0f} MiB before its first sample, more than "
                f"reward.max_memory_mb={limit}: raise the limit."
            )

    def _watch_memory(self, slot: int) -> None:
        """Retires a process that has grown too large; it is replaced when it has nothing in flight. Kills it at once
        if a single call takes much more than that."""
        process, limit = self._processes[slot], self._config.max_memory_mb
        if process.style is None:
            return
        held = process.child.memory_mb() if limit is not None else 0.0
        if limit is not None and held > limit:
            process.is_retiring = True
            if process.in_flight and held > _MEMORY_FACTOR_IN_CALL * limit:
                process.kill()
                how = f"held {held:.0f} MiB, more than {_MEMORY_FACTOR_IN_CALL:g} times reward.max_memory_mb={limit}"
                return self._replace(slot, how)
        if process.is_retiring and not process.in_flight:
            process.kill()
            self._replace(slot, f"held {held:.0f} MiB" if limit is not None and held > limit else "did not end a call")

    # -------------------------------------------------------------------------------------------------- replacing

    def _end_overdue(self, slot: int) -> None:
        process = self._processes[slot]
        process.child.write_stack()
        if process.connection.poll() or time.monotonic() < process.deadline(self._config.timeout_s):
            return  # it went on in the last instant
        process.kill()
        if process.style is None:
            self._replace(slot, f"took longer than {START_TIMEOUT_S:g} seconds")
        else:
            self._replace(slot, f"took longer than reward.timeout_s={self._config.timeout_s:g} seconds", timed_out=True)

    def _replace(self, slot: int, how: str, *, timed_out: bool = False) -> None:
        """Starts a process in the place of a killed one. The sample whose code ran is failed, the others are sent
        again. Where that is not known, each is sent alone: of a list called as a whole, or after a death between two
        samples, which an earlier one may have brought about."""
        process = self._processes[slot]
        while process.style is not None and process.in_flight and process.connection.poll():
            if not self._receive(process):
                break
        culprits, others = process.blame()
        if len(culprits) > 1:
            self._settle([(item, None) for item in culprits])
        elif culprits:
            error = f"The reward function {how}; its process was replaced.{process.child.last_words()}"
            self._settle([(culprits[0], RewardResult.failure(error, timed_out=timed_out))])
        elif not process.is_retiring:
            self._unexplained_deaths += 1
            if process.style is None or self._unexplained_deaths > _UNEXPLAINED_DEATHS_MAX:
                when = "while it started" if process.style is None else "while it ran no sample"
                self._give_up(f"A reward process {how} {when}.{process.child.last_words()}")
            self._alone.update(item.key for item in others)
        self._queue.extendleft(reversed(others))
        self.processes_replaced += 1
        process.child.note(f"this process was replaced: the reward function {how}")
        if not self._closing:
            process.close()
            self._processes[slot] = RewardProcess(self._options[slot])

    def _give_up(self, reason: str) -> None:
        self._fail(reason)
        self._closing = True

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"w")
        except BlockingIOError:  # thousands of unread wake-ups: it will wake
            pass


class RateLimit:
    """At most `per_minute` calls begin in any minute, evenly spaced; None = no limit. next_call: when the next one may
    begin, by `time.monotonic`."""

    _CATCH_UP_S = 0.1  # a limiter that is asked late makes up for so much

    def __init__(self, per_minute: float | None) -> None:
        self._interval_s = 60.0 / per_minute if per_minute else 0.0
        self.next_call = -math.inf

    def calls_now(self) -> int:
        """How many calls may begin now."""
        if not self._interval_s:
            return _BATCH_ITEMS_MAX
        now = time.monotonic()
        self.next_call = max(self.next_call, now - self._CATCH_UP_S)
        return max(0, 1 + math.floor((now - self.next_call) / self._interval_s))

    def count(self, calls: int) -> None:
        """Notes calls that begin now."""
        self.next_call += calls * self._interval_s
