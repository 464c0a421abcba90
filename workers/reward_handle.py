"""One reward process as the pool sees it: start it, send samples, ask when it is overdue, kill it, say who was to
blame.

It runs a bare interpreter in a session of its own. What it writes to stderr below Python (the stack of a segmentation
fault) comes through a pipe, of which only the end is kept, so that nothing that it prints can fill memory or disk.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil

from verl_lite.rewards import RewardItem, RewardResult
from workers.reward_process import (
    NO_SAMPLE,
    PROGRESS,
    STACK_SIGNAL,
    Message,
    ProcessOptions,
    Style,
    Ticket,
    write_progress,
)

Outcome = tuple[RewardItem, RewardResult | None]
"""A sample and its result; None: it has to be called again, alone."""

START_TIMEOUT_S = 120.0
_GRACE_S = 5.0
_END_TIMEOUT_S = 1.0
_STACK_TIMEOUT_S = 0.5
_STACK_PAUSE_S = 0.1
_STDERR_TAIL_BYTES = 4000
_STDERR_CHUNK_BYTES = 1 << 16

_tickets: Iterator[Ticket] = itertools.count()


class RewardProcess:
    """A reward process, started by the constructor; it has to be created in a thread that outlives it.

    style: how it takes samples, None until it is ready. in_flight: the samples sent and not yet reported, in order.
    is_retiring: it gets no more samples. pipes: what becomes readable when `receive` or `read_stderr` has something.
    """

    def __init__(self, options: ProcessOptions) -> None:
        self._log_path = options.log_path
        ours, theirs = socket.socketpair()
        self._stderr, stderr = os.pipe()
        os.set_blocking(self._stderr, False)
        path = f"import sys; sys.path[:] = {sys.path!r}"
        with tempfile.TemporaryFile() as page, theirs:
            page.truncate(PROGRESS.size)
            self._progress = mmap.mmap(page.fileno(), PROGRESS.size)
            write_progress(self._progress, NO_SAMPLE)
            run = f"from workers.reward_process import main; main({theirs.fileno()}, {page.fileno()}, {os.getpid()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{path}; {run}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=(theirs.fileno(), page.fileno()),
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        os.close(stderr)
        self._socket = ours
        self.connection = Connection(os.dup(ours.fileno()))
        self.pipes: list[Connection | int] = [self.connection, self._stderr]
        self.style: Style | None = None
        self.in_flight: dict[Ticket, RewardItem] = {}
        self.is_retiring = False
        self._stderr_tail = b""
        self._sent_at = time.monotonic()
        self._sent = 0
        self._killed = False
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

    def memory_mb(self) -> float:
        """Its resident memory in MiB; 0 if it is dead."""
        try:
            return psutil.Process(self._process.pid).memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            return 0.0

    def write_stack(self) -> None:
        """Lets the process write to stderr where it is, which works even if it is inside C code."""
        os.kill(self._process.pid, STACK_SIGNAL)
        patience_s = _STACK_TIMEOUT_S
        until = time.monotonic() + _STACK_TIMEOUT_S
        while self._stderr in self.pipes and time.monotonic() < until and wait([self._stderr], patience_s):
            self.read_stderr()
            patience_s = _STACK_PAUSE_S  # it comes in pieces

    def kill(self) -> None:
        """Ends the process and all that it started."""
        if self._killed:
            return
        self._killed = True
        strays = self._descendants()
        for kill in (lambda: os.killpg(self._process.pid, signal.SIGKILL), *(stray.kill for stray in strays)):
            try:
                kill()
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass
        self._process.wait()
        self._socket.shutdown(socket.SHUT_WR)  # ends a send that blocks; what came in can still be read
        self._outbox.put(None)

    def close(self) -> None:
        """Frees what the pool holds of a killed process."""
        self._writer.join()
        self.connection.close()
        self._socket.close()
        os.close(self._stderr)
        self._progress.close()

    def cause_of_death(self) -> str:
        """What ended a process whose connection is gone; waits a little for its end, then kills it."""
        try:
            code = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection to the pool"
        finally:
            self.kill()
        if code >= 0:
            return f"ended its process with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def read_stderr(self) -> None:
        """Takes what there is of stderr, keeping its end."""
        for _ in range(16):  # not without end: others wait
            try:
                chunk = os.read(self._stderr, _STDERR_CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self.pipes = [self.connection]
                return
            self._stderr_tail = (self._stderr_tail + chunk)[-_STDERR_TAIL_BYTES:]

    def last_words(self) -> str:
        """The end of what the process wrote to stderr below Python."""
        self.read_stderr()
        return "\n" + self._stderr_tail.decode(errors="replace") if self._stderr_tail else ""

    def note(self, text: str) -> None:
        """Adds a line to the log of what its reward function prints."""
        if self._log_path is not None:
            with Path(self._log_path).open("a", encoding="utf-8") as file:
                file.write(f"[{time.strftime('%H:%M:%S')} {text}]\n")

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self.connection.send(message)
            except OSError:
                return  # it is dead, which whoever reads from it sees

    def _descendants(self) -> list[psutil.Process]:
        """What it started in sessions of their own, which the kill of its session does not reach."""
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
