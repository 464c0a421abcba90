"""One supervised process as its pool sees it: start it, send calls, take replies, kill it with all that it started, say
what it died of and where its threads were.

It runs a bare interpreter in a session of its own. What it prints comes through a pipe, of which the beginning goes to
a log and the end is kept, so that nothing that it prints can fill memory or disk.
"""

import contextlib
import itertools
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from workers.pool.channel import CONTROL, PoolEnd, Reply
from workers.pool.child_main import STACK_SIGNAL

PRINTED_BYTES_MAX = 10 << 20
_LAST_LINE = b"\n[more output of this process is dropped]\n"
_SHOWN_CHARS = 4000
_END_TIMEOUT_S = 1.0
_STACK_TIMEOUT_S = 0.5
_STACK_PAUSE_S = 0.05
_STACK_BYTES_MAX = 1 << 20
_CRASH = re.compile(r"(Fatal Python error:[^\n]*\n).*?(Current thread [^\n]*(?:\n[^\n]+)*)", re.DOTALL)
"""As `faulthandler` tells it: other threads stand before and after, between empty lines."""


class Process:
    """A process, started by the constructor, in a thread that has to outlive it.

    make: pickled; called there, it gives the `Handler`. threads: it runs so many calls at once, at most. sessions:
    those that live there. sent: sessions with a call under way, in order, and when its turn came. is_loaded: it takes
    calls. is_alone: it has one call under way at most, and gets no new sessions. pinged_at: when it was
    asked for a sign of life that has not come.
    """

    def __init__(self, make: bytes, threads: int, log_path: str | None, *, is_alone: bool = False) -> None:
        ours, theirs = socket.socketpair()
        output, printed = os.pipe()
        self._stacks = tempfile.TemporaryFile(buffering=0)
        with theirs, open(printed, "wb") as stdout:
            fds = theirs.fileno(), self._stacks.fileno()
            arguments = ", ".join(map(str, (*fds, os.getpid(), threads)))
            start = f"from workers.pool.child_main import main; main({arguments})"
            code = f"import sys; sys.path[:] = {sys.path!r}; {start}"
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stdout,
                pass_fds=fds,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.channel = PoolEnd(ours)
        self.log_path = log_path
        self._printed_tail, self._is_killed = b"", False
        self._reader = threading.Thread(target=self._keep_output, args=(output,), name="pool-output", daemon=True)
        self._reader.start()
        self.threads = threads
        self.sessions: set[int] = set()
        self.sent: dict[int, float] = {}
        self.is_loaded = False
        self.is_alone = is_alone
        self.pinged_at: float | None = None
        self.started_at = time.monotonic()
        self.channel.send(CONTROL, make)

    def send(self, session: int, payload: Any) -> None:
        self.sent[session] = time.monotonic()
        self.channel.send(session, pickle.dumps(payload))

    def begin(self, threads: int) -> None:
        """It has started: what was sent begins now."""
        self.threads, self.sent = threads, dict.fromkeys(self.sent, time.monotonic())

    def end(self, session: int) -> None:
        self.channel.send(session, b"")

    def ping(self) -> None:
        self.pinged_at = time.monotonic()
        self.channel.send(CONTROL, b"")

    def receive(self) -> list[Reply]:
        """What it said. Sets channel.is_closed if it is dead."""
        replies = []
        for number, message in self.channel.receive():
            if number != CONTROL:
                if self.sent.pop(number, None) is None:
                    continue  # untrusted code may write, too
                for session in itertools.islice(self.sent, self.threads - 1, self.threads):  # its turn comes
                    self.sent[session] = time.monotonic()
            try:
                replies.append(pickle.loads(message))
            except Exception as error:  # objects that untrusted code made up may do anything when they are put together
                reason = f"What it gave cannot be read here: {type(error).__name__}: {error}"
                replies.append(Reply(number, error=reason))
        return replies

    def running(self) -> dict[int, float]:
        """The sessions whose code runs, or ran when the process died, and since when."""
        return dict(itertools.islice(self.sent.items(), self.threads))

    def crash(self) -> str:
        """Of a dead process: the stack of its crash, if it left one."""
        found = _CRASH.search(self._written_stacks())
        return found[1] + found[2] if found else ""

    def stacks(self) -> str:
        """Where its threads are, inside C code too: it writes that down whatever it is doing."""
        before = text = self._written_stacks()
        os.kill(self._process.pid, STACK_SIGNAL)
        until = time.monotonic() + _STACK_TIMEOUT_S
        while time.monotonic() < until:
            time.sleep(_STACK_PAUSE_S)
            last, text = text, self._written_stacks()
            if last == text != before:  # it comes in pieces
                break
        return text[-_SHOWN_CHARS:]

    def last_words(self) -> str:
        """Of a dead process: the stack of its crash, or else the end of what it printed."""
        shown = self.crash() or self._printed_tail.decode(errors="replace")[-_SHOWN_CHARS:]
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
        strays = []
        with contextlib.suppress(psutil.NoSuchProcess):
            strays = psutil.Process(self._process.pid).children(recursive=True)
        for kill in (lambda: os.killpg(self._process.pid, signal.SIGKILL), *(stray.kill for stray in strays)):
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                kill()
        self._process.wait()
        self._reader.join(_END_TIMEOUT_S)

    def close(self) -> None:
        """Frees what the pool holds of a killed process."""
        self.channel.close()
        self._stacks.close()

    def _written_stacks(self) -> str:
        return os.pread(self._stacks.fileno(), _STACK_BYTES_MAX, 0).decode(errors="replace")

    def _keep_output(self, output: int) -> None:
        """Runs in a thread: up to a number of bytes go to the log, which the processes that replace one another write
        to and which is begun anew when it is longer than that. A disk that is full drops what is printed."""
        path, left = self.log_path or os.devnull, PRINTED_BYTES_MAX
        is_long = os.path.exists(path) and os.path.getsize(path) > PRINTED_BYTES_MAX
        with open(output, "rb", buffering=0) as pipe, open(path, "wb" if is_long else "ab", buffering=0) as log:
            while chunk := pipe.read(1 << 16):
                self._printed_tail = (self._printed_tail + chunk)[-_SHOWN_CHARS:]
                if left > 0:
                    left -= len(chunk)
                    with contextlib.suppress(OSError):
                        if not os.path.exists(path):  # somebody deleted the run folder
                            os.makedirs(os.path.dirname(path), exist_ok=True)
                            with open(path, "ab") as again:
                                os.dup2(again.fileno(), log.fileno(), inheritable=False)
                        log.write(chunk if left > 0 else _LAST_LINE)
