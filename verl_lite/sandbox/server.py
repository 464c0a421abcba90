"""The fork server: a small Python process with the usual imports of programs, which forks confined processes.

It runs one job at a time: it forks the job's processes, enforces their limits and reports how they ended. It never
reads untrusted code; the parent passes files, which only a forked process reads, after it has dropped its rights. The
server exits with its parent, and its processes exit with the server. Imports only the standard library.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import functools
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence

from verl_lite.machine.folders import new_folder
from verl_lite.machine.process_tree import ForkedProcess
from verl_lite.sandbox import programs
from verl_lite.sandbox.confine import Limits, confine
from verl_lite.sandbox.values import JobRequest, ProcessReport

FILES = ("stdin", "stdout", "stderr", "task", "reply")
"""Files of each process, which become its descriptors 0 to 4. Descriptor 5 connects tests to the tested code."""

_WATCH_S = 0.1
_GRACE_S = 1.0
"""Additional wall-clock time of the tests: if both processes wait, the tested code reaches its limit first."""
_PREFIX = "verl_lite-sandbox-"
_LEAST_FILE_BYTES = 1 << 12
_FIRST_SPARE_FD = 64
_TICKS = os.sysconf("SC_CLK_TCK")


def main(control: int, readable: Sequence[str]) -> None:
    """Serves jobs until the parent closes its end of the connection."""
    programs.prepare()
    # usually added by the module `site`
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    connection = socket.socket(fileno=control)
    # so that `_run_job` can wait for it
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    gc.collect()
    # otherwise the collector would touch, and so copy, the memory shared with forked processes
    gc.freeze()
    while True:
        body, fds, _, _ = socket.recv_fds(connection, 1 << 16, 2 * len(FILES))
        if not body:
            return
        reports = _run_job(json.loads(body), fds, connection, readable)
        connection.send(json.dumps(reports).encode())


def _run_job(
    request: JobRequest, fds: list[int], connection: socket.socket, readable: Sequence[str]
) -> list[ProcessReport]:
    """Runs a job until its last process ends, then kills its other processes.

    Args:
        request: the programs, one or two, and their limits.
        fds: the `FILES` of each program.
        connection: the connection to the parent.
        readable: folders from which programs may import.

    Returns:
        One report per program.
    """
    limits = Limits(**request["limits"])
    deadline = time.monotonic() + request["total_s"]
    names = request["programs"]
    end_of_code, end_of_tests = socket.socketpair()
    processes: list[_Process] = []
    try:
        for number, program in enumerate(names):
            first = number * len(FILES)
            files = fds[first : first + len(FILES)]
            has_connection = len(names) > 1
            # the tested functions reply to the tests instead of the parent
            if has_connection and number == 0:
                files[-1] = end_of_code.fileno()
            elif has_connection:
                files.append(end_of_tests.fileno())
            # none for the first program
            grace_s = number * _GRACE_S
            processes.append(_Process(program, files, limits, grace_s, readable))
        # now only the processes hold them, so that each notices the end of the other
        end_of_code.close()
        end_of_tests.close()

        reply_of_last = fds[-1]
        _watch(processes, reply_of_last, connection, deadline)
    finally:
        # the functions may still run when the tests have ended
        reports = [process.end() for process in processes]
        for fd in fds:
            os.close(fd)
    return reports


def _watch(processes: Sequence[_Process], reply: int, connection: socket.socket, deadline: float) -> None:
    """Enforces the limits of a job's processes until the last one ends.

    Args:
        processes: the processes.
        reply: the file in which the last process reports each test that ends.
        connection: the connection to the parent.
        deadline: time at which the job ends.
    """
    reply_size = 0
    while not processes[-1].has_ended():
        # a process has ended: look at once whether it is the last one
        if signal.sigtimedwait([signal.SIGCHLD], _WATCH_S) is not None:
            continue
        # the parent sends nothing during a job: a connection that can be read is closed, and the parent has exited
        if select.select([connection], [], [], 0)[0]:
            sys.exit()
        size = os.fstat(reply).st_size
        for process in processes:
            # a test has ended; the limits of time restart for the next test
            if size > reply_size:
                process.begin_test()
            process.watch(deadline)
        reply_size = size


class _Process:
    """A confined process that runs `program`, started by the constructor.

    Attributes:
        met: the exceeded limit, or "".
    """

    def __init__(self, program: str, files: list[int], limits: Limits, grace_s: float, readable: Sequence[str]) -> None:
        self.met = ""
        self._limits = limits
        self._wall_s = limits.wall_s + grace_s
        _, stdout, stderr, *_ = files
        self._output_files = (stdout, stderr)
        self._folder = str(new_folder(_PREFIX))
        run = functools.partial(_run_confined, program, files, limits, self._folder, readable)
        self._process = ForkedProcess(run)
        self.begin_test()

    def begin_test(self) -> None:
        """Restarts the limits of wall time and processor time."""
        self._cpu_before, _ = self._usage()
        self._deadline = time.monotonic() + self._wall_s

    def has_ended(self) -> bool:
        return self._process.has_exited()

    def watch(self, deadline: float) -> None:
        """Kills the process if it exceeds a limit that the kernel does not enforce."""
        self.met = self.met or self._exceeded_limit(deadline)
        if self.met:
            self._kill()

    def _exceeded_limit(self, deadline: float) -> str:
        """Returns the name of the first limit that is exceeded, or an empty string."""
        cpu_s, threads = self._usage()
        is_late = time.monotonic() > min(self._deadline, deadline)
        if is_late or cpu_s - self._cpu_before > self._limits.cpu_s:
            return "time"
        if threads > self._limits.threads:
            return "threads"
        if self._has_printed_too_much():
            return "output"
        if self._folder_bytes() > self._limits.folder_mb << 20:
            return "files"
        return ""

    def end(self) -> ProcessReport:
        """Kills the process if it still runs, removes its folder and reports how the process ended."""
        # and its group, before the kernel can reuse its number
        self._kill()
        exit_code = self._process.wait()
        if not self.met and self._has_printed_too_much():
            self.met = "output"
        # the machine may have removed it, with other old entries of /tmp
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._folder)
        return {"met": self.met, "exit": exit_code}

    def _kill(self) -> None:
        # where `confine` filters system calls, the process cannot have left its group or have forked
        self._process.kill()

    def _has_printed_too_much(self) -> bool:
        # the kernel limits each file only to `file_mb`
        max_bytes = self._limits.output_kb << 10
        return any(os.fstat(fd).st_size > max_bytes for fd in self._output_files)

    def _folder_bytes(self) -> int:
        """Returns the size of the files in the folder, which has no subfolders. Small and empty files count 4 KiB."""
        size = 0
        try:
            entries = os.scandir(self._folder)
        except FileNotFoundError:
            return 0
        with entries:
            for entry in entries:
                # the process may remove files meanwhile
                with contextlib.suppress(FileNotFoundError):
                    file_size = entry.stat(follow_symlinks=False).st_size
                    size += max(_LEAST_FILE_BYTES, file_size)
        return size

    def _usage(self) -> tuple[float, int]:
        """Returns the processor time in seconds, and the number of threads."""
        with open(f"/proc/{self._process.pid}/stat") as file:
            # the fields of proc(5) from the third one on; the second one, a name in brackets, can contain anything
            fields = file.read().rpartition(")")[2].split()
        user_ticks = int(fields[11])
        system_ticks = int(fields[12])
        num_threads = int(fields[17])
        return (user_ticks + system_ticks) / _TICKS, num_threads


def _run_confined(program: str, files: list[int], limits: Limits, folder: str, readable: Sequence[str]) -> int:
    """Arranges the descriptors of a fork, drops its rights and runs the program. Returns its exit status."""
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])

        # first to high numbers, since the final numbers 0, 1, 2 ... may belong to other files of the list
        duplicates = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_SPARE_FD) for fd in files]
        os.closerange(3, _FIRST_SPARE_FD)
        for target, fd in enumerate(duplicates):
            os.dup2(fd, target, inheritable=False)
        os.closerange(_FIRST_SPARE_FD, 4096)

        # Python's streams of the server have other descriptors
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # type: ignore[misc]
        sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[misc]
        confine(limits, folder, readable)
        run = getattr(programs, program)
        # its arguments are the descriptors behind stdin, stdout and stderr; see `FILES`
        code = run(*range(3, len(files))) or 0
    except BaseException:  # untrusted code may raise anything
        traceback.print_exc()
    # the fork leaves by `os._exit`, which flushes nothing
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            # the file is full, or the code closed or replaced the stream
            code = code or 1
    return code
