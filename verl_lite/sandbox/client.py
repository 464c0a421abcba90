"""The parent's side of the sandbox: starts confined processes, feeds them, watches their limits, and ends them.

One fork server for each `Sandbox`, started at first use. A `Sandbox` belongs to one thread at a time. What it promises
on this machine is in `protection`; where untrusted code could change or reach something, nothing runs (`UserError`)
unless that is allowed.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import verl_lite
from verl_lite.errors import UserError
from verl_lite.sandbox.confine import Limits, Protection
from verl_lite.sandbox.values import MESSAGE_BYTES_MAX, Unreadable, parse_message

_WATCH_S = 0.1
_START_S = 60.0
_LONGEST_CPU_S = 3600.0
_STDERR_BYTES = 1 << 14
_CHUNK = 1 << 16
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_CHANNEL_BYTES_MAX = 4 * MESSAGE_BYTES_MAX
_TICKS = os.sysconf("SC_CLK_TCK")

Reason = Literal["exit", "time", "output", "files", "threads", "protocol"]


class SandboxError(RuntimeError):
    """The sandbox itself failed; nothing is known about the code."""


@dataclass(frozen=True)
class Ending:
    """How a process ended. reason: by itself ("exit"), or the limit that it met. exit_code: minus the signal if it was
    killed. cpu_s, peak_mb: what it used."""

    reason: Reason
    exit_code: int
    cpu_s: float
    peak_mb: float


class Process:
    """A confined process as its owner sees it. messages: from its channel, not yet taken. stdout, stderr: of stderr the
    end only. ending: once it is over. begin_test: its clocks start anew."""

    def __init__(self, job: int, limits: Limits, folder: Path, ours: dict[str, int], stdin: bytes) -> None:
        self.job, self.limits, self.folder = job, limits, folder
        self.messages: deque[dict[str, Any]] = deque()
        self.stdout, self.stderr = bytearray(), bytearray()
        self.ending: Ending | None = None
        self.pid: int | None = None
        self.why: Reason = "exit"
        self.is_killed, self.watched = False, time.monotonic()
        self._open = ours
        self._unsent = {"stdin": memoryview(stdin), "channel": memoryview(b"")}
        self._unread = bytearray()
        self._taken = dict.fromkeys(ours, 0)
        self.begin_test()
        for fd in ours.values():
            os.set_blocking(fd, False)

    def begin_test(self) -> None:
        """The limits of time count from now."""
        self._cpu_before = self._usage()[0]
        self.deadline = time.monotonic() + self.limits.wall_s

    def post(self, message: dict[str, Any]) -> None:
        """Queues a message for the channel."""
        body = json.dumps(message).encode()
        self._unsent["channel"] = memoryview(bytes(self._unsent["channel"]) + len(body).to_bytes(4, "big") + body)

    def interests(self) -> Iterator[tuple[int, int]]:
        """What to wait for, as `poll` takes it."""
        for name, fd in self._open.items():
            events = 0 if name == "stdin" else select.POLLIN
            if name == "stdin" or (name == "channel" and self._unsent["channel"]):
                events |= select.POLLOUT
            yield fd, events

    def handle(self, fd: int, event: int) -> None:
        """Reads and writes what is possible now. What breaks a limit is noted in `why`."""
        name = next((name for name, own in self._open.items() if own == fd), None)
        if name is None:
            return
        if event & (select.POLLOUT | select.POLLERR) and name in self._unsent:
            self._write(name)
        if event & (select.POLLIN | select.POLLHUP) and name in self._open and name != "stdin":
            self._read(name)

    def watch(self) -> None:
        """Looks at the limits that the kernel does not see to."""
        cpu_s, threads = self._usage()
        if time.monotonic() > self.deadline or cpu_s - self._cpu_before > self.limits.cpu_s:
            self.why = "time"
        elif threads > self.limits.threads:
            self.why = "threads"
        elif _folder_exceeds(self.folder, self.limits.folder_mb << 20):
            self.why = "files"

    def end(self, report: dict[str, Any]) -> None:
        """Takes what is left in its pipes. report: the fork server's."""
        for name in [name for name in self._open if name != "stdin"]:
            self._read(name)
        self.close()
        cpu_s, code = report["cpu_s"], report["exit"]
        if self.why == "exit" and code in (-signal.SIGKILL, -signal.SIGXCPU) and cpu_s >= self.limits.cpu_s - 0.5:
            self.why = "time"
        self.ending = Ending(self.why, code, cpu_s, report["peak_mb"])

    def close(self) -> None:
        """Closes the pipes and removes the folder."""
        for fd in self._open.values():
            os.close(fd)
        self._open = {}
        _remove(self.folder)

    def _write(self, name: str) -> None:
        try:
            while self._unsent[name]:
                self._unsent[name] = self._unsent[name][os.write(self._open[name], self._unsent[name][:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # it does not read: its business
            self._unsent[name] = memoryview(b"")
        if name == "stdin":
            os.close(self._open.pop(name))

    def _read(self, name: str) -> None:
        while self.why == "exit":
            try:
                data = os.read(self._open[name], _CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                os.close(self._open.pop(name))
                return
            self._take(name, data)

    def _take(self, name: str, data: bytes) -> None:
        self._taken[name] += len(data)
        if self._taken[name] > (_CHANNEL_BYTES_MAX if name == "channel" else self.limits.output_kb << 10):
            self.why = "protocol" if name == "channel" else "output"
        elif name == "stderr":
            self.stderr = (self.stderr + data)[-_STDERR_BYTES:]
        elif name == "stdout":
            self.stdout += data
        else:
            self._unread += data
            try:
                self._cut_messages()
            except Unreadable:
                self.why = "protocol"

    def _cut_messages(self) -> None:
        while len(self._unread) >= 4:
            length = int.from_bytes(self._unread[:4], "big")
            if length > MESSAGE_BYTES_MAX:
                raise Unreadable("too long")
            if len(self._unread) < 4 + length:
                return
            self.messages.append(parse_message(bytes(self._unread[4 : 4 + length])))
            del self._unread[: 4 + length]

    def _usage(self) -> tuple[float, int]:
        """Seconds of processor time so far, and the number of threads."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0, 0
        return (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[17])


class Sandbox:
    """Makes confined processes. limits: of each of them. allow_unsafe: run even where the machine lacks protection."""

    def __init__(self, limits: Limits | None = None, *, allow_unsafe: bool = False) -> None:
        self.limits = limits or Limits()
        self._allow_unsafe = allow_unsafe
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._protection: Protection | None = None
        self._jobs = itertools.count()
        self._running: dict[int, Process] = {}

    @property
    def protection(self) -> Protection:
        """What holds on this machine; starts the fork server."""
        self._start_server()
        assert self._protection is not None
        return self._protection

    @contextmanager
    def process(
        self, program: str, *, stdin: str = "", channel: int | None = None, line: int | None = None
    ) -> Iterator[Process]:
        """A confined process that runs `program` of `verl_lite.sandbox.programs`, ended with the block.

        channel: a descriptor that is its channel, in place of one to this process; line: a second one. Raises
        UserError where the machine cannot hold it, SandboxError.
        """
        process = self._begin(program, stdin, {"channel": channel, "line": line})
        try:
            yield process
        finally:
            if process.ending is None:
                self.kill(process)

    def wait(self, process: Process, until: Callable[[], bool]) -> None:
        """Serves all processes until the condition holds or `process` has ended. One that breaks a limit is ended."""
        while not until() and process.ending is None:
            self._serve_once(_WATCH_S)

    def wait_end(self, process: Process) -> Ending:
        """Serves all processes until this one has ended."""
        self.wait(process, lambda: False)
        assert process.ending is not None
        return process.ending

    def kill(self, process: Process) -> Ending:
        """Ends a process and waits for its end."""
        if process.ending is None:
            self._send({"kill": process.job}, [])
        return self.wait_end(process)

    def close(self) -> None:
        """Ends the fork server and all that it made."""
        for process in self._running.values():
            process.close()
            process.ending = Ending(process.why, -signal.SIGKILL, 0.0, 0.0)
        self._running = {}
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    # --------------------------------------------------------------------------------------------------- processes

    def _begin(self, program: str, stdin: str, given: dict[str, int | None]) -> Process:
        self._start_server()
        limits = self.limits
        theirs, ours = _pipes(program, has_channel=given["channel"] is None)
        theirs |= {name: os.dup(fd) for name, fd in given.items() if fd is not None}
        folder = Path(tempfile.mkdtemp(prefix="verl_lite-sandbox-"))
        process = Process(next(self._jobs), limits, folder, ours, stdin.encode("utf-8", "surrogatepass"))
        self._running[process.job] = process
        if program != "program":  # it runs many tests, each with a clock of its own
            limits = replace(limits, cpu_s=_LONGEST_CPU_S)
        request = {"job": process.job, "program": program, "limits": asdict(limits), "folder": str(folder)}
        try:
            self._send({**request, "fds": list(theirs)}, list(theirs.values()))
        finally:
            for fd in theirs.values():
                os.close(fd)
        return process

    def _serve_once(self, timeout_s: float) -> None:
        """Reads and writes whatever is ready, then looks at the limits."""
        assert self._control is not None
        owners = {fd: process for process in self._running.values() for fd, _ in process.interests()}
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        for process in self._running.values():
            for fd, events in process.interests():
                poll.register(fd, events)
        ready = poll.poll(timeout_s * 1000)
        for fd, event in ready:
            if fd in owners:
                owners[fd].handle(fd, event)
        if any(fd == self._control.fileno() for fd, _ in ready):
            self._take_report()
        now = time.monotonic()
        for process in list(self._running.values()):
            if now - process.watched > _WATCH_S:
                process.watched = now
                process.watch()
            if process.why != "exit" and not process.is_killed:
                process.is_killed = True
                self._send({"kill": process.job}, [])

    def _take_report(self) -> None:
        assert self._control is not None
        body = self._control.recv(_CHUNK)
        if not body:
            self.close()
            raise SandboxError("the fork server of the sandbox has died")
        report = json.loads(body)
        process = self._running[report["job"]]
        if "pid" in report:
            process.pid = report["pid"]
        else:
            process.end(report)
            del self._running[process.job]

    def _send(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        assert self._control is not None
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], list(fds))
        except OSError as error:
            self.close()
            raise SandboxError("the fork server of the sandbox has died") from error

    # ------------------------------------------------------------------------------------------------------ server

    def _start_server(self) -> None:
        if self._control is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own_root = str(Path(verl_lite.__file__).parents[1])
        readable = _readable_folders()
        with tempfile.TemporaryDirectory(prefix="verl_lite-sandbox-") as folder, theirs:
            run = (
                f"import sys; sys.path.insert(0, {own_root!r}); from verl_lite.sandbox.server import main; "
                f"sys.path[:] = [path for path in sys.path if path not in ('', {own_root!r})] + {_packages()!r}; "
                f"main({theirs.fileno()}, {folder!r}, {readable!r})"
            )
            self._server = subprocess.Popen(
                [sys.executable, "-S", "-s", "-c", run],
                env=_ENVIRONMENT | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
            )
            theirs.close()
            ours.settimeout(_START_S)
            hello = ours.recv(_CHUNK)
        if not hello:
            ours.close()
            raise SandboxError("the fork server of the sandbox did not start; its error is above")
        ours.settimeout(None)
        self._control = ours
        found = json.loads(hello)["protection"]
        self._protection = Protection(**{**found, "layers": tuple(found["layers"])})
        if not self._protection.is_safe and not self._allow_unsafe:
            self.close()
            raise UserError(
                "Code of answers does not run on this machine: it could "
                f"{', '.join(self._protection.missing())} (needed: Linux with seccomp on x86-64 or ARM). Run the "
                "rewards on another machine (reward.remote.url), or, where nothing can be lost, set allow_unsafe: true "
                "in the reward's kwargs."
            )


def _pipes(program: str, has_channel: bool) -> tuple[dict[str, int], dict[str, int]]:
    """The ends of the child and our own, by name."""
    theirs: dict[str, int] = {}
    ours: dict[str, int] = {}
    if program == "program":
        theirs["stdin"], ours["stdin"] = os.pipe()
        ours["stdout"], theirs["stdout"] = os.pipe()
    ours["stderr"], theirs["stderr"] = os.pipe()
    if has_channel:
        our_channel, their_channel = socket.socketpair()
        ours["channel"], theirs["channel"] = our_channel.detach(), their_channel.detach()
    return theirs, ours


def _readable_folders() -> list[str]:
    """What code may read: Python, its packages, and the system's libraries."""
    paths = sysconfig.get_paths()
    python = {os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    python |= {os.path.realpath(Path(sys.base_prefix, name)) for name in ("lib", "lib64")}  # conda's shared libraries
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"]
    return [*sorted(python), *system, "/etc/ld.so.cache", "/etc/localtime"]


def _packages() -> list[str]:
    paths = sysconfig.get_paths()
    return sorted({paths["purelib"], paths["platlib"]})


def _folder_exceeds(folder: Path, limit: int) -> bool:
    """Whether the files below hold more bytes; each entry counts as 4 KiB at least."""
    size, folders = 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    size += max(4096, entry.stat(follow_symlinks=False).st_size)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    if size > limit:
                        return True
        except OSError:  # it changes under our eyes
            continue
    return False


def _remove(folder: Path) -> None:
    def again(function: Callable[..., Any], path: str, _: Any) -> None:
        os.chmod(os.path.dirname(path), stat.S_IRWXU)
        function(path)

    shutil.rmtree(folder, onerror=again)
