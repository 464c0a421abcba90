"""The parent's side of the sandbox: hands programs and their tests to confined processes and reads what comes back.

That is bounded plain JSON and text: nothing of an answer is evaluated here. One fork server for each `Sandbox`, started
at first use. A `Sandbox` belongs to one thread at a time. Where untrusted code could change or reach something outside,
nothing runs (`UserError`) unless that is allowed.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import select
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import verl_lite
from verl_lite.errors import UserError
from verl_lite.sandbox.confine import Limits, Protection
from verl_lite.sandbox.values import Unreadable, as_line, encode, read_line

_START_S = 60.0
_LOOK_S = 0.1
_ERROR_CHARACTERS = 500
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Messages = list[dict[str, Any]]


class SandboxError(RuntimeError):
    """The sandbox itself failed; nothing is known about the code."""


@dataclass(frozen=True)
class Ended:
    """How a process ended. met: the limit that it met (time, output, files, threads), "" for none. exit_code: minus the
    signal if it was killed. messages: what it told, as far as that is readable; it is as untrusted as the text."""

    met: str
    exit_code: int
    stdout: str
    stderr: str
    messages: Messages

    def outcome(self, is_compiled: bool = True) -> Outcome:
        """Of a test that it did not come through: the limit that it met, or the last line of its stderr."""
        lines = self.stderr.strip().splitlines()
        error = f"over its limit of {self.met}" if self.met else (lines or [f"exit code {self.exit_code}"])[-1]
        return Outcome(is_compiled, error=error[:_ERROR_CHARACTERS], is_timeout=self.met == "time")


@dataclass(frozen=True)
class Outcome:
    """One test. value: what was printed, returned (as `values.encode` writes it), or True for a snippet that raised
    nothing. error: why there is no value, in a line."""

    is_compiled: bool
    value: Any = None
    error: str = ""
    is_timeout: bool = False


class Sandbox:
    """Makes confined processes. limits: of each of them. allow_unsafe: run even where the machine lacks protection."""

    def __init__(self, limits: Limits | None = None, *, allow_unsafe: bool = False) -> None:
        self.limits = limits or Limits()
        self._allow_unsafe = allow_unsafe
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._protection: Protection | None = None

    @property
    def protection(self) -> Protection:
        """What holds on this machine; starts the fork server."""
        self._start_server()
        assert self._protection is not None
        return self._protection

    def run_script(self, code: str, stdin: str = "", total_s: float = math.inf) -> Outcome:
        """Runs code as a script; the value is its whole output. An exit code other than 0 is an error."""
        [ended] = self.run([("run_script", [{"code": code}])], stdin, total_s)
        compiled = ended.messages[0] if ended.messages else {}
        if compiled.get("compiled") is not True or ended.met or ended.exit_code:
            return _told(compiled) or ended.outcome(compiled.get("compiled") is True)
        return Outcome(True, ended.stdout)

    def call(
        self,
        code: str,
        name: str,
        calls: Sequence[Sequence[Any]],
        total_s: float = math.inf,
        is_enough: Callable[[list[Outcome]], bool] = lambda outcomes: False,
    ) -> list[Outcome]:
        """Calls a function (or a method of the class `Solution`) with each list of plain arguments.

        is_enough: asked ten times a second with the outcomes so far. There are fewer outcomes than calls if the process
        ended; the last one says why.
        """
        requests = [{"do": "call", "on": name, "args": encode(list(args))} for args in calls]

        def read(messages: Messages) -> list[Outcome]:
            return [_told(message) or Outcome(True, message.get("value")) for message in messages[2 : 2 + len(calls)]]

        task = [{"code": code, "has_requests": True}, *requests]
        [ended] = self.run([("hold_functions", task)], "", total_s, lambda messages: is_enough(read(messages)))
        if failed := next(filter(None, map(_told, ended.messages[:2])), None):
            return [failed] * len(calls)
        outcomes = read(ended.messages)
        return outcomes if len(outcomes) == len(calls) else [*outcomes, ended.outcome(bool(ended.messages))]

    def run_snippets(
        self,
        code: str,
        tests: Sequence[str],
        *,
        setup: str = "",
        call: str | None = None,
        stop_early: bool = False,
        total_s: float = math.inf,
    ) -> tuple[list[Outcome], int]:
        """Runs tests, each a piece of Python that raises if it fails, against what `code` defines.

        setup: runs before each of them. call: the name of the function with which the tests' own `check` is called.
        stop_early: whether the first failure ends it. Gives one outcome for each test that ended, and how many tests
        there are, as far as it is known. Raises ValueError if the tests themselves are no Python.
        """
        task = {"tests": list(tests), "setup": setup, "call": call, "stop_early": stop_early}
        held = ("hold_functions", [{"code": code, "has_requests": False}])
        functions, tester = self.run([held, ("run_tests", [task])], "", total_s)
        outcomes, count = [], len(tests)
        for message in tester.messages:  # the tests' own, which no answer can write
            if "broken" in message:
                raise ValueError(f"The tests of the ground truth are no Python: {message['broken']}")
            count = message.get("tests", count)
            if failed := _told(message):
                outcomes.append(failed)
            elif message.get("passed") is True:
                outcomes.append(Outcome(True, True))
        if tester.met or tester.exit_code:
            outcomes.append(tester.outcome())
        if functions.met:  # its test has failed for that
            place = next((place for place, outcome in enumerate(outcomes) if outcome.error), len(outcomes))
            outcomes[place : place + 1] = [functions.outcome()]
        return outcomes, max(count, len(outcomes))

    def run(
        self,
        programs: Sequence[tuple[str, Sequence[dict[str, Any]]]],
        stdin: str = "",
        total_s: float = math.inf,
        is_enough: Callable[[Messages], bool] = lambda messages: False,
    ) -> list[Ended]:
        """Runs programs of `verl_lite.sandbox.programs`, each in a confined process, until the last one has ended.

        programs: name, and the messages that it finds in its file. is_enough: asked ten times a second with the last
        one's messages so far. Raises UserError where the machine cannot hold it, SandboxError.
        """
        self._start_server()
        request = {
            "limits": asdict(self.limits),
            "total_s": min(total_s, 1e9),
            "programs": [name for name, _ in programs],
        }
        files: list[int] = []
        try:
            for _, task in programs:
                given = stdin.encode("utf-8", "surrogatepass"), None, None, b"".join(map(as_line, task)), None
                files += map(_file, given)
            reports = self._ask(request, files, lambda: is_enough(_messages(files[-1])))
            return [
                Ended(
                    report["met"], report["exit"], _text(files[at + 1]), _text(files[at + 2]), _messages(files[at + 4])
                )
                for report, at in zip(reports, range(0, len(files), 5), strict=True)
            ]
        finally:
            for fd in files:
                os.close(fd)

    def close(self) -> None:
        """Ends the fork server and all that it made."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def _ask(self, request: dict[str, Any], fds: Sequence[int], is_enough: Callable[[], bool]) -> list[dict[str, Any]]:
        assert self._control is not None
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], list(fds))
            while not select.select([self._control], [], [], _LOOK_S)[0]:
                if is_enough():
                    self._control.send(b"stop")
                    break
            body = self._control.recv(1 << 16)
        except OSError:
            body = b""
        except BaseException:  # interrupted: whoever asks next would get this job's report
            self.close()
            raise
        if not body:
            self.close()
            raise SandboxError("the fork server of the sandbox has died")
        reports: list[dict[str, Any]] = json.loads(body)
        return reports

    def _start_server(self) -> None:
        if self._control is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own_root = str(Path(verl_lite.__file__).parents[1])
        packages = sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})
        run = (
            f"import sys; sys.path.insert(0, {own_root!r}); from verl_lite.sandbox.server import main; "
            f"sys.path[:] = [path for path in sys.path if path not in ('', {own_root!r})] + {packages!r}; "
            f"main({theirs.fileno()}, {_readable_folders()!r})"
        )
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-S", "-s", "-c", run],
                env=_ENVIRONMENT | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
            )
        ours.settimeout(_START_S)
        hello = ours.recv(1 << 16)
        if not hello:
            ours.close()
            raise SandboxError("the fork server of the sandbox did not start; its error is above")
        ours.settimeout(None)
        self._control = ours
        self._protection = Protection(**{name: tuple(each) for name, each in json.loads(hello).items()})
        if not self._protection.is_safe and not self._allow_unsafe:
            self.close()
            raise UserError(
                f"Code of answers does not run on this machine: it could {', '.join(self._protection.could)} (needed: "
                "Linux with seccomp on x86-64 or ARM). Run the rewards on another machine (reward.remote.url), or, "
                "where nothing can be lost, set allow_unsafe: true in the reward's kwargs."
            )


def _file(content: bytes | None) -> int:
    """A descriptor of a file without a name in any folder: to be read, with this content, or to be written."""
    fd = os.memfd_create("sandbox")
    if content is None:
        return fd
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)


def _content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _text(fd: int) -> str:
    return _content(fd).decode("utf-8", "replace")


def _messages(fd: int) -> Messages:
    """The whole messages of a file, up to the first that is none."""
    lines, messages = io.BytesIO(_content(fd)), []
    with contextlib.suppress(EOFError, Unreadable):
        while True:
            messages.append(read_line(lines))
    return messages


def _told(message: dict[str, Any]) -> Outcome | None:
    """The outcome that a message tells, if it tells of an error."""
    raised, error = message.get("raised"), message.get("error")
    if isinstance(raised, dict):
        error = f"{raised.get('name')}: {raised.get('text')}"
    return Outcome(message.get("compiled") is not False, error=str(error)[:_ERROR_CHARACTERS]) if error else None


def _readable_folders() -> list[str]:
    """What code may read: Python, its packages, and the system's libraries."""
    paths = sysconfig.get_paths()
    python = {os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    python |= {os.path.realpath(Path(sys.base_prefix, name)) for name in ("lib", "lib64")}  # conda's shared libraries
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"]
    return [*sorted(python), *system, "/etc/ld.so.cache", "/etc/localtime"]
