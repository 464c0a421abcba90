"""One supervised process as its pool sees it: start it, send calls, take replies, kill it with all that it started, say
what it died of and where its threads were.

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

from workers.pool.channel import CONTROL, Call, Page, PoolEnd, Reply, Running, Start
from workers.pool.child import STACK_SIGNAL

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
        with tempfile.TemporaryFile(buffering=0) as page, theirs:
            page.write(Page.empty(start.threads))
            self._page = Page(page.fileno(), start.threads)
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
        self.is_loaded = False
        self.is_retiring = self.is_alone = is_alone
        self.pinged_at: float | None = None
        self.started_at = self.last_sign_at = time.monotonic()
        self.channel.send(CONTROL, pickle.dumps(start))

    def send(self, call: Call) -> None:
        self.last_sign_at = time.monotonic()
        self.channel.send(call.session, pickle.dumps(call))

    def end(self, session: int) -> None:
        self.channel.send(session, b"")

    def ping(self) -> None:
        self.pinged_at = time.monotonic()
        self.channel.send(CONTROL, b"")

    def receive(self) -> list[Reply]:
        """What it said. Sets channel.is_closed if it is dead."""
        replies = []
        for number, message in self.channel.receive():
            self.last_sign_at = time.monotonic()
            try:
                replies.append(pickle.loads(message))
            except Exception as error:  # objects that untrusted code made up may do anything when they are put together
                reason = f"What it gave cannot be read here: {type(error).__name__}: {error}"
                replies.append(Reply(number, error=reason))
        return replies

    def running(self) -> list[Running]:
        """The calls whose code runs, or ran when the process died."""
        return self._page.running()

    def crashed(self) -> list[int]:
        """Of a dead process: the session in whose thread it crashed, if it left the stack of a crash."""
        crash = _CRASH.search(self._stderr_text())
        return [call.session for call in self.running() if crash and call.thread == int(crash[1], 16)]

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

    def stacks(self) -> dict[int, str]:
        """Where the code of each running session is, inside C code too; asks the process, which writes it to stderr."""
        os.kill(self._process.pid, STACK_SIGNAL)
        patience_s, until = _STACK_TIMEOUT_S, time.monotonic() + _STACK_TIMEOUT_S
        while self.stderr and time.monotonic() < until and wait(self.stderr, patience_s):
            self.read_stderr()
            patience_s = _STACK_PAUSE_S  # it comes in pieces
        text, found = self._stderr_text(), {}
        for call in self.running():
            if stack := re.search(rf"hread 0x0*{call.thread:x} [^\n]*\n((?:  [^\n]*\n?)+)", text):
                found[call.session] = f" It was here (last call first):\n{stack[1]}"
        return found

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
