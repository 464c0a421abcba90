"""The fork server: a small Python process that has imported what solutions usually import, and makes confined copies.

It never sees a byte of anyone's code: the parent hands it pipes, whose other ends only the copy reads, after it has
given up its rights. It ends with its parent, and its copies end with it. Imports the standard library only.
"""

from __future__ import annotations

import array
import builtins
import fcntl
import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from verl_lite.sandbox import programs
from verl_lite.sandbox.confine import Limits, confine, probe

MESSAGE_BYTES = 1 << 16
DESCRIPTORS = ("stdin", "stdout", "stderr", "channel", "line")
"""Pipe ends that travel with a request; those that it does not name are /dev/null."""

_OUT_OF_THE_WAY = 64

_PRELOADED = (
    "bisect collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string typing dataclasses enum numbers"
).split()


def main(control: int, folder: str, readable: Sequence[str]) -> None:
    """Serves until the parent closes its end. First message out: {"protection": what holds on this machine}."""
    for name in _PRELOADED:
        __import__(name)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # the module `site` would add them
    gc.collect()
    gc.freeze()  # copies would copy what the collector touches
    connection = socket.socket(fileno=control)
    protection = probe(folder, readable)
    connection.send(json.dumps({"protection": vars(protection)}).encode())
    _Server(connection, readable).serve()


class _Server:
    """jobs: the running copies, process number by the job's."""

    def __init__(self, connection: socket.socket, readable: Sequence[str]) -> None:
        self._connection, self._readable = connection, readable
        self._jobs: dict[int, int] = {}
        self._devnull = os.open(os.devnull, os.O_RDWR)

    def serve(self) -> None:
        ended_reader, ended_writer = os.pipe()
        for fd in (ended_reader, ended_writer):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(ended_writer)
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        selector.register(ended_reader, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not self._connection:
                    os.read(ended_reader, 4096)
                elif not self._receive():
                    return
            self._report_ended()

    def _receive(self) -> bool:
        """Takes one request: start a job, or kill one. False: the parent is gone."""
        room = socket.CMSG_SPACE(len(DESCRIPTORS) * array.array("i").itemsize)
        body, ancillary, _, _ = self._connection.recvmsg(MESSAGE_BYTES, room)
        if not body:
            return False
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        request = json.loads(body)
        if "kill" in request:
            pid = self._jobs.get(request["kill"])
            if pid is not None:
                self._end(pid)
            return True
        pid = os.fork()
        if pid == 0:
            self._become(request, dict(zip(request["fds"], fds, strict=True)))
        self._jobs[request["job"]] = pid
        for fd in fds:
            os.close(fd)
        self._connection.send(json.dumps({"job": request["job"], "pid": pid}).encode())
        return True

    def _become(self, request: dict[str, Any], fds: dict[str, int]) -> None:
        """The copy's life. Never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            places = _move(fds, self._devnull)
            programs.open_streams()
            confine(Limits(**request["limits"]), request["folder"], self._readable)
            code = 0
            match request["program"]:
                case "program":
                    code = programs.run_program(places["channel"])
                case "functions":
                    programs.hold_functions(places["channel"])
                case "tests":
                    programs.run_tests(places["channel"], places["line"])
        except BaseException:  # the door to untrusted code: it ends here whatever it raises
            programs.show_error()
            code = 1
        finally:
            programs.finish(code)

    def _end(self, pid: int) -> None:
        """Kills a copy and what it may have started where nothing forbids that."""
        for kill in (os.killpg, os.kill):
            try:
                kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # before its setsid there is no such group; afterwards the group has it all
                pass

    def _report_ended(self) -> None:
        for job, pid in list(self._jobs.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            self._end(pid)  # its group, while nobody else can have its number
            _, status, usage = os.wait4(pid, 0)
            del self._jobs[job]
            self._connection.send(json.dumps(_end_report(job, status, usage)).encode())


def _end_report(job: int, status: int, usage: resource.struct_rusage) -> dict[str, float]:
    return {
        "job": job,
        "exit": os.waitstatus_to_exitcode(status),
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / 1024,
    }


def _move(fds: dict[str, int], devnull: int) -> dict[str, int]:
    """Puts the descriptors where the program expects them, 0 to 4, and closes all others."""
    high = {name: fcntl.fcntl(fd, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for name, fd in {**fds, "null": devnull}.items()}
    os.closerange(3, _OUT_OF_THE_WAY)
    for place, name in enumerate(DESCRIPTORS):
        if name in fds or place < 3:
            os.dup2(high[name if name in fds else "null"], place, inheritable=False)
    os.closerange(_OUT_OF_THE_WAY, 4096)
    return {name: DESCRIPTORS.index(name) for name in fds}


if __name__ == "__main__":
    sys.exit("This is started by verl_lite.sandbox.client.")
