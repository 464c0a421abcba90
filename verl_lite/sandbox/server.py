"""The fork server: a small Python process that has imported what solutions usually import, and makes confined copies.

One job at a time: it starts the copies, watches their limits, and tells how they ended. It never sees a byte of
anyone's code: the parent hands it files, which only a copy reads, after it has given up its rights. It ends with its
parent, and its copies end with it. Imports the standard library only.
"""

import builtins
import contextlib
import fcntl
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Any

from verl_lite.sandbox import programs
from verl_lite.sandbox.confine import Limits, confine

FILES = ("stdin", "stdout", "stderr", "task", "reply")
"""What is handed over for each process, and where it finds it, from 0 on; 5 is the line of tests to what they test."""

_WATCH_S = 0.1
_GRACE_S = 1.0
_PREFIX = "verl_lite-sandbox-"
_LEAST_FILE_BYTES = 1 << 12
_OUT_OF_THE_WAY = 64
_TICKS = os.sysconf("SC_CLK_TCK")


def main(control: int, readable: Sequence[str]) -> None:
    """Serves until the parent closes its end."""
    programs.prepare()
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # the module `site` would add them
    connection = socket.socket(fileno=control)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    gc.collect()
    gc.freeze()  # copies would copy what the collector touches
    while True:
        body, fds, _, _ = socket.recv_fds(connection, 1 << 16, 2 * len(FILES))
        if not body:
            return
        connection.send(json.dumps(_do(json.loads(body), fds, connection, readable)).encode())


def _do(request: dict[str, Any], fds: list[int], connection: socket.socket, readable: Sequence[str]) -> list[Any]:
    """Runs a job, which is over with its last process: {"limits", "total_s", "programs"}, five files for each program.

    Gives {"met": the limit that ended it or "", "exit": its code, minus the signal} for each process.
    """
    limits, until = Limits(**request["limits"]), time.monotonic() + request["total_s"]
    line = socket.socketpair()
    copies: list[_Copy] = []
    try:
        for number, program in enumerate(request["programs"]):
            files = fds[number * len(FILES) : (number + 1) * len(FILES)]
            if len(request["programs"]) > 1:  # functions and tests, with a line between them
                files = [*files[:4], line[0].fileno()] if number == 0 else [*files, line[1].fileno()]
            copies.append(_Copy(program, files, limits, number * _GRACE_S, readable))
        for end in line:
            end.close()
        told = 0
        while not copies[-1].has_ended():
            if signal.sigtimedwait([signal.SIGCHLD], _WATCH_S) is not None:
                continue
            if select.select([connection], [], [], 0)[0]:
                sys.exit()  # the parent is gone
            size = os.fstat(fds[-1]).st_size
            for copy in copies:
                if size > told:  # a test has ended, and the next has its own time
                    copy.begin_test()
                copy.watch(until)
            told = size
    finally:
        reports = [copy.end() for copy in copies]
        for fd in fds:
            os.close(fd)
    return reports


class _Copy:
    """A confined process that runs `program`, started by the constructor. met: the limit for which it was killed."""

    def __init__(self, program: str, files: list[int], limits: Limits, grace_s: float, readable: Sequence[str]) -> None:
        self._limits, self._wall_s, self._printed = limits, limits.wall_s + grace_s, files[1:3]
        self.met = ""
        self._folder = tempfile.mkdtemp(prefix=_PREFIX)
        self._pid = os.fork()
        if self._pid == 0:
            _become(program, files, limits, self._folder, readable)
        self.begin_test()

    def begin_test(self) -> None:
        """The limits of time count from now."""
        self._cpu_before = self._usage()[0]
        self._deadline = time.monotonic() + self._wall_s

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def watch(self, until: float) -> None:
        """Kills it if it breaks a limit that the kernel does not see to."""
        cpu_s, threads = self._usage()
        found = {
            "time": time.monotonic() > min(self._deadline, until) or cpu_s - self._cpu_before > self._limits.cpu_s,
            "threads": threads > self._limits.threads,
            "output": self._has_printed_too_much(),
            "files": self._folder_bytes() > self._limits.folder_mb << 20,
        }
        self.met = self.met or next((limit for limit, is_met in found.items() if is_met), "")
        if self.met:
            self._kill()

    def end(self) -> dict[str, Any]:
        """Kills it if it still runs, and removes its folder. Gives how it ended."""
        self._kill()  # its group as well, while nobody else can have its number
        _, status = os.waitpid(self._pid, 0)
        if not self.met and self._has_printed_too_much():
            self.met = "output"
        shutil.rmtree(self._folder)
        return {"met": self.met, "exit": os.waitstatus_to_exitcode(status)}

    def _kill(self) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):  # before its setsid there is no such group
                kill(self._pid, signal.SIGKILL)

    def _has_printed_too_much(self) -> bool:
        return any(os.fstat(fd).st_size > self._limits.output_kb << 10 for fd in self._printed)

    def _folder_bytes(self) -> int:
        """Of the files in its folder, in which it can make no other; an empty one counts, too."""
        size = 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # it changes under our eyes
                    size += max(_LEAST_FILE_BYTES, entry.stat(follow_symlinks=False).st_size)
        return size

    def _usage(self) -> tuple[float, int]:
        """Seconds of processor time so far, and the number of threads."""
        with open(f"/proc/{self._pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[17])


def _become(program: str, files: list[int], limits: Limits, folder: str, readable: Sequence[str]) -> None:
    """The copy's life. Never returns."""
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for fd in files]
        os.closerange(3, _OUT_OF_THE_WAY)
        for place, fd in enumerate(high):
            os.dup2(fd, place, inheritable=False)
        os.closerange(_OUT_OF_THE_WAY, 4096)
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # type: ignore[misc]
        sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[misc]
        confine(limits, folder, readable)
        code = getattr(programs, program)(*range(3, len(files))) or 0
    except BaseException:  # the door to untrusted code: it ends here whatever it raises
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the file is full, or the code closed or replaced it
                code = code or 1
        os._exit(code)
