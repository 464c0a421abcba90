"""Code: the answer's program is right if it passes the tests of the ground truth, in a sandbox (`verl_lite.sandbox`).

The last fenced Python block of the answer counts, or the whole answer if it has none. What is expected never enters the
process in which the answer runs, and nothing of an answer is evaluated here. Where the machine cannot hold untrusted
code, nothing runs.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verl_lite.rewards.code_tests import (
    CallTests,
    ScriptTests,
    Tests,
    is_right_output,
    is_right_value,
    read_tests,
)
from verl_lite.rewards.dispatch import register_reward
from verl_lite.sandbox import Limits, Outcome, Sandbox

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_CLOCK_FACTOR = 3.0
"""So many seconds by the clock may a test take for each of processor time."""

_SPARE_S = 1.0
_ONE_AT_A_TIME = threading.Lock()


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
    after which the tests of an answer end, so that the rest has failed; less than reward.timeout_s. memory_mb: of the
    program. max_tests: only the first ones. allow_unsafe: run where the sandbox cannot hold code.
    Extras: acc (all passed), passed (share), compiled, timeouts (tests), error (the first one).
    Raises ValueError for a ground truth without tests, UserError on a machine without protection.
    """
    tests = read_tests(ground_truth, max_tests)
    code = extract_code(solution_str)
    if not code.strip():
        return _report([Outcome(False, error="the answer has no code")], [False], 1, partial)
    limits = Limits(cpu_s=timeout_s, wall_s=_CLOCK_FACTOR * timeout_s, memory_mb=memory_mb)
    with _ONE_AT_A_TIME:
        sandbox = _sandbox(limits, allow_unsafe, os.getpid())
        return _report(*_run_tests(sandbox, code, tests, not partial, time.monotonic() + total_timeout_s), partial)


def time_problems(kwargs: Mapping[str, Any], timeout_s: float, option: str) -> Iterator[str]:
    """One sentence if all tests of an answer may take as long as reward.timeout_s, which would make a slow program a
    failure of the reward. kwargs: of `compute_score`, as `option` gives them."""
    total_s = kwargs.get("total_timeout_s", inspect.signature(compute_score).parameters["total_timeout_s"].default)
    if total_s + _SPARE_S >= timeout_s:
        yield (
            f"reward.timeout_s={timeout_s:g}: all tests of a program may take {total_s:g} s ({option}.total_timeout_s),"
            f" and with less than {_SPARE_S:g} s to spare a slow program would be no 0 but a failure: raise "
            "reward.timeout_s, or lower that"
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


def _run_tests(
    sandbox: Sandbox, code: str, tests: Tests, stop_early: bool, until: float
) -> tuple[list[Outcome], list[bool], int]:
    """Outcomes of the tests that ran, whether each was passed, and how many tests there are."""
    if isinstance(tests, ScriptTests | CallTests):
        is_right: Callable[[Any, Any], bool] = is_right_output
        outcomes: list[Outcome] = []

        def right(outcomes: list[Outcome]) -> list[bool]:
            return [not o.error and is_right(o.value, truth) for o, truth in zip(outcomes, tests.outputs, strict=False)]

        def is_enough(more: list[Outcome]) -> bool:
            return time.monotonic() > until or (stop_early and not all(right([*outcomes, *more])))

        while len(outcomes) < len(tests.outputs) and not (outcomes and is_enough([])):
            left_s = until - time.monotonic()
            if isinstance(tests, ScriptTests):
                outcomes.append(sandbox.run_script(code, tests.inputs[len(outcomes)], left_s))
            else:
                is_right = is_right_value
                calls = tests.arguments[len(outcomes) :]
                outcomes += sandbox.call(code, tests.function, calls, left_s, is_enough)
            if not outcomes[-1].is_compiled:
                break
        return outcomes, right(outcomes), len(tests.outputs)
    left_s = until - time.monotonic()
    outcomes, count = sandbox.run_snippets(
        code, tests.snippets, setup=tests.setup, call=tests.call, stop_early=stop_early, total_s=left_s
    )
    return outcomes, [outcome.value is True for outcome in outcomes], count


def _report(outcomes: list[Outcome], passed: list[bool], count: int, partial: bool) -> dict[str, float | str]:
    errors = [o.error or "wrong output" for o, is_right in zip(outcomes, passed, strict=True) if not is_right]
    share, acc = sum(passed) / count, float(sum(passed) == count)
    return {
        "score": share if partial else acc,
        "acc": acc,
        "passed": share,
        "compiled": float(all(outcome.is_compiled for outcome in outcomes)),
        "timeouts": float(sum(outcome.is_timeout for outcome in outcomes)),
        "error": next(iter(errors), ""),
    }


@functools.cache
def _sandbox(limits: Limits, allow_unsafe: bool, pid: int) -> Sandbox:
    """One fork server for each set of limits, for the life of the process `pid`. What holds is printed once."""
    sandbox = Sandbox(limits, allow_unsafe=allow_unsafe)
    protection = sandbox.protection
    missing = ", ".join(protection.could) or "do nothing that was tried"
    print(f"Code runs in a sandbox: {'; '.join(protection.layers)}. It could {missing}.")
    return sandbox
