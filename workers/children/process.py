"""One supervised process as its owner sees it: start it, ask for its memory or its stack, kill it with all that it
started, say what it died of.

It runs a bare interpreter in a session of its own. What it writes to stderr below Python (the stack of a segmentation
fault) comes through a pipe, of which only the end is kept, so that nothing that it prints can fill memory or disk.
What it does about itself is in `workers.children.inside`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from workers.children.inside import STACK_SIGNAL

_END_TIMEOUT_S = 1.0
_STACK_TIMEOUT_S = 0.5
_STACK_PAUSE_S = 0.1
_STDERR_TAIL_BYTES = 1 << 16
_STDERR_SHOWN_CHARS = 4000
_STDERR_CHUNK_BYTES = 1 << 16
_CRASH = re.compile(r"Fatal Python error:[^\n]*\s+Current thread (0x[0-9a-f]+)[^\n]*(?:\n[^\n]+)*")
"""As `faulthandler` tells it; other threads follow after an empty line."""


class ChildProcess:
    """A process that runs the Python statement `run`; it has to be created in a thread that outlives it.

    pass_fds: file descriptors that it inherits under the same numbers. log_path: where `note` writes. stderr: the end
    of a pipe, to wait for, as a list: empty when the process has closed its own end.
    """

    def __init__(self, run: str, *, pass_fds: Sequence[int], log_path: str | None) -> None:
        self._log_path = log_path
        self._stderr, stderr = os.pipe()
        os.set_blocking(self._stderr, False)
        path = f"import sys; sys.path[:] = {sys.path!r}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{path}; {run}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        os.close(stderr)
        self.stderr = [self._stderr]
        self.is_killed = False
        self._stderr_tail = b""

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
        while self.stderr and time.monotonic() < until and wait(self.stderr, patience_s):
            self.read_stderr()
            patience_s = _STACK_PAUSE_S  # it comes in pieces

    def kill(self) -> None:
        """Ends the process and all that it started, and waits for its end. A second call does nothing."""
        if self.is_killed:
            return
        self.is_killed = True
        strays = self._descendants()
        for kill in (lambda: os.killpg(self._process.pid, signal.SIGKILL), *(stray.kill for stray in strays)):
            try:
                kill()
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass
        self._process.wait()

    def close(self) -> None:
        """Frees the pipe of a killed process."""
        os.close(self._stderr)
        self.stderr = []

    def cause_of_death(self, otherwise: str) -> str:
        """What ended it; waits a little for its end. `otherwise` if it has not ended, though it seemed so. Kill it
        afterwards: what it started may live on."""
        try:
            code = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return otherwise
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
                self.stderr = []
                return
            self._stderr_tail = (self._stderr_tail + chunk)[-_STDERR_TAIL_BYTES:]

    def last_words(self) -> str:
        """The end of what the process wrote to stderr below Python; of a crash, the stack of its thread."""
        text = self._stderr_text()
        crash = _CRASH.search(text)
        shown = crash.group() if crash else text[-_STDERR_SHOWN_CHARS:]
        return f"\n{shown}" if shown else ""

    def crashed_thread(self) -> int | None:
        """Its `threading.get_ident()`, if the process told which thread crashed."""
        crash = _CRASH.search(self._stderr_text())
        return int(crash.group(1), 16) if crash else None

    def note(self, text: str) -> None:
        """Adds a line to the log of what its untrusted code prints."""
        if self._log_path is not None:
            with Path(self._log_path).open("a", encoding="utf-8") as file:
                file.write(f"[{time.strftime('%H:%M:%S')} {text}]\n")

    def _stderr_text(self) -> str:
        self.read_stderr()
        return self._stderr_tail.decode(errors="replace")

    def _descendants(self) -> list[psutil.Process]:
        """What it started in sessions of their own, which the kill of its session does not reach."""
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
