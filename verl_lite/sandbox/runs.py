"""The three ways to test code in a sandbox: a script with its input, a function with its arguments, snippets of tests.

What is expected stays in this process, but for snippets, which run in a confined process of their own that talks to the
one with the tested code. No outcome here is an error of the caller's; `SandboxError` is the sandbox's own failure.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_lite.sandbox.client import Process, Sandbox
from verl_lite.sandbox.values import MESSAGE_BYTES_MAX, Unreadable, decode, encode

_GRACE_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """One run. value: what was printed or returned, None without one. error: why there is none, in a line."""

    is_compiled: bool
    value: Any = None
    error: str = ""
    is_timeout: bool = False


@dataclass(frozen=True)
class SnippetOutcomes:
    """passed: one entry for each test that ended. count: all tests, as far as it is known. broken: why the tests
    themselves are no Python; then nothing is known about the code."""

    is_compiled: bool
    passed: tuple[bool, ...] = ()
    count: int = 0
    error: str = ""
    is_timeout: bool = False
    broken: str = ""


def run_script(sandbox: Sandbox, code: str, stdin: str) -> Outcome:
    """Runs code as a script; the value is its whole output. An exit code other than 0 is an error."""
    with sandbox.process("program", stdin=stdin) as process:
        process.post({"code": code})
        ending = sandbox.wait_end(process)
    compiled = process.messages.popleft() if process.messages else {}
    if not compiled.get("compiled"):
        return Outcome(False, error=str(compiled.get("error", "")) or _how(process))
    if ending.reason != "exit" or ending.exit_code != 0:
        return Outcome(True, error=_how(process), is_timeout=ending.reason == "time")
    return Outcome(True, process.stdout.decode("utf-8", "replace"))


class Functions:
    """The functions of some code, in a process that is started at need and again after one that hung or died."""

    def __init__(self, sandbox: Sandbox, code: str) -> None:
        self._sandbox, self._code = sandbox, code
        self._context: Any = None
        self._process: Process | None = None

    def call(self, name: str, args: Sequence[Any]) -> Outcome:
        """Calls a function (or a method of the class `Solution`) with plain values; the value is what it returned."""
        if self._process is None and (failed := self._start()) is not None:
            return failed
        assert self._process is not None
        self._process.begin_test()
        found = self._ask([{"yours": 1}, name])
        if "value" in found:
            found = self._ask([_given_back(found["value"]), *(encode(arg) for arg in args)])
        if "value" not in found:
            return self._failure(found)
        try:
            return Outcome(True, decode(found["value"]))
        except (Unreadable, RecursionError) as error:
            return Outcome(True, error=f"{name} returned no plain value: {error}"[:500])

    def close(self) -> None:
        """Ends the process."""
        if self._context is not None:
            self._context.__exit__(None, None, None)
        self._context = self._process = None

    def _start(self) -> Outcome | None:
        """Runs the code; what went wrong, or None."""
        self._context = self._sandbox.process("functions")
        self._process = process = self._context.__enter__()
        process.post({"code": self._code})
        compiled = self._next()
        if not compiled.get("compiled"):
            error = str(compiled.get("error", "")) or _how(process)
            self.close()
            return Outcome(False, error=error)
        ran = self._ask([{"yours": 0}])
        return None if "value" in ran else self._failure(ran)

    def _ask(self, args: list[Any]) -> dict[str, Any]:
        assert self._process is not None
        self._process.post({"do": "call", "args": args})
        return self._next()

    def _next(self) -> dict[str, Any]:
        """The next message; empty if the process is over."""
        assert self._process is not None
        process = self._process
        self._sandbox.wait(process, lambda: bool(process.messages))
        return process.messages.popleft() if process.messages else {}

    def _failure(self, answer: dict[str, Any]) -> Outcome:
        assert self._process is not None
        raised = answer.get("raised")
        if isinstance(raised, dict):
            error = f"{raised.get('base')}: {raised.get('text')}"[:500]
            return Outcome(True, error=error)
        self._sandbox.kill(self._process)
        outcome = Outcome(True, error=_how(self._process), is_timeout=self._process.why == "time")
        self.close()
        return outcome


def run_snippets(
    sandbox: Sandbox,
    code: str,
    tests: Sequence[str],
    *,
    setup: str = "",
    call: str | None = None,
    stop_early: bool = False,
    until: float = math.inf,
) -> SnippetOutcomes:
    """Runs tests, each a piece of Python that raises if it fails, against what `code` defines.

    setup: runs before each of them. call: the name of the function with which the tests' own `check` is called.
    stop_early: whether the first failure ends it. until: when it ends, by `time.monotonic`.
    """
    one_end, other_end = socket.socketpair()
    with (
        one_end,
        other_end,
        sandbox.process("functions", channel=one_end.fileno()) as functions,
        sandbox.process("tests", line=other_end.fileno()) as tester,
    ):
        one_end.close()  # or neither would learn of the other's end
        other_end.close()
        tester.post({"code": code, "tests": list(tests), "setup": setup, "call": call})
        return _watch_tests(sandbox, functions, tester, len(tests), stop_early, until)


def _watch_tests(
    sandbox: Sandbox, functions: Process, tester: Process, snippets: int, stop_early: bool, until: float
) -> SnippetOutcomes:
    """Takes the tester's messages. Code that breaks a limit is ended, which fails its test; then the tester goes on."""
    tester.deadline += _GRACE_S  # the tested code's own limits come first
    is_compiled, passed, error = False, [], ""
    count = snippets
    while True:
        sandbox.wait(tester, lambda: bool(tester.messages))
        if not tester.messages:
            break
        message = tester.messages.popleft()
        if "broken" in message:
            return SnippetOutcomes(False, broken=str(message["broken"]))
        if "compiled" in message:
            is_compiled = message["compiled"] is True
            error = error or str(message.get("error", ""))
        if "tests" in message:
            count = max(count, int(message["tests"]))
        if "passed" in message:
            passed.append(message["passed"] is True)
            error = error or str(message["error"])
            functions.begin_test()
            tester.begin_test()
            tester.deadline = time.monotonic() + tester.limits.wall_s + _GRACE_S
            if (stop_early and not passed[-1]) or time.monotonic() > until:
                break
    is_timeout = functions.why == "time" or tester.why == "time"
    if functions.why != "exit":
        error = _how(functions)
    elif tester.ending is not None and (tester.why != "exit" or tester.ending.exit_code != 0):
        error = error or f"the tests: {_how(tester)}"
    return SnippetOutcomes(is_compiled, tuple(passed), max(count, len(passed)), error, is_timeout)


def _given_back(value: Any) -> Any:
    """The name of a function as its own side knows it."""
    return {"yours": value["object"]} if isinstance(value, dict) and "object" in value else value


def _how(process: Process) -> str:
    """How a process ended, in a line: the limit that it met, or the last line of its stderr."""
    limits, code = process.limits, process.ending.exit_code if process.ending else 0
    met = {
        "time": f"longer than {limits.cpu_s:g} s of processor time or {limits.wall_s:g} s",
        "output": f"printed more than {limits.output_kb} KiB",
        "files": f"wrote more than {limits.folder_mb} MiB",
        "threads": f"more than {limits.threads} threads",
        "protocol": f"sent more than {MESSAGE_BYTES_MAX} bytes, or no message",
    }
    if process.why in met:
        return met[process.why]
    lines = process.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:500] if lines else f"ended with exit code {code}"
