"""Code: the answer's program is right if it passes the tests of the ground truth, in a sandbox (`verl_lite.sandbox`).

The last fenced Python block of the answer counts, or the whole answer if it has none. What is expected never enters the
process in which the answer runs. Where the machine cannot hold untrusted code, nothing runs.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_lite.rewards.code_tests import (
    CallTests,
    ScriptTests,
    SnippetTests,
    Tests,
    is_right_output,
    is_right_value,
    read_tests,
)
from verl_lite.rewards.dispatch import register_reward
from verl_lite.sandbox import Limits, Sandbox
from verl_lite.sandbox.runs import Functions, Outcome, run_script, run_snippets

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_CLOCK_FACTOR = 3.0
"""So many seconds by the clock may a test take for each of processor time."""

_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class _Verdict:
    """is_compiled: the code is Python. passed, tests: how many. timeouts: runs that a limit of time ended."""

    is_compiled: bool
    passed: int
    tests: int
    timeouts: int
    error: str


@register_reward("rule/code", "apps", "taco", "codecontests", "codeforces", "code*")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    partial: bool = False,
    timeout_s: float = 4.0,
    total_timeout_s: float = 15.0,
    memory_mb: int = 1024,
    max_tests: int | None = None,
    allow_unsafe: bool = False,
) -> dict[str, float | str]:
    """score: 1.0 if all tests pass, else 0.0; with `partial` the share that passes.

    timeout_s: processor time of one test (by the clock three times as much). total_timeout_s: seconds by the clock
    after which no further test of an answer begins, so that it has failed; with one more test that has to be less than
    reward.timeout_s. memory_mb: of the program. max_tests: only the first ones. allow_unsafe: run where the sandbox
    cannot hold code.
    Extras: acc (all passed), passed (share), compiled, timeouts (tests), error (the first one).
    Raises ValueError for a ground truth without tests, UserError on a machine without protection.
    """
    tests = read_tests(ground_truth, max_tests)
    code = extract_code(solution_str)
    if not code.strip():
        return _report(_Verdict(False, 0, 1, 0, "the answer has no code"), partial)
    limits = Limits(cpu_s=timeout_s, wall_s=_CLOCK_FACTOR * timeout_s, memory_mb=memory_mb)
    with _ONE_AT_A_TIME:
        sandbox = _sandbox(limits, allow_unsafe, os.getpid())
        verdict = _judge(sandbox, code, tests, not partial, time.monotonic() + total_timeout_s)
    return _report(verdict, partial)


def time_problems(kwargs: Mapping[str, Any], timeout_s: float, option: str) -> Iterator[str]:
    """One sentence if all tests of an answer may take longer than reward.timeout_s, which would make a slow program a
    failure of the reward. kwargs: of `compute_score`, as `option` gives them."""
    defaults = inspect.signature(compute_score).parameters
    test_s, total_s = (kwargs.get(name, defaults[name].default) for name in ("timeout_s", "total_timeout_s"))
    longest = total_s + _CLOCK_FACTOR * test_s
    if longest >= timeout_s:
        yield (
            f"reward.timeout_s={timeout_s:g}: all tests of a program may take {longest:g} s ({option}: total_timeout_s "
            f"{total_s:g}, and {_CLOCK_FACTOR:g} times timeout_s {test_s:g} for the last test), and a program that is "
            "too slow would be no 0 but a failure: raise reward.timeout_s, or lower those"
        )


def extract_code(solution_str: str) -> str:
    """The last fenced block of Python after a thought, or the last one without a language, or the whole text. A block
    without an end goes to the end of the text."""
    text = solution_str.rpartition("</think>")[2]
    blocks = _BLOCK.findall(text)
    for languages in (_PYTHON, ("",)):
        found = [code for language, code in blocks if language.lower() in languages]
        if found:
            return found[-1]
    return "" if blocks else text


def _judge(sandbox: Sandbox, code: str, tests: Tests, stop_early: bool, until: float) -> _Verdict:
    if isinstance(tests, SnippetTests):
        return _judge_snippets(sandbox, code, tests, stop_early, until)
    runs = _scripts(sandbox, code, tests) if isinstance(tests, ScriptTests) else _calls(sandbox, code, tests)
    passed, timeouts, error, is_compiled = 0, 0, "", True
    for outcome, is_right in runs:
        passed += is_right
        timeouts += outcome.is_timeout
        is_compiled &= outcome.is_compiled
        error = error or outcome.error or ("" if is_right else "wrong output")
        if (stop_early and not is_right) or not is_compiled or time.monotonic() > until:
            break
    runs.close()
    return _Verdict(is_compiled, passed, len(tests.outputs), timeouts, error)


def _scripts(sandbox: Sandbox, code: str, tests: ScriptTests) -> Generator[tuple[Outcome, bool], None, None]:
    for given, expected in zip(tests.inputs, tests.outputs, strict=True):
        outcome = run_script(sandbox, code, given)
        yield outcome, outcome.value is not None and is_right_output(outcome.value, expected)


def _calls(sandbox: Sandbox, code: str, tests: CallTests) -> Generator[tuple[Outcome, bool], None, None]:
    functions = Functions(sandbox, code)
    try:
        for arguments, expected in zip(tests.arguments, tests.outputs, strict=True):
            outcome = functions.call(tests.function, arguments)
            yield outcome, not outcome.error and is_right_value(outcome.value, expected)
    finally:
        functions.close()


def _judge_snippets(sandbox: Sandbox, code: str, tests: SnippetTests, stop_early: bool, until: float) -> _Verdict:
    outcomes = run_snippets(
        sandbox, code, tests.snippets, setup=tests.setup, call=tests.call, stop_early=stop_early, until=until
    )
    if outcomes.broken:
        raise ValueError(f"The tests of the ground truth are no Python: {outcomes.broken}")
    passed = sum(outcomes.passed)
    return _Verdict(outcomes.is_compiled, passed, outcomes.count, int(outcomes.is_timeout), outcomes.error)


def _report(verdict: _Verdict, partial: bool) -> dict[str, float | str]:
    share = verdict.passed / verdict.tests
    acc = float(verdict.passed == verdict.tests)
    return {
        "score": share if partial else acc,
        "acc": acc,
        "passed": share,
        "compiled": float(verdict.is_compiled),
        "timeouts": float(verdict.timeouts),
        "error": verdict.error,
    }


@functools.cache
def _sandbox(limits: Limits, allow_unsafe: bool, pid: int) -> Sandbox:
    """One fork server for each set of limits, for the life of the process `pid`. What holds is printed once."""
    sandbox = Sandbox(limits, allow_unsafe=allow_unsafe)
    protection = sandbox.protection
    missing = ", ".join(protection.missing()) or "do nothing that was tried"
    print(f"Code runs in a sandbox: {'; '.join(protection.layers)}. It could {missing}.")
    return sandbox
