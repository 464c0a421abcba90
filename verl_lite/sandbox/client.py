"""The interface of the parent process to the sandbox: sends programs and tests to confined processes, reads results.

Results are plain JSON and text of bounded size, and nothing in them is evaluated. On a machine where untrusted code
could reach or change anything outside, no program runs (`UserError`) unless `allow_unsafe` is set.
"""

import contextlib
import io
import json
import math
import os
import platform
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import verl_lite
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject, JsonValue
from verl_lite.machine.process_tree import ProcessTree
from verl_lite.sandbox.confine import Limits
from verl_lite.sandbox.values import (
    ERROR_CHARACTERS,
    FORGED,
    MESSAGE_BYTES_MAX,
    JobRequest,
    ProcessReport,
    Unreadable,
    as_line,
    encode,
    fields,
    raised_exception,
    read_line,
)

READ = "read every file that this user may read"
ATTEMPTS = (
    ("open network connections", "import socket; socket.socket()"),
    ("open network connections", "import socket; socket.socketpair()"),
    ("start processes", "import os\nif os.fork() == 0: os._exit(0)"),
    ("start processes", "import os; os.posix_spawn('/bin/true', ['true'], {})"),
    ("signal other processes", "import os; os.kill(os.getppid(), 0)"),
    ("write files outside its folder", "import os; f = '/tmp/verl_lite-sandbox-probe'; open(f, 'w'); os.unlink(f)"),
    (READ, "open('/etc/passwd')"),
    (READ, "import os; os.listdir('/proc')"),
)
"""Forbidden actions, each with a script that attempts it."""

_NEEDED = "needed: Linux with seccomp on x86-64 or ARM"
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""The whole environment of the fork server. Without the caller's variables, programs cannot read its keys."""
# instead of infinity, which JSON does not have
_LONGEST_JOB_S = 1e9
# length of `server.FILES`, without the imports of the server
_FILES_PER_PROGRAM = 5
_SYSTEM_FILES = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
)


class SandboxError(RuntimeError):
    """A failure of the sandbox itself, which leaves the result of the code unknown."""


@dataclass(frozen=True)
class Outcome:
    """The result of one test.

    Attributes:
        is_compiled: False if the code is not valid Python.
        value: output of a script, return value of a call (in the format of `values.encode`), or True for a snippet
            that raised nothing.
        error: reason for a missing value, in one line.
        is_timeout: True if the test exceeded a limit of time.
    """

    is_compiled: bool
    value: JsonValue = None
    error: str = ""
    is_timeout: bool = False


@dataclass(frozen=True)
class Ended:
    """The end of a confined process.

    Attributes:
        met: exceeded limit (time, output, files, threads), or "".
        exit_code: exit code, or minus the signal that killed the process.
        stdout, stderr: its output.
        messages: valid messages of the process, as untrusted as its text.
    """

    met: str
    exit_code: int
    stdout: str
    stderr: str
    messages: list[JsonObject]

    def outcome(self) -> Outcome:
        """Returns the outcome of the test that was running: the exceeded limit, or the last line of stderr."""
        error = f"exit code {self.exit_code}"
        lines = self.stderr.strip().splitlines()
        if self.met:
            error = f"exceeded its limit of {self.met}"
        elif lines:
            # the last line of a traceback names the exception
            error = lines[-1]
        return Outcome(True, error=error[:ERROR_CHARACTERS], is_timeout=self.met == "time")


class Sandbox:
    """Runs programs in confined processes, which a fork server creates. Not thread-safe.

    The fork server starts at first use.

    Args:
        limits: limits of each process.
        allow_unsafe: True to run programs on a machine that cannot confine them.
    """

    def __init__(self, limits: Limits | None = None, *, allow_unsafe: bool = False) -> None:
        self.limits = limits or Limits()
        self._allow_unsafe = allow_unsafe
        self._server: ProcessTree | None = None
        self._control: socket.socket | None = None
        self._could: tuple[str, ...] = ()

    @property
    def could(self) -> tuple[str, ...]:
        """The forbidden actions of `ATTEMPTS` that a program performed successfully. Starts the fork server.

        `READ` alone is accepted, since the program cannot send data away.
        """
        self._start_server()
        return self._could

    def run_script(self, code: str, stdin: str = "", total_s: float = math.inf) -> Outcome:
        """Runs code as a script. The value is its whole output; an exit code other than 0 is an error."""
        task: list[JsonObject] = [{"code": code}]
        [ended] = self.run([("run_script", task)], stdin, total_s)
        if not ended.met and ended.exit_code == 0:
            return Outcome(True, ended.stdout)
        for message in ended.messages:
            error = _error_of(message)
            if error is not None:
                return error
        return ended.outcome()

    def call(
        self,
        code: str,
        name: str,
        calls: Sequence[Sequence[object]],
        total_s: float = math.inf,
        reply_bytes: int = MESSAGE_BYTES_MAX,
    ) -> list[Outcome]:
        """Calls a function (or a method of the class `Solution`) with each list of plain arguments.

        Args:
            code: the code that defines the function.
            name: name of the function.
            calls: the arguments of each call.
            total_s: wall-clock time of all calls.
            reply_bytes: limit of the size of all replies; data beyond it is not read.

        Returns:
            One outcome per call. If the process ends early or the replies are too long, there are fewer outcomes, and
            the last one has the reason.
        """
        task: list[JsonObject] = [{"code": code, "has_requests": True}]
        no_kwargs = encode({})
        for number, args in enumerate(calls, 1):
            request: JsonObject = {"call": name, "args": encode(list(args)), "kwargs": no_kwargs, "number": number}
            task.append(request)
        [ended] = self.run([("hold_functions", task)], "", total_s, reply_bytes)

        outcomes = [_returned(message, number) for number, message in enumerate(ended.messages)]
        # the first message says whether the code itself has run
        if outcomes and outcomes[0].error:
            return [outcomes[0]] * len(calls)
        # the code may have forged further replies
        outcomes_of_calls = outcomes[1 : 1 + len(calls)]
        if len(outcomes_of_calls) < len(calls):
            outcomes_of_calls.append(ended.outcome())
        return outcomes_of_calls

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
        """Runs tests against the names that `code` defines.

        Args:
            code: the tested code.
            tests: Python code of each test, which raises if the test fails.
            setup: code that runs before each test.
            call: name of the function that is passed to the tests' own `check`.
            stop_early: True to stop after the first failure.
            total_s: wall-clock time of all tests.

        Returns:
            One outcome per finished test, and the number of tests as far as it is known.

        Raises:
            ValueError: if the tests are not valid Python.
        """
        # in two processes: the tested code cannot reach the tests, whatever it does
        code_task: JsonObject = {"code": code, "has_requests": False}
        tests_task: JsonObject = {"tests": list(tests), "setup": setup, "call": call, "stop_early": stop_early}
        # the tests last, because the run ends with its last process
        programs = [("hold_functions", [code_task]), ("run_tests", [tests_task])]
        functions, tester = self.run(programs, "", total_s)

        outcomes = []
        count = len(tests)
        # written by the tests' process, which the tested code cannot reach
        for message in tester.messages:
            if "broken" in message:
                raise ValueError(f"The tests of the ground truth are not valid Python: {message['broken']}")
            count = message.get("tests", count)
            error = _error_of(message)
            if error is not None:
                outcomes.append(error)
            elif message.get("passed") is True:
                outcomes.append(Outcome(True, True))
        if tester.met or tester.exit_code:
            outcomes.append(tester.outcome())
        # the exceeded limit of the tested code is the reason of the first failure, or a failure of its own
        if functions.met:
            first_failure = 0
            while first_failure < len(outcomes) and not outcomes[first_failure].error:
                first_failure += 1
            outcomes[first_failure : first_failure + 1] = [functions.outcome()]
        return outcomes, max(count, len(outcomes))

    def run(
        self,
        programs: Sequence[tuple[str, Sequence[JsonObject]]],
        stdin: str = "",
        total_s: float = math.inf,
        reply_bytes: int = MESSAGE_BYTES_MAX,
    ) -> list[Ended]:
        """Runs functions of `verl_lite.sandbox.programs`, each in a confined process, until the last process has ended.

        Args:
            programs: name of each function, and the messages in its task file.
            stdin: the standard input of each process.
            total_s: wall-clock time of the whole run.
            reply_bytes: limit of the size of the messages of a process; data beyond it is not read.

        Raises:
            UserError: if the machine cannot confine programs.
            SandboxError: if the sandbox fails.
        """
        self._start_server()
        request: JobRequest = {
            "limits": asdict(self.limits),
            "total_s": min(total_s, _LONGEST_JOB_S),
            "programs": [name for name, _ in programs],
        }
        # an input from JSON can contain lone surrogates
        stdin_bytes = stdin.encode("utf-8", "surrogatepass")
        files: list[int] = []
        try:
            for _, task in programs:
                task_bytes = b"".join(map(as_line, task))
                # stdin, stdout, stderr, task and reply; the empty ones are written by the program
                for content in (stdin_bytes, b"", b"", task_bytes, b""):
                    files.append(_file(content))
            reports = self._send_job(request, files)

            ended = []
            for number, report in enumerate(reports):
                first = number * _FILES_PER_PROGRAM
                own_files = files[first : first + _FILES_PER_PROGRAM]
                ended.append(_read_results(report, own_files, reply_bytes))
            return ended
        finally:
            for fd in files:
                os.close(fd)

    def close(self) -> None:
        """Kills the fork server and its processes."""
        if self._control is not None and self._server is not None:
            self._control.close()
            self._server.end()
            self._control = self._server = None

    def _send_job(self, request: JobRequest, fds: Sequence[int]) -> list[ProcessReport]:
        """Sends a job to the fork server and waits for the reports of its processes."""
        assert self._control is not None
        message = json.dumps(request).encode()
        try:
            socket.send_fds(self._control, [message], list(fds))
            # empty if the server has died
            body = self._control.recv(1 << 16)
        except OSError:
            body = b""
        except BaseException:
            # interrupted: the next job would receive this job's report
            self.close()
            raise
        if not body:
            self.close()
            raise SandboxError("the fork server of the sandbox has died; its error is above")
        reports: list[ProcessReport] = json.loads(body)
        return reports

    def _start_server(self) -> None:
        """Starts the fork server, if it does not run, and finds out what programs could do on this machine."""
        if self._control is not None:
            return
        # for example macOS, where even unconfined programs cannot run
        if not hasattr(os, "memfd_create"):
            raise UserError(
                f"Code of answers does not run on {platform.system()} ({_NEEDED}). Run the rewards on a Linux machine "
                "(reward.remote.url)."
            )
        environment = dict(_ENVIRONMENT)
        # Python itself may need it to find its shared libraries
        if "LD_LIBRARY_PATH" in os.environ:
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        # packets, so that a job's request and its descriptors always arrive together
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = ProcessTree(
                [sys.executable, "-S", "-s", "-c", _server_program(theirs.fileno())],
                environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
            )
        self._control = ours

        # a program that cannot run would also fail every attempt, and so look confined
        if self.run_script("print(1)").value != "1\n":
            raise SandboxError("no program runs in the sandbox on this machine")
        done = [action for action, attempt in ATTEMPTS if not self.run_script(attempt).error]
        # two attempts may have the same action
        self._could = tuple(dict.fromkeys(done))
        if set(self._could) - {READ} and not self._allow_unsafe:
            self.close()
            raise UserError(
                f"Code of answers does not run on this machine: it could {', '.join(self._could)} ({_NEEDED}). "
                "Run the rewards on another machine (reward.remote.url), or, on a machine without "
                "anything to lose, set allow_unsafe: true in the reward's kwargs."
            )


def _server_program(control: int) -> str:
    """Returns the code of the fork server. control: descriptor of its end of the connection.

    The server imports this project from its folder and then removes the folder from its path, so that programs can
    import installed packages only.
    """
    own_root = str(Path(verl_lite.__file__).parents[1])
    # the server runs without the module `site`, which adds them
    packages = sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})
    lines = [
        "import sys",
        f"sys.path.insert(0, {own_root!r})",
        "from verl_lite.sandbox.server import main",
        f"other_folders = [path for path in sys.path if path not in ('', {own_root!r})]",
        f"sys.path[:] = other_folders + {packages!r}",
        f"main({control}, {_readable_folders()!r})",
    ]
    return "\n".join(lines)


def _file(content: bytes) -> int:
    """Creates an anonymous file with this content and returns its descriptor, positioned at the beginning."""
    fd = os.memfd_create("sandbox")
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _content(fd: int) -> bytes:
    """Returns the content of a file. Does not move its position, which the processes share."""
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _read_results(report: ProcessReport, files: Sequence[int], reply_bytes: int) -> Ended:
    """Returns the end of a process, with the content of its `server.FILES`. For `reply_bytes` see `Sandbox.run`."""
    _, stdout, stderr, _, reply = files
    # an untrusted program may write bytes that are no text
    return Ended(
        met=report["met"],
        exit_code=report["exit"],
        stdout=_content(stdout).decode("utf-8", "replace"),
        stderr=_content(stderr).decode("utf-8", "replace"),
        messages=_messages(reply, reply_bytes),
    )


def _messages(fd: int, most_bytes: int) -> list[JsonObject]:
    """Returns the complete messages in the first `most_bytes` of a file, up to the first invalid message."""
    lines = io.BytesIO(_content(fd)[:most_bytes])
    messages = []
    with contextlib.suppress(EOFError, Unreadable):
        while True:
            messages.append(read_line(lines))
    return messages


def _error_of(message: JsonObject) -> Outcome | None:
    """Returns the error in a message of `run_script` (before the code runs) or `run_tests`; None if it has none."""
    error = message.get("error")
    if not error:
        return None
    return Outcome(message.get("compiled") is not False, error=error)


def _returned(message: JsonObject, number: int) -> Outcome:
    """Returns the outcome of a call from its reply.

    The code may have forged the message, so a shape that `hold_functions` does not send is an error.

    Args:
        message: the reply.
        number: number of the call, from 1; 0 for the reply to loading the code.
    """
    forged = Outcome(True, error=FORGED)
    # the number shows a line that the code itself has written between the replies
    if number and message.pop("number", None) != number:
        return forged
    exception = raised_exception(message)
    if exception is not None:
        name, _, text = exception
        error = f"{name}: {text}"
        return Outcome(True, error=error[:ERROR_CHARACTERS])
    if number == 0:
        return _loaded(message) or forged

    if fields(message, object=int, after=list) is not None:
        return Outcome(True, error="the call returned no plain value")
    returned = fields(message, value=object, after=list)
    if returned is None:
        return forged
    value, _ = returned
    return Outcome(True, value)


def _loaded(message: JsonObject) -> Outcome | None:
    """Returns whether the code has run, from the first reply of `hold_functions`; None for another message."""
    failure = fields(message, compiled=bool, error=str)
    if failure is not None:
        _, error = failure
        return Outcome(False, error=error[:ERROR_CHARACTERS] or "not valid Python")
    if fields(message, names=dict) is None:
        return None
    return Outcome(True)


def _readable_folders() -> list[str]:
    """Returns the folders and files that programs may read: Python, its packages and the system's libraries."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    # conda's shared libraries
    for name in ("lib", "lib64"):
        folders.append(os.path.join(sys.base_prefix, name))
    real_folders = {os.path.realpath(folder) for folder in folders}
    return [*sorted(real_folders), *_SYSTEM_FILES]
