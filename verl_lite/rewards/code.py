"""The reward for code, which runs a response's program against the tests of the ground truth in `verl_lite.sandbox`.

The program is the last fenced Python block of the response, or the whole response if it has no block. Expected values
never enter the process that runs the program, and this process evaluates nothing that the program sends. If the machine
cannot confine untrusted code, no program runs.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from verl_lite.json_types import ExtraInfo, GroundTruth, JsonMapping, JsonValue, KeywordArguments
from verl_lite.rewards.registry import register_reward
from verl_lite.sandbox import Limits, Outcome, Sandbox
from verl_lite.sandbox.values import encode

_FENCE = re.compile(r"(?P<before>[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)(?P<fence>```+(?!.*`)|~~~+)(?P<info>.*)")
"""The first line of a fenced block of Markdown, also in a list or a quotation."""
_QUOTE_MARK = re.compile(r"[ \t]*>[ ]?")
_PYTHON = re.compile(r"(?i)(?:python|py|pypy)[\d.]*")
_CLOCK_FACTOR = 3.0
"""Limit of a test's wall-clock time, as a multiple of its limit of processor time."""

_SPARE_S = 1.0
_TOLERANCE = 1e-6
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MOST_CONVERTED_DIGITS = 4300
"""Python's limit for the conversion of text to int."""

_REPLY_BYTES = 1 << 16
_REPLY_FACTOR = 16
"""Limits of the replies to calls: a number of bytes per call, plus a multiple of the size of the arguments and expected
values. Longer replies are wrong, because reading them would take memory and time outside the sandbox."""

_ONE_AT_A_TIME = threading.Lock()  # a sandbox is not thread-safe


@register_reward("rule/code", "apps", "taco", "codecontests", "codeforces", "code*")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: GroundTruth,
    extra_info: ExtraInfo | None = None,
    *,
    partial: bool = False,
    timeout_s: float = 4.0,
    total_timeout_s: float = 15.0,
    memory_mb: int = 1024,
    max_tests: int | None = None,
    allow_unsafe: bool = False,
) -> dict[str, float | str]:
    """Scores the program in a response: 1.0 if all tests pass, else 0.0; with `partial` the share of passed tests.

    Args:
        data_source, extra_info: not read.
        solution_str: the response.
        ground_truth: the tests; see `read_tests`.
        partial: True for the share of passed tests as score.
        timeout_s: limit of one test in seconds of processor time; its wall-clock limit is three times as long.
        total_timeout_s: wall-clock limit of all tests of a response, in seconds, less than reward.timeout_s. Tests that
            have not run by then have failed.
        memory_mb: address space of the program.
        max_tests: number of tests that are run, from the first one; None = all.
        allow_unsafe: True to run programs on a machine where the sandbox cannot confine them.

    Returns:
        score; acc (1.0 if all tests passed); passed (share of passed tests); compiled; timeouts (number of tests);
        error (the first error).

    Raises:
        ValueError: if the ground truth has no tests.
        UserError: if the machine cannot confine programs and `allow_unsafe` is false.
    """
    # before the program, so that invalid tests fail every sample of their prompt
    tests = read_tests(ground_truth, max_tests)
    code = extract_code(solution_str)
    if code.strip():
        limits = Limits(cpu_s=timeout_s, wall_s=_CLOCK_FACTOR * timeout_s, memory_mb=memory_mb)
        with _ONE_AT_A_TIME:
            sandbox = _sandbox(limits, allow_unsafe, os.getpid())
            # not counting the time in which this thread waits and the sandbox starts
            deadline = time.monotonic() + total_timeout_s
            outcome = _run_tests(sandbox, code, tests, stop_early=not partial, deadline=deadline)
    else:
        outcome = ProgramOutcome([Outcome(False, error="the answer has no code")], [False], 1)

    num_passed = sum(outcome.passed)
    share = num_passed / outcome.num_tests
    acc = float(num_passed == outcome.num_tests)
    is_compiled = all(test.is_compiled for test in outcome.tests)
    num_timeouts = sum(test.is_timeout for test in outcome.tests)
    return {
        "score": share if partial else acc,
        "acc": acc,
        "passed": share,
        "compiled": float(is_compiled),
        "timeouts": float(num_timeouts),
        "error": outcome.first_error(),
    }


@dataclass(frozen=True)
class ProgramOutcome:
    """The outcome of a program's tests.

    Attributes:
        tests: outcomes of the tests that ran.
        passed: for each of them, True if it passed.
        num_tests: number of all tests.
    """

    tests: list[Outcome]
    passed: list[bool]
    num_tests: int

    def first_error(self) -> str:
        """Returns the error of the first test that did not pass; "" if all passed."""
        for test, is_passed in zip(self.tests, self.passed, strict=True):
            if not is_passed:
                return test.error or "wrong output"
        return ""


def time_problems(kwargs: KeywordArguments, timeout_s: float, option: str) -> Iterator[str]:
    """Yields a message if a slow program could exceed reward.timeout_s: it would fail its sample instead of scoring 0.

    Args:
        kwargs: arguments of `compute_score`.
        timeout_s: the option reward.timeout_s.
        option: key of the arguments in the configuration.
    """
    default_s = inspect.signature(compute_score).parameters["total_timeout_s"].default
    total_s = kwargs.get("total_timeout_s", default_s)
    if total_s + _SPARE_S >= timeout_s:
        yield (
            f"reward.timeout_s={timeout_s:g} has to exceed {option}.total_timeout_s={total_s:g} by more than "
            f"{_SPARE_S:g} s, or slow programs would fail their samples instead of scoring 0: raise the first or lower "
            "the second"
        )


def extract_code(solution_str: str) -> str:
    """Returns the program in a response, searched after the last </think>.

    The program is the last fenced block labelled as Python, else the last unlabelled block, else the whole text if it
    has no block, else "". A block without a closing fence extends to the end of the text. The indentation of a block in
    a list is removed.
    """
    conclusion = solution_str.rpartition("</think>")[2]
    text = conclusion.replace("\r\n", "\n").replace("\r", "\n")
    blocks = _fenced_blocks(text)
    if not blocks:
        return _without_indentation(text)
    unlabelled = [code for language, code in blocks if not language]
    labelled = [code for language, code in blocks if _PYTHON.fullmatch(language)]
    # the last block with the label; without any, the last one that has none
    programs = ["", *unlabelled, *labelled]
    return programs[-1]


def _fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Returns the language, "" without one, and the content of each fenced block, by the rules of CommonMark."""
    blocks: list[tuple[str, str]] = []
    opening: re.Match[str] | None = None
    content: list[str] = []
    for line in text.splitlines(keepends=True):
        if opening is None:
            opening = _FENCE.match(line)
            content = []
        elif _closes(line, opening):
            blocks.append(_block(opening, content))
            opening = None
        else:
            content.append(line)
    # the answer was cut off, or the model has forgotten the closing fence
    if opening is not None:
        blocks.append(_block(opening, content))
    return blocks


def _closes(line: str, opening: re.Match[str]) -> bool:
    """Returns True for a line of the characters of the opening fence, at least as many."""
    mark = line.strip(" \t>\n")
    fence = opening["fence"]
    return set(mark) == set(fence) and len(mark) >= len(fence)


def _block(opening: re.Match[str], lines: Sequence[str]) -> tuple[str, str]:
    """Returns the language and the content of a block, without the indentation of its fence."""
    language = ""
    words = opening["info"].split()
    if words:
        # Pandoc and R Markdown write {.python} and {python}
        language = words[0].strip("{}.=,:")

    before = opening["before"]
    indentation = len(before.replace("\t", "    "))
    plain_lines = []
    for line in lines:
        num_spaces = len(line) - len(line.lstrip(" \t"))
        if ">" in before:
            line = _QUOTE_MARK.sub("", line, count=1)
        elif "\t" not in line[:num_spaces]:
            # a line that is indented less than the fence loses nothing but spaces
            line = line[min(num_spaces, indentation) :]
        plain_lines.append(line)
    code = "".join(plain_lines)
    return language, _without_indentation(code)


def _without_indentation(code: str) -> str:
    """Removes the common indentation of code whose first line is indented, which Python would refuse."""
    first_character = code.lstrip("\n")[:1]
    if first_character in (" ", "\t"):
        return textwrap.dedent(code)
    return code


def _run_tests(
    sandbox: Sandbox, code: str, tests: PairTests | SnippetTests, stop_early: bool, deadline: float
) -> ProgramOutcome:
    """Runs the tests of a program.

    Args:
        sandbox: where the program runs.
        code: the program.
        tests: the tests.
        stop_early: True to stop after the first failure.
        deadline: value of `time.monotonic()` at which the tests end.
    """
    passed: list[bool]
    if isinstance(tests, SnippetTests):
        outcomes, num_tests = sandbox.run_snippets(
            code,
            tests.snippets,
            setup=tests.setup,
            call=tests.call,
            stop_early=stop_early,
            total_s=deadline - time.monotonic(),
        )
        passed = [outcome.value is True for outcome in outcomes]
        return ProgramOutcome(outcomes, passed, num_tests)

    outcomes = []
    passed = []
    while len(outcomes) < len(tests.outputs):
        # at least one test runs: its outcome says whether the program could be compiled
        if outcomes and time.monotonic() > deadline:
            break
        first = len(outcomes)
        left_s = deadline - time.monotonic()
        new_outcomes = _run_next(sandbox, code, tests, first, stop_early, left_s)
        outcomes += new_outcomes

        truths = tests.outputs[first : len(outcomes)]
        for outcome, truth in zip(new_outcomes, truths, strict=True):
            passed.append(_has_passed(outcome, truth, is_script=tests.function is None))
        if not outcomes[-1].is_compiled or (stop_early and not all(passed)):
            break
    return ProgramOutcome(outcomes, passed, len(tests.outputs))


def _has_passed(outcome: Outcome, truth: JsonValue, *, is_script: bool) -> bool:
    """Returns True if a program's output, or the value that its function returned, is the expected one."""
    if outcome.error:
        return False
    if is_script:
        return is_right_output(str(outcome.value), str(truth))
    return is_right_value(outcome.value, truth)


def _run_next(
    sandbox: Sandbox, code: str, tests: PairTests, first: int, stop_early: bool, left_s: float
) -> list[Outcome]:
    """Runs the next tests of a program in one process.

    Args:
        sandbox: where the program runs.
        code: the program.
        tests: the tests.
        first: number of the first test that did not run.
        stop_early: True if the tests stop after the first failure.
        left_s: time that all further tests may take.
    """
    if tests.function is None:
        return [sandbox.run_script(code, tests.inputs[first], left_s)]

    end = len(tests.inputs)
    if stop_early:
        # most wrong programs fail their first test: start with one call per process, then double the number
        end = 2 * first + 1
    calls = tests.inputs[first:end]
    outputs = tests.outputs[first:end]

    # one reply more than calls: the first one says whether the code itself has run
    size_of_tests = len(json.dumps(encode([calls, outputs])))
    max_reply_bytes = _REPLY_BYTES * (1 + len(calls)) + _REPLY_FACTOR * size_of_tests
    return sandbox.call(code, tests.function, calls, left_s, max_reply_bytes)


# by process id, so that a fork of this process starts its own and does not share the connection
@functools.cache
def _sandbox(limits: Limits, allow_unsafe: bool, pid: int) -> Sandbox:
    """Returns the sandbox of these limits, one per process `pid`. Prints its permissions when it starts."""
    sandbox = Sandbox(limits, allow_unsafe=allow_unsafe)
    permissions = ", ".join(sandbox.could) or "perform none of the attempted actions"
    print(f"Code runs in a sandbox. It could {permissions}.")
    return sandbox


# ------------------------------------------------------------ test formats of data sets


@dataclass(frozen=True)
class PairTests:
    """Tests that consist of inputs and expected outputs.

    Without `function` the program is a script that reads each input, a text, from stdin and prints the output.
    Otherwise `function`, or the method of that name of a class `Solution`, is called with each input, a tuple of
    arguments, and returns the output.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[JsonValue, ...]
    function: str | None = None


@dataclass(frozen=True)
class SnippetTests:
    """Tests that are Python code and raise an exception if the program is wrong.

    Attributes:
        snippets: the code of each test.
        setup: code that runs before each snippet.
        call: name of the program's function that is passed to `check` of the test code.
    """

    snippets: tuple[str, ...]
    setup: str = ""
    call: str | None = None


def read_tests(ground_truth: GroundTruth, max_tests: int | None = None) -> PairTests | SnippetTests:
    """Reads the tests from a ground truth: JSON text, test code, or a list or dict of the same content.

    Args:
        ground_truth: the ground truth of a row.
        max_tests: number of tests to keep, from the first one; None = all.

    Raises:
        ValueError: if the ground truth has no tests. The message lists the expected formats.
    """
    content = ground_truth
    if isinstance(ground_truth, str):
        try:
            content = _from_json(ground_truth)
        except ValueError:
            content = [ground_truth] if ground_truth.strip() else []

    tests = None
    if isinstance(content, list | tuple) and content:
        tests = _tests_of_list(content, max_tests)
    elif isinstance(content, dict):
        tests = _tests_of_dict(content, max_tests)
    if tests is not None:
        return tests
    raise ValueError(
        'The ground truth has no tests; expected {"inputs": [...], "outputs": [...]}, with "fn_name" for a function; '
        '{"asserts": [...], "setup": ...}; {"test": code, "entry_point": name}; a list of asserts; or test code; found '
        f"{str(ground_truth)[:200]!r}"
    )


def _tests_of_list(content: Sequence[JsonValue], max_tests: int | None) -> PairTests | SnippetTests | None:
    """Returns the tests of a list of test codes, or of dicts with input and output; None for other lists."""
    snippets = [test for test in content if isinstance(test, str)]
    if len(snippets) == len(content):
        return SnippetTests(tuple(snippets[:max_tests]))

    pairs = []
    for test in content:
        if not isinstance(test, dict) or "input" not in test or "output" not in test:
            return None
        pairs.append(test)
    inputs = [pair["input"] for pair in pairs]
    outputs = [pair["output"] for pair in pairs]
    # all tests of a program call the same function
    function = pairs[0].get("fn_name")
    return _pairs(inputs, outputs, function, max_tests)


def _tests_of_dict(content: JsonMapping, max_tests: int | None) -> PairTests | SnippetTests | None:
    """Returns the tests of a dict with inputs and outputs, with asserts, or with test code; None for other dicts."""
    # the inputs and outputs of a dict with assert_case may be placeholders
    has_pairs = "outputs" in content and len(content.get("inputs", "")) > 0
    if has_pairs and not content.get("assert_case"):
        inputs = list(content["inputs"])
        outputs = list(content["outputs"])
        return _pairs(inputs, outputs, content.get("fn_name"), max_tests)

    setup = str(content.get("setup") or "")
    asserts = content.get("asserts", content.get("assert_case"))
    # by length, because a list of a parquet file can be an array, which has no truth value
    if asserts is not None and len(asserts):
        snippets = tuple(asserts)[:max_tests]
        return SnippetTests(snippets, setup)
    test = content.get("test")
    if isinstance(test, str):
        return SnippetTests((test,), setup, content.get("entry_point"))
    return None


def is_right_output(printed: str, expected: str) -> bool:
    """Returns True if a script printed the expected output.

    Compares line by line and ignores white space at the ends of lines and of the text. Words that are numbers are equal
    if they differ by at most one millionth and at least one of them has a decimal point or an exponent: 2.0 equals 2,
    but 007 does not equal 7. The difference is relative if neither is an integer.
    """
    lines = _stripped_lines(printed)
    expected_lines = _stripped_lines(expected)
    if lines == expected_lines:
        return True
    if len(lines) != len(expected_lines):
        return False
    pairs: list[tuple[str, str]] = []
    for line, expected_line in zip(lines, expected_lines, strict=True):
        words = line.split()
        truths = expected_line.split()
        if len(words) != len(truths):
            return False
        pairs += zip(words, truths, strict=True)
    return all(_is_right_word(word, truth) for word, truth in pairs)


def _stripped_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


def is_right_value(returned: JsonValue, expected: JsonValue) -> bool:
    """Returns True if a function returned the value that a data set expects.

    Expected values come from JSON, so a tuple or an array equals a list, and a number as a key equals its text. A value
    also equals a list that contains only this value. Floats may differ by one millionth, absolutely from an integer and
    relatively from a float. Python's own equality decides the rest: 1 equals true, "1" does not equal 1.

    returned: JSON of bounded size in the format of `sandbox.values.encode`. The program may have forged it, so nothing
    in it is evaluated.
    """
    try:
        value = _as_json(returned)
        if _is_close(value, expected):
            return True
        return isinstance(expected, list) and len(expected) == 1 and _is_close(value, expected[0])
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        # forged data, or a number out of range
        return False


def _pairs(
    inputs: Sequence[JsonValue], outputs: Sequence[JsonValue], function: JsonValue, max_tests: int | None
) -> PairTests:
    """Returns tests of a script or, if `function` is not empty, of that function."""
    if len(inputs) != len(outputs):
        raise ValueError(f"The ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    inputs = inputs[:max_tests]
    outputs = outputs[:max_tests]
    if not function:
        return PairTests(tuple(map(_as_lines, inputs)), tuple(map(_as_lines, outputs)))
    arguments = tuple(map(_arguments, inputs))
    values = tuple(map(_parsed, outputs))
    return PairTests(arguments, values, str(function))


def _as_lines(entry: JsonValue) -> str:
    """Returns the text of an input or output of a script; a list has one line per entry."""
    if isinstance(entry, list | tuple):
        return "\n".join(map(str, entry))
    return str(entry)


def _arguments(entry: JsonValue) -> tuple[JsonValue, ...]:
    """Returns the arguments of a call, from a list of arguments or from text with one JSON value per line."""
    if isinstance(entry, str):
        return tuple(_from_json(line) for line in entry.split("\n") if line.strip())
    if isinstance(entry, list | tuple):
        return tuple(entry)
    return (entry,)


def _parsed(output: JsonValue) -> JsonValue:
    """Returns the value of a JSON text. A text that is no JSON, and every other value, is the value itself."""
    if not isinstance(output, str):
        return output
    try:
        return _from_json(output)
    except ValueError:
        return output


def _from_json(text: str) -> JsonValue:
    """Parses JSON text of a data set, in which integers may have more than the 4300 digits that Python converts."""
    value: JsonValue = json.loads(text, parse_int=_integer)
    return value


def _integer(digits: str) -> int:
    if len(digits) < _MOST_CONVERTED_DIGITS:
        return int(digits)
    # a Decimal has no such limit
    return int(Decimal(digits))


def _is_right_word(word: str, truth: str) -> bool:
    """Returns True if a printed word is the expected one. Both may be numbers, of which at least one is no integer."""
    if word == truth:
        return True
    if not _NUMBER.fullmatch(word) or not _NUMBER.fullmatch(truth):
        return False
    num_integers = sum(text.lstrip("+-").isdigit() for text in (word, truth))
    # 007 is not 7: it may be a text of digits
    if num_integers == 2:
        return False
    if num_integers == 0:
        return _is_near(float(word), float(truth))
    try:
        # a float would lose digits of a long integer
        difference = Decimal(word) - Decimal(truth)
        return abs(difference) <= Decimal(_TOLERANCE)
    except ArithmeticError:
        # an exponent that Decimal does not have
        return False


def _is_near(value: float, truth: float) -> bool:
    """Returns True if two finite numbers differ by at most one millionth, absolutely or relatively."""
    is_close = math.isclose(value, truth, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    # 1e999 and 2e999 are both infinite
    return is_close and math.isfinite(value)


def _as_json(data: JsonValue) -> JsonValue:
    """Converts encoded data to JSON types. Values of other types become NaN, which equals nothing."""
    if isinstance(data, list):
        return [_as_json(entry) for entry in data]
    if not isinstance(data, dict):
        return data
    # raises ValueError for forged data with another number of entries
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


def _is_close(value: JsonValue, expected: JsonValue) -> bool:
    """Returns True if two JSON values are equal, with the tolerance of `is_right_value` for floats."""
    match value, expected:
        case int() | float(), int() | float():
            return _is_close_number(value, expected)
        case list(), list():
            return len(value) == len(expected) and all(map(_is_close, value, expected))
        case dict(), dict():
            if value.keys() != expected.keys():
                return False
            return all(_is_close(value[key], expected[key]) for key in expected)
    return bool(value == expected)


def _is_close_number(value: float, expected: float) -> bool:
    """Compares two numbers, each of which is an integer or a float."""
    num_floats = isinstance(value, float) + isinstance(expected, float)
    if value == expected or num_floats == 0:
        return value == expected
    # an integer is exact, so its size does not make the tolerance larger
    if num_floats == 1:
        return abs(value - expected) <= _TOLERANCE
    return _is_near(value, expected)
