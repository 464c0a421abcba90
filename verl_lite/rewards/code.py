"""Code: the answer's program is right if it passes the tests of the ground truth, in a sandbox (`verl_lite.sandbox`).

The last fenced Python block of the answer counts, or the whole answer if it has none. What is expected never enters the
process in which the answer runs, and nothing of an answer is evaluated here. Where the machine cannot hold untrusted
code, nothing runs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_lite.rewards.registry import register_reward
from verl_lite.sandbox import Limits, Outcome, Sandbox

# Possessive quantifiers (*+) read each line once.
_BLOCK = re.compile(r"^[ \t]*+```[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_CLOCK_FACTOR = 3.0
"""So many seconds by the clock may a test take for each of processor time."""

_SPARE_S = 1.0
_TOLERANCE = 1e-6
_REPLY_BYTES, _REPLY_FACTOR = 1 << 16, 16
"""A longer reply to a call than this many bytes, and this many times the arguments and the right value, is wrong: it
would take memory and time outside of the sandbox."""

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
    tests, code = read_tests(ground_truth, max_tests), extract_code(solution_str)
    outcomes, passed, count = [Outcome(False, error="the answer has no code")], [False], 1
    if code.strip():
        limits = Limits(cpu_s=timeout_s, wall_s=_CLOCK_FACTOR * timeout_s, memory_mb=memory_mb)
        with _ONE_AT_A_TIME:
            sandbox = _sandbox(limits, allow_unsafe, os.getpid())
            outcomes, passed, count = _run_tests(sandbox, code, tests, not partial, time.monotonic() + total_timeout_s)
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


def time_problems(kwargs: Mapping[str, Any], timeout_s: float, option: str) -> Iterator[str]:
    """One sentence if a slow program would be a failure of the reward. kwargs: of `compute_score`, from `option`."""
    total_s = kwargs.get("total_timeout_s", inspect.signature(compute_score).parameters["total_timeout_s"].default)
    if total_s + _SPARE_S >= timeout_s:
        yield (
            f"reward.timeout_s={timeout_s:g}: all tests of a program may take {total_s:g} s ({option}.total_timeout_s);"
            f" expected are {_SPARE_S:g} s more, or a slow program would be a failure and no 0: raise it or lower that"
        )


def extract_code(solution_str: str) -> str:
    """The last fenced block of Python after a thought, or the last one without a language, or the whole text. A block
    without an end goes to the end of the text."""
    text = solution_str.rpartition("</think>")[2]
    blocks = _BLOCK.findall(text)
    for languages in (_PYTHON, ("",)):
        if found := [code for language, code in blocks if language.lower() in languages]:
            return found[-1]
    return "" if blocks else text


def _run_tests(
    sandbox: Sandbox, code: str, tests: PairTests | SnippetTests, stop_early: bool, until: float
) -> tuple[list[Outcome], list[bool], int]:
    """Outcomes of the tests that ran, whether each was passed, and how many tests there are."""
    outcomes: list[Outcome] = []
    passed: list[bool] = []
    if isinstance(tests, SnippetTests):
        options: dict[str, Any] = {"setup": tests.setup, "call": tests.call, "stop_early": stop_early}
        outcomes, count = sandbox.run_snippets(code, tests.snippets, total_s=until - time.monotonic(), **options)
        return outcomes, [outcome.value is True for outcome in outcomes], count
    while len(outcomes) < len(tests.outputs) and not (outcomes and time.monotonic() > until):
        done, left_s = len(outcomes), until - time.monotonic()
        if tests.function is None:
            more = [sandbox.run_script(code, tests.inputs[done], left_s)]
        else:  # wrong programs mostly fail at once: one call first, then ever more of them in one process
            end = 2 * done + 1 if stop_early else len(tests.inputs)
            calls, right = (
                tests.inputs[done:end],
                json.dumps([tests.inputs[done:end], tests.outputs[done:end]], default=str),
            )
            room = _REPLY_BYTES * (1 + len(calls)) + _REPLY_FACTOR * len(right)
            more = sandbox.call(code, tests.function, calls, left_s, room)
        is_right = is_right_output if tests.function is None else is_right_value
        outcomes += more
        truths = tests.outputs[done : len(outcomes)]
        passed += [not o.error and is_right(o.value, truth) for o, truth in zip(more, truths, strict=True)]
        if not outcomes[-1].is_compiled or (stop_early and not all(passed)):
            break
    return outcomes, passed, len(tests.outputs)


@functools.cache
def _sandbox(limits: Limits, allow_unsafe: bool, pid: int) -> Sandbox:
    """One fork server for each set of limits, for the life of the process `pid`. What holds is printed once."""
    sandbox = Sandbox(limits, allow_unsafe=allow_unsafe)
    print(f"Code runs in a sandbox. It could {', '.join(sandbox.could) or 'do nothing that was tried'}.")
    return sandbox


# ------------------------------------------------------------ tests as data sets write them


@dataclass(frozen=True)
class PairTests:
    """A script reads each input from stdin and prints the output; or `function`, or the method of that name of a class
    `Solution`, is called with the arguments in each input and returns the output."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    function: str | None = None


@dataclass(frozen=True)
class SnippetTests:
    """Pieces of Python that raise where the code is wrong. setup runs before each; call: the function that the tests'
    own `check` is called with."""

    snippets: tuple[str, ...]
    setup: str = ""
    call: str | None = None


def read_tests(ground_truth: Any, max_tests: int | None = None) -> PairTests | SnippetTests:
    """The tests of a ground truth: JSON text, test code, or what either stands for.

    max_tests: only so many, from the beginning. Raises ValueError with what was expected.
    """
    found = ground_truth
    if isinstance(ground_truth, str):
        try:
            found = json.loads(ground_truth)
        except ValueError:
            found = [ground_truth] if ground_truth.strip() else []
    if isinstance(found, list | tuple) and found:
        if all(isinstance(test, str) for test in found):
            return SnippetTests(tuple(found[:max_tests]))
        if all(isinstance(test, dict) and {"input", "output"} <= set(test) for test in found):
            names = [test.get("fn_name") for test in found]
            return _pairs([t["input"] for t in found], [t["output"] for t in found], names[0], max_tests)
    if isinstance(found, dict):
        setup, asserts = str(found.get("setup") or ""), found.get("asserts", found.get("assert_case"))
        if "outputs" in found and len(found.get("inputs", "")) and not found.get("assert_case"):
            return _pairs(list(found["inputs"]), list(found["outputs"]), found.get("fn_name"), max_tests)
        if asserts is not None and len(asserts):
            return SnippetTests(tuple(asserts)[:max_tests], setup)
        if isinstance(found.get("test"), str):
            return SnippetTests((found["test"],), setup, found.get("entry_point"))
    raise ValueError(
        'The ground truth has no tests; expected {"inputs": [...], "outputs": [...]}, with "fn_name" for a function; '
        '{"asserts": [...], "setup": ...}; {"test": code, "entry_point": name}; a list of asserts; or test code; found '
        f"{str(ground_truth)[:200]!r}"
    )


def is_right_output(printed: str, expected: str) -> bool:
    """Whether a script's output is the expected one: line by line, apart from white space at ends of lines and of the
    text; words that are numbers with a point or an exponent within one millionth."""
    lines, right = ([line.rstrip() for line in text.strip().split("\n")] for text in (printed, expected))
    words, truths = [line.split() for line in lines], [line.split() for line in right]
    return lines == right or (
        [len(line) for line in words] == [len(line) for line in truths]
        and all(map(_is_right_word, itertools.chain(*words), itertools.chain(*truths)))
    )


def is_right_value(returned: Any, expected: Any) -> bool:
    """Whether a function returned what a data set expects, which comes from JSON: a tuple or an array is as good as a
    list, a key that is a number as good as its text, and a value may be expected as the only one of a list.

    returned: as `sandbox.values.encode` writes it, bounded JSON that may be forged; nothing in it is evaluated.
    """
    is_single = isinstance(expected, list) and len(expected) == 1
    try:
        value = _as_json(returned)
        return _is_close(value, expected) or (is_single and _is_close(value, expected[0]))
    except (ValueError, TypeError, ArithmeticError, RecursionError):  # no value, or no number that arithmetic can hold
        return False


def _pairs(inputs: Sequence[Any], outputs: Sequence[Any], function: Any, max_tests: int | None) -> PairTests:
    if len(inputs) != len(outputs):
        raise ValueError(f"The ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    inputs, outputs = inputs[:max_tests], outputs[:max_tests]
    if function:
        return PairTests(tuple(map(_arguments, inputs)), tuple(map(_parsed, outputs)), str(function))
    texts = [
        ["\n".join(map(str, one)) if isinstance(one, list | tuple) else str(one) for one in column]
        for column in (inputs, outputs)
    ]
    return PairTests(tuple(texts[0]), tuple(texts[1]))


def _arguments(entry: Any) -> tuple[Any, ...]:
    """A list of arguments, or text with one JSON value a line."""
    if isinstance(entry, str):
        return tuple(json.loads(line) for line in entry.split("\n") if line.strip())
    return tuple(entry) if isinstance(entry, list | tuple) else (entry,)


def _parsed(output: Any) -> Any:
    try:
        return json.loads(output) if isinstance(output, str) else output
    except ValueError:
        return output


def _is_right_word(word: str, truth: str) -> bool:
    try:
        return word == truth or (any(mark in truth for mark in ".eE") and _is_near(float(word), float(truth)))
    except ValueError:
        return False


def _is_near(value: float, truth: float) -> bool:
    return math.isclose(value, truth, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _as_json(data: Any) -> Any:
    """What is encoded, with what JSON can hold; another kind of value is equal to nothing."""
    if isinstance(data, list):
        return [_as_json(entry) for entry in data]
    if not isinstance(data, dict):
        return data
    [(kind, content)] = data.items()
    match kind, content:
        case "array", _:
            return _as_json(content)
        case "tuple", [entries]:
            return _as_json(entries)
        case "dict", [pairs]:
            return {str(_as_json(key)): _as_json(entry) for key, entry in pairs}
        case "Fraction", [int(above), int(below)]:
            return above / below
        case "Decimal", [str(digits)]:
            return float(digits)
        case "int", str(digits):
            return int(digits, 16)
    return math.nan


def _is_close(value: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(value, int | float):
        return value == expected or _is_near(value, expected)
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(_is_close, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(_is_close(value[key], expected[key]) for key in expected)
    return bool(value == expected)
