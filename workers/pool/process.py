"""One supervised process, as its pool uses it: start, calls and replies, kill with all descendants, cause of death.

The process is a bare interpreter in its own operating-system session. Its output comes through a pipe; the beginning is
written to a log and the end is kept in memory, so that no amount of output fills memory or disk.
"""

import contextlib
import itertools
import math
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
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from verl_lite.machine.folders import new_folder, remove_folder
from verl_lite.machine.process_tree import ProcessTree
from workers.pool.channel import CONTROL, PoolEnd, Reply
from workers.pool.child_main import STACK_SIGNAL

PRINTED_BYTES_MAX = 10 << 20
"""Number of bytes of a process's output that are written to its log."""
_LAST_LINE = b"\n[more output of this process is dropped]\n"
_MESSAGE_CHARS = 4000
"""Longest output or stack in an error message."""
_END_TIMEOUT_S = 1.0
"""Longest wait for a process that is expected to end."""
_STACK_TIMEOUT_S = 0.5
_STACK_PAUSE_S = 0.05
"""Longest wait for the stacks of a process, and time between two looks at them."""
_STACK_BYTES_MAX = 1 << 20
_CRASH = re.compile(r"(Fatal Python error:[^\n]*\n).*?(Current thread [^\n]*(?:\n[^\n]+)*)", re.DOTALL)
"""The crashed thread in the output of `faulthandler`; empty lines separate it from other threads."""
_REPLY_ATTRIBUTES = {field.name for field in fields(Reply)}


class Process:
    """A supervised process. The constructor starts it; the thread that calls the constructor must outlive the process.

    Args:
        make: pickled function that creates the `Handler` in the process.
        threads: maximum number of calls at the same time.
        log_path: file to which the output of the process is appended; None discards it.
        is_alone: True for a process that runs one call at a time and gets no new sessions; see `process_pool`.
        environment: all environment variables of the process; None = those of this process.

    Attributes:
        channel: the pool's end of the channel.
        sessions: numbers of the sessions in the process.
        sent: sessions with an unanswered call, in the order of the calls, with the time at which the call started. The
            process runs the first `threads` of them, and the others wait in it.
        is_loaded: True when the process accepts calls.
        pinged_at: time of a ping that is not answered yet.
        started_at: time of its start.
    """

    def __init__(
        self,
        make: bytes,
        threads: int,
        log_path: str | None,
        *,
        is_alone: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        output, printed = os.pipe()
        self._folder = new_folder("pool-")
        self._stacks = tempfile.TemporaryFile(buffering=0)
        variables = dict(os.environ if environment is None else environment)
        variables |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._folder)}
        # the pool closes its copies of the process's ends, so that they close when the process ends
        with theirs, open(printed, "wb") as stdout:
            socket_fd = theirs.fileno()
            stacks_fd = self._stacks.fileno()
            self._tree = ProcessTree(
                [sys.executable, "-u", "-c", _program(socket_fd, stacks_fd, threads)],
                variables,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stdout,
                pass_fds=(socket_fd, stacks_fd),
            )
        self.channel = PoolEnd(ours)
        self.log_path = log_path
        self._printed_tail = b""
        self._is_killed = False
        # a process blocks when nobody reads its pipe
        copy_output = partial(self._keep_output, output)
        self._reader = threading.Thread(target=copy_output, name="pool-output", daemon=True)
        self._reader.start()
        self.threads = threads
        self.sessions: set[int] = set()
        self.sent: dict[int, float] = {}
        self.is_loaded = False
        self.is_alone = is_alone
        self.pinged_at: float | None = None
        self.started_at = time.monotonic()
        self.channel.send(CONTROL, make)

    @property
    def pid(self) -> int:
        return self._tree.process.pid

    def send(self, session: int, payload: object) -> None:
        """Sends a call of a session."""
        self.sent[session] = time.monotonic()
        self.channel.send(session, pickle.dumps(payload))

    def begin(self, threads: int) -> None:
        """Starts the deadlines of the calls that were sent while the process started.

        Args:
            threads: Maximum number of calls at the same time, which depends on the style of the handler.
        """
        self.threads = threads
        self.sent = dict.fromkeys(self.sent, time.monotonic())

    def end(self, session: int) -> None:
        """Tells the handler that a session has ended."""
        self.channel.send(session, b"")

    def ping(self) -> None:
        """Asks for the stacks of the running calls. A process whose interpreter is blocked does not answer."""
        self.pinged_at = time.monotonic()
        self.channel.send(CONTROL, b"")

    # Any: what the code in the process has sent
    def receive(self) -> list[Reply[Any]]:
        """Returns the replies that have arrived. Sets channel.is_closed if the process is dead.

        The code of a reward or a program runs in the process and can write to the channel itself. A reply of a session
        without a running call is dropped.
        """
        replies: list[Reply[Any]] = []
        for session, message in self.channel.receive():
            # a report about the process itself belongs to no call
            if session != CONTROL:
                if session not in self.sent:
                    continue
                del self.sent[session]
                self._start_next_deadline()
            replies.append(_unpickled(session, message))
        return replies

    def _start_next_deadline(self) -> None:
        """Starts the deadline of the first call that waited, because a thread of the process is free for it now."""
        sessions = list(self.sent)
        # the ended call is removed already, so that the first waiting one has the last of the `threads` places
        if len(sessions) >= self.threads:
            next_session = sessions[self.threads - 1]
            self.sent[next_session] = time.monotonic()

    def running(self) -> dict[int, float]:
        """Returns the sessions with a running call (in a dead process: at its death) and the start time of the call."""
        return dict(itertools.islice(self.sent.items(), self.threads))

    def crash(self) -> str:
        """Returns the stack that `faulthandler` wrote when the process crashed; empty if it did not crash."""
        crash = _CRASH.search(self._written_stacks())
        if crash is None:
            return ""
        return crash[1] + crash[2]

    def stacks(self) -> str:
        """Returns the stacks of all threads. Sends a signal that the process answers even inside C code."""
        text_before = self._written_stacks()
        text = text_before
        os.kill(self.pid, STACK_SIGNAL)
        until = time.monotonic() + _STACK_TIMEOUT_S
        while time.monotonic() < until:
            time.sleep(_STACK_PAUSE_S)
            previous_text = text
            text = self._written_stacks()
            # the stacks arrive in several pieces; they are complete when no further piece comes
            if text == previous_text and text != text_before:
                break
        return text[-_MESSAGE_CHARS:]

    def last_words(self) -> str:
        """Returns the crash stack of a dead process, or else the end of its output, on lines of their own."""
        text = self.crash()
        if not text:
            text = self._printed_tail.decode(errors="replace")[-_MESSAGE_CHARS:]
        return f"\n{text}" if text else ""

    def note(self, text: str) -> None:
        """Appends a line to the log of the process."""
        if self.log_path is None:
            return
        now = time.strftime("%H:%M:%S")
        with contextlib.suppress(OSError), Path(self.log_path).open("a", encoding="utf-8") as file:
            file.write(f"[{now} {text}]\n")

    def cause_of_death(self) -> str:
        """Returns how the process ended, after waiting shortly for its end. Call `kill` afterwards for its
        descendants."""
        code = self._tree.wait(_END_TIMEOUT_S)
        if code is None:
            return "closed its connection to the pool"
        if code >= 0:
            return f"ended its process with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """Kills the process and all its descendants, including those in other operating-system sessions, and waits for
        its end. Its temporary files are removed. Messages that it sent before can still be received."""
        if self._is_killed:
            return
        self._is_killed = True
        self._tree.end()
        remove_folder(self._folder)
        self._reader.join(_END_TIMEOUT_S)

    def close(self) -> None:
        """Closes the files of a killed process."""
        self.channel.close()
        self._stacks.close()

    def _written_stacks(self) -> str:
        # `pread` leaves the position unchanged, which the process shares and at which it writes
        content = os.pread(self._stacks.fileno(), _STACK_BYTES_MAX, 0)
        return content.decode(errors="replace")

    def _keep_output(self, output: int) -> None:
        """Copies the output to the log, in a thread, up to PRINTED_BYTES_MAX bytes per process.

        Processes that replace each other append to the same log; a log that is too long is overwritten. Output that
        cannot be written, for example to a full disk, is dropped.
        """
        path = self.log_path or os.devnull
        is_long = os.path.exists(path) and os.path.getsize(path) > PRINTED_BYTES_MAX
        mode = "wb" if is_long else "ab"
        bytes_left = PRINTED_BYTES_MAX
        try:
            log_file = open(path, mode, buffering=0)
        except OSError:
            log_file = open(os.devnull, mode, buffering=0)
        with open(output, "rb", buffering=0) as pipe, log_file as log:
            # read to the end also when the log is full: the process would wait for room in the pipe
            while chunk := pipe.read(1 << 16):
                self._printed_tail = (self._printed_tail + chunk)[-_MESSAGE_CHARS:]
                if bytes_left <= 0:
                    continue
                bytes_left -= len(chunk)
                text = chunk if bytes_left > 0 else _LAST_LINE
                with contextlib.suppress(OSError):
                    # somebody deleted the run folder
                    if not os.path.exists(path):
                        _reopen(log.fileno(), path)
                    log.write(text)


def _reopen(file_descriptor: int, path: str) -> None:
    """Lets an open file write to a new file at its path, whose folder is created."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "ab") as new_file:
        os.dup2(new_file.fileno(), file_descriptor, inheritable=False)


def _program(socket_fd: int, stacks_fd: int, threads: int) -> str:
    """Returns the code of a supervised process. For the arguments see `child_main.main`."""
    arguments = f"{socket_fd}, {stacks_fd}, {os.getpid()}, {threads}"
    # with the caller's path, so that the process finds the same modules
    return f"import sys; sys.path[:] = {sys.path!r}; from workers.pool.child_main import main; main({arguments})"


# Any: what the code in the process has sent
def _unpickled(session: int, message: bytes) -> Reply[Any]:
    """Returns the reply of a session in a message; a reply with an error if the message holds something else."""
    try:
        reply = pickle.loads(message)
    except (Exception, SystemExit) as error:
        # unpickling objects of untrusted code can raise anything
        return Reply(session, error=f"The returned value cannot be unpickled: {type(error).__name__}: {error}")
    # a message that untrusted code has written itself, such as a reply in the name of another session
    if not _is_reply(reply, session):
        return Reply(session, error="The process has sent a message that is no reply of this call.")
    return reply


def _is_reply(message: object, session: int) -> TypeGuard[Reply[Any]]:
    """Returns True for a reply of a session whose attributes have the right types; its value may be anything."""
    # exactly this class, because a subclass can compute its attributes
    if type(message) is not Reply:
        return False
    attributes = vars(message)
    if attributes.keys() != _REPLY_ATTRIBUTES:
        return False
    error = attributes["error"]
    has_error_type = error is None or type(error) is str
    if not has_error_type or type(attributes["is_timeout"]) is not bool or type(attributes["seconds"]) is not float:
        return False
    is_own = type(attributes["session"]) is int and attributes["session"] == session
    return is_own and math.isfinite(attributes["seconds"])
