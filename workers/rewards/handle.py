"""One reward process as the pool sees it: start it, send samples, ask when it is overdue, kill it, say who was to
blame.

How it is started and ended, and where its last words go: `workers.children.process`.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from verl_lite.rewards import RewardItem, RewardResult, Style
from workers.children.process import ChildProcess
from workers.rewards.process import (
    NO_SAMPLE,
    PROGRESS,
    Message,
    ProcessOptions,
    Ticket,
    write_progress,
)

Outcome = tuple[RewardItem, RewardResult | None]
"""A sample and its result; None: it has to be called again, alone."""

START_TIMEOUT_S = 120.0
_GRACE_S = 5.0

_tickets: Iterator[Ticket] = itertools.count()


class RewardProcess:
    """A reward process, started by the constructor; it has to be created in a thread that outlives it.

    style: how it takes samples, None until it is ready. in_flight: the samples sent and not yet reported, in order.
    is_retiring: it gets no more samples. child: the process itself.
    """

    def __init__(self, options: ProcessOptions) -> None:
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as page, theirs:
            page.truncate(PROGRESS.size)
            self._progress = mmap.mmap(page.fileno(), PROGRESS.size)
            write_progress(self._progress, NO_SAMPLE)
            run = f"from workers.rewards.process import main; main({theirs.fileno()}, {page.fileno()}, {os.getpid()})"
            pass_fds = (theirs.fileno(), page.fileno())
            self.child = ChildProcess(run, pass_fds=pass_fds, log_path=options.log_path)
        self._socket = ours
        self.connection = Connection(os.dup(ours.fileno()))
        self.style: Style | None = None
        self.in_flight: dict[Ticket, RewardItem] = {}
        self.is_retiring = False
        self._sent_at = time.monotonic()
        self._sent = 0
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="reward-outbox", daemon=True)
        self._writer.start()
        self._outbox.put(options)

    def send(self, batch: Sequence[RewardItem]) -> None:
        """Sends samples. Never blocks: a process that reads nothing must not hold up those that watch over it."""
        numbered = list(zip(_tickets, batch, strict=False))
        if self.style != "async":  # an async process may be running other samples, and writes the page itself
            write_progress(self._progress, NO_SAMPLE)
        self._sent_at, self._sent = time.monotonic(), len(numbered)
        self.in_flight.update(numbered)
        self._outbox.put(numbered)

    def receive(self) -> Message | None:
        """The next message; None if the process is dead instead. Blocks until there is one."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def take(self, results: Sequence[tuple[Ticket, RewardResult | None]]) -> list[Outcome]:
        """Results that came in, with their samples, which are in flight no more."""
        return [(self.in_flight.pop(ticket), result) for ticket, result in results]

    @property
    def pipes(self) -> list[Connection | int]:
        """What becomes readable when there is something to `receive`, or for `child.read_stderr`."""
        return [self.connection, *self.child.stderr]

    @property
    def seconds_per_item(self) -> float:
        """Of the samples sent last, if all of them are reported by now."""
        return max(1e-6, (time.monotonic() - self._sent_at) / max(1, self._sent))

    def deadline(self, timeout_s: float) -> float:
        """When it has to be killed, by `time.monotonic`; infinity if it has nothing to do.

        While the code of a sample runs, that is `timeout_s` after it began. While none does (all calls await something,
        or samples are on their way) something has to happen within `timeout_s` and a grace: an event loop reports
        overdue calls by itself.
        """
        if self.style is None:
            return self._sent_at + START_TIMEOUT_S
        if not self.in_flight:
            return math.inf
        started, ticket = PROGRESS.unpack_from(self._progress)
        return started + timeout_s if ticket != NO_SAMPLE else max(started, self._sent_at) + timeout_s + _GRACE_S

    def blame(self) -> tuple[list[RewardItem], list[RewardItem]]:
        """Of a dead process: the samples that may have killed it, and the others without a result. That is the sample
        whose code ran, the whole list if it was called with one, or the only one that it had."""
        _, running = PROGRESS.unpack_from(self._progress)
        if (self.style == "batch" and running in self.in_flight) or (len(self.in_flight) == 1 and not self.is_retiring):
            return list(self.in_flight.values()), []
        culprits = [item for ticket, item in self.in_flight.items() if ticket == running]
        return culprits, [item for ticket, item in self.in_flight.items() if ticket != running]

    def kill(self) -> None:
        """Ends the process and all that it started."""
        if self.child.is_killed:
            return
        self.child.kill()
        self._socket.shutdown(socket.SHUT_WR)  # ends a send that blocks; what came in can still be read
        self._outbox.put(None)

    def close(self) -> None:
        """Frees what the pool holds of a killed process."""
        self._writer.join()
        self.connection.close()
        self._socket.close()
        self.child.close()
        self._progress.close()

    def cause_of_death(self) -> str:
        """What ended a process whose connection is gone; waits a little for its end, then kills it."""
        cause = self.child.cause_of_death("closed its connection to the pool")
        self.kill()
        return cause

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self.connection.send(message)
            except OSError:
                return  # it is dead, which whoever reads from it sees
