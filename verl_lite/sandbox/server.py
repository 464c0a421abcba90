"""The fork server: a small Python process that has imported what solutions usually import, and makes confined copies.

One job at a time: it starts the copies, watches their limits, and tells how they ended. It never sees a byte of
anyone's code: the parent hands it files, which only a copy reads, after it has given up its rights. It ends with its
parent, and its copies end with it. Imports the standard library only.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import gc
import json
import math
import os
import select
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Any

from verl_lite.sandbox import programs
from verl_lite.sandbox.confine import Limits, confine, probe

FILES = ("stdin", "stdout", "stderr", "task", "reply")
"""What is handed over for each process, and where it finds it, from 0 on; 5 is the line of tests to what they test."""

_WATCH_S = 0.1
_GRACE_S = 1.0
_PREFIX = "verl_lite-sandbox-"
_OUT_OF_THE_WAY = 64
_TICKS = os.sysconf("SC_CLK_TCK")


def main(control: int, readable: Sequence[str]) -> None:
    """Serves until the parent closes its end. First message out: what holds on this machine."""
    for name in programs.LIBRARY:
        __import__(name)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # the module `site` would add them
    connection = socket.socket(fileno=control)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        connection.send(json.dumps(vars(probe(folder, readable))).encode())
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    gc.collect()
    gc.freeze()  # copies would copy what the collector touches
    while True:
        body, fds, _, _ = socket.recv_fds(connection, 1 << 16, 2 * len(FILES))
        if not body:
            return
        if fds:  # else a request to stop what has ended by itself
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
        _watch(copies, fds[-1], until, connection)
    finally:
        reports = [copy.end() for copy in copies]
        for fd in fds:
            os.close(fd)
    return reports


def _watch(copies: list[_Copy], reply: int, until: float, connection: socket.socket) -> None:
    """Until the last copy has ended. Who breaks a limit is killed. Clocks start anew when something was told."""
    told = 0
    while not copies[-1].has_ended():
        if signal.sigtimedwait([signal.SIGCHLD], _WATCH_S) is not None:
            continue
        if select.select([connection], [], [], 0)[0]:
            if not connection.recv(1 << 16):  # the parent is gone
                for copy in copies:
                    copy.end()
                sys.exit()
            return
        size = os.fstat(reply).st_size
        for copy in copies:
            if size > told:
                copy.begin_test()
            copy.watch(until)
        told = size


class _Copy:
    """A confined process that runs `program`, started by the constructor. met: the limit for which it was killed."""

    def __init__(self, program: str, files: list[int], limits: Limits, grace_s: float, readable: Sequence[str]) -> None:
        self._limits, self._wall_s, self._printed = limits, limits.wall_s + grace_s, files[1:3]
        self.met, self._report = "", dict[str, Any]()
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
        return bool(self._report) or os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def watch(self, until: float = math.inf) -> None:
        """Kills it if it breaks a limit that the kernel does not see to."""
        cpu_s, threads = self._usage()
        if time.monotonic() > min(self._deadline, until) or cpu_s - self._cpu_before > self._limits.cpu_s:
            self.met = self.met or "time"
        elif threads > self._limits.threads:
            self.met = self.met or "threads"
        elif self._has_printed_too_much():
            self.met = self.met or "output"
        elif _exceeds(self._folder, self._limits.folder_mb << 20):
            self.met = self.met or "files"
        if self.met:
            self._kill()

    def end(self) -> dict[str, Any]:
        """Kills it if it still runs, and removes its folder. Gives how it ended."""
        if not self._report:
            self._kill()  # its group as well, while nobody else can have its number
            _, status, usage = os.wait4(self._pid, 0)
            code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
            if not self.met and code in (-signal.SIGKILL, -signal.SIGXCPU) and cpu_s >= self._limits.cpu_s - 0.5:
                self.met = "time"
            if not self.met and self._has_printed_too_much():
                self.met = "output"
            _remove(self._folder)
            self._report = {"met": self.met, "exit": code}
        return self._report

    def _kill(self) -> None:
        for kill in (os.killpg, os.kill):
            try:
                kill(self._pid, signal.SIGKILL)
            except ProcessLookupError:  # before its setsid there is no such group; afterwards the group has it all
                pass

    def _has_printed_too_much(self) -> bool:
        return any(os.fstat(fd).st_size > self._limits.output_kb << 10 for fd in self._printed)

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
        programs.open_streams()
        confine(limits, folder, readable, is_long=program != "run_script")
        code = getattr(programs, program)(*range(3, len(files))) or 0
    except BaseException:  # the door to untrusted code: it ends here whatever it raises
        traceback.print_exc()
    finally:
        programs.finish(code)


def _exceeds(folder: str, limit: int) -> bool:
    """Whether the files below hold more bytes, or lie deeper than a path can say. A file counts 4 KiB at least, and a
    folder 64: to remove a thousand of them takes seconds."""
    size, folders = 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    size += max(1 << 12, entry.stat(follow_symlinks=False).st_size)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                        size += 1 << 16
                    if size > limit:
                        return True
        except OSError as error:  # it changes under our eyes
            if error.errno == errno.ENAMETOOLONG:
                return True
    return False


def _remove(folder: str) -> None:
    """Removes a folder, however deep it is: by going down into it and up again."""
    os.chdir(folder)
    below: list[str] = []
    while True:
        inner = _first_folder()
        if inner is not None:
            os.chmod(inner, stat.S_IRWXU)
            os.chdir(inner)
            below.append(inner)
        elif below:
            os.chdir("..")
            os.rmdir(below.pop())
        else:
            break
    os.chdir("/")
    os.rmdir(folder)


def _first_folder() -> str | None:
    """A folder in the current one; the files that come before it are removed."""
    with os.scandir() as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            os.unlink(entry.name)
    return None
