"""One supervised process as its pool sees it: start it, send calls, take replies, kill it with all that it started, say
what it died of and who may have done it.

It runs a bare interpreter in a session of its own. What it writes to stderr below Python (the stack of a segmentation
fault) comes through a pipe, of which only the end is kept, so that nothing that it prints can fill memory or disk.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from workers.pool.channel import CONTROL, Call, Control, PoolEnd, Reply, Start
from workers.pool.child import STACK_SIGNAL, Page, Running
from workers.pool.runners import NOBODY

_END_TIMEOUT_S = 1.0
_STACK_TIMEOUT_S = 0.5
_STACK_PAUSE_S = 0.1
_STDERR_TAIL_BYTES = 1 << 16
_STDERR_SHOWN_CHARS = 4000
_CRASH = re.compile(r"Fatal Python error:[^\n]*\s+Current thread (0x[0-9a-f]+)[^\n]*(?:\n[^\n]+)*")
"""As `faulthandler` tells it; other threads follow after an empty line."""


class Process:
    """A process, started by the constructor, in a thread that has to outlive it.

    sessions: those that live there. is_loaded: it takes calls. is_retiring: it gets no new sessions. is_alone: it has
    one call under way at most. pinged_at: when it was asked for a sign of life that has not come.
    """

    def __init__(self, start: Start, *, is_alone: bool = False) -> None:
        ours, theirs = socket.socketpair()
        self._stderr, stderr = os.pipe()
        os.set_blocking(self._stderr, False)
        with tempfile.TemporaryFile() as page, theirs:
            page.truncate(Page.size(start.threads))
            self._page = Page(page.fileno(), start.threads)
            self._page.clear(start.threads)
            arguments = f"{theirs.fileno()}, {page.fileno()}, {start.threads}, {os.getpid()}"
            code = f"import sys; sys.path[:] = {sys.path!r}; from workers.pool.child import main; main({arguments})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=(theirs.fileno(), page.fileno()),
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        os.close(stderr)
        self.channel = PoolEnd(ours)
        self.log_path = start.log_path
        self.stderr = [self._stderr]
        self._stderr_tail, self._is_killed = b"", False
        self.sessions: set[int] = set()
        self.is_loaded = self.is_retiring = False
        self.is_alone = is_alone
        self.pinged_at: float | None = None
        self.started_at = self.last_sign_at = time.monotonic()
        self.channel.send(CONTROL, pickle.dumps(start))

    # ------------------------------------------------------------------------------------------------ calls, replies

    def send(self, call: Call) -> None:
        self.last_sign_at = time.monotonic()
        self.channel.send(call.session, pickle.dumps(call))

    def end(self, session: int) -> None:
        self.channel.send(session, b"")

    def ping(self) -> None:
        self.pinged_at = time.monotonic()
        self.channel.send(CONTROL, b"")

    def receive(self) -> list[Reply | Control]:
        """What it said. Sets channel.is_closed if it is dead."""
        messages: list[Reply | Control] = []
        for number, packed in self.channel.receive():
            self.last_sign_at = time.monotonic()
            try:
                messages.append(pickle.loads(packed))
            except Exception as error:  # objects that untrusted code made up may do anything when they are put together
                reason = f"What it gave cannot be read here: {type(error).__name__}: {error}"
                messages.append(Reply(number, error=reason))
        return messages

    # ------------------------------------------------------------------------------------------------------ watching

    def running(self) -> list[Running]:
        """The calls whose code runs, of sessions that live here."""
        return [call for call in self._page.running() if call.session in self.sessions]

    def candidates(self) -> tuple[list[int], bool]:
        """Of a dead process: the sessions that may have done it, and whether that is certain."""
        if self._page.culprit != NOBODY:
            return [self._page.culprit], True
        running = self.running()
        crash = _CRASH.search(self._stderr_text())
        crashed = [call.session for call in running if crash and call.thread == int(crash.group(1), 16)]
        return (crashed, True) if crashed else ([call.session for call in running], False)

    def memory_mb(self) -> float:
        """Its resident memory in MiB; 0 if it is dead."""
        try:
            return psutil.Process(self._process.pid).memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            return 0.0

    def read_stderr(self) -> None:
        """Takes what there is of stderr, keeping its end."""
        for _ in range(16):  # not without end: others wait
            try:
                chunk = os.read(self._stderr, 1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                self.stderr = []
                return
            self._stderr_tail = (self._stderr_tail + chunk)[-_STDERR_TAIL_BYTES:]

    def write_stack(self) -> None:
        """Lets the process write to stderr where it is, which works even if it is inside C code."""
        os.kill(self._process.pid, STACK_SIGNAL)
        patience_s, until = _STACK_TIMEOUT_S, time.monotonic() + _STACK_TIMEOUT_S
        while self.stderr and time.monotonic() < until and wait(self.stderr, patience_s):
            self.read_stderr()
            patience_s = _STACK_PAUSE_S  # it comes in pieces

    def stderr_tail(self) -> str:
        """The end of what the process wrote to stderr below Python; of a crash, the stack of its thread."""
        text = self._stderr_text()
        crash = _CRASH.search(text)
        shown = crash.group() if crash else text[-_STDERR_SHOWN_CHARS:]
        return f"\n{shown}" if shown else ""

    def note(self, text: str) -> None:
        """Adds a line to the log of what its untrusted code prints."""
        if self.log_path is not None:
            with contextlib.suppress(OSError), Path(self.log_path).open("a", encoding="utf-8") as file:
                file.write(f"[{time.strftime('%H:%M:%S')} {text}]\n")

    # ------------------------------------------------------------------------------------------------------- the end

    def cause_of_death(self) -> str:
        """What ended it; waits a little for its end. Kill it afterwards: what it started may live on."""
        try:
            code = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection to the pool"
        if code >= 0:
            return f"ended its process with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """Ends the process and all that it started, also in sessions of their own, and waits for its end. What it has
        said can still be received."""
        if self._is_killed:
            return
        self._is_killed = True
        try:
            strays = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            strays = []
        for kill in (lambda: os.killpg(self._process.pid, signal.SIGKILL), *(stray.kill for stray in strays)):
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                kill()
        self._process.wait()

    def close(self) -> None:
        """Frees what the pool holds of a killed process."""
        self.channel.close()
        self._page.close()
        os.close(self._stderr)
        self.stderr = []

    def _stderr_text(self) -> str:
        self.read_stderr()
        return self._stderr_tail.decode(errors="replace")
