"""The tests of a programming task, as data sets write them into the ground truth, and when an output is right.

`read_tests` knows the forms of verl and of the sets made for it: inputs with outputs, for a script or for a function
(APPS, TACO, CodeContests, Codeforces), lists of asserts (MBPP), test code with an entry point (HumanEval).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_TOLERANCE = 1e-6


@dataclass(frozen=True)
class ScriptTests:
    """A script reads each input from stdin and prints the output."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class CallTests:
    """`function`, or the method of that name of a class `Solution`, is called with arguments and returns the output."""

    function: str
    arguments: tuple[tuple[Any, ...], ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class SnippetTests:
    """Pieces of Python that raise where the code is wrong. setup runs before each; call: the function that the tests'
    own `check` is called with."""

    snippets: tuple[str, ...]
    setup: str = ""
    call: str | None = None


Tests = ScriptTests | CallTests | SnippetTests

_EXPECTED = (
    '{"inputs": [...], "outputs": [...]}, with "fn_name" for a function; {"asserts": [...], "setup": ...}; '
    '{"test": code, "entry_point": name}; a list of asserts; or test code'
)


def read_tests(ground_truth: Any, max_tests: int | None = None) -> Tests:
    """The tests of a ground truth: JSON text, test code, or what either stands for.

    max_tests: only so many, from the beginning. Raises ValueError with what was expected.
    """
    found = ground_truth
    if isinstance(ground_truth, str):
        try:
            found = json.loads(ground_truth)
        except ValueError:
            return SnippetTests(_not_empty((ground_truth,) if ground_truth.strip() else ()))
    if isinstance(found, list | tuple):
        if found and all(isinstance(test, str) for test in found):
            return SnippetTests(tuple(found[:max_tests]))
        if found and all(isinstance(test, dict) and {"input", "output"} <= set(test) for test in found):
            names = [test.get("fn_name") for test in found]
            return _pairs([t["input"] for t in found], [t["output"] for t in found], names[0], max_tests)
    if isinstance(found, dict):
        if "inputs" in found and "outputs" in found and not found.get("assert_case"):
            return _pairs(list(found["inputs"]), list(found["outputs"]), found.get("fn_name"), max_tests)
        asserts = found.get("asserts", found.get("assert_case"))
        if asserts is not None:
            return SnippetTests(_not_empty(tuple(asserts))[:max_tests], str(found.get("setup") or ""))
        if isinstance(found.get("test"), str):
            return SnippetTests((found["test"],), str(found.get("setup") or ""), found.get("entry_point"))
    raise ValueError(f"The ground truth has no tests; expected {_EXPECTED}; found {str(ground_truth)[:200]!r}")


def is_right_output(printed: str, expected: str) -> bool:
    """Whether a script's output is the expected one: line by line, apart from white space at ends of lines and of the
    text; words that are numbers with a point or an exponent within one millionth."""
    lines, right = _lines(printed), _lines(expected)
    if lines == right:
        return True
    words, right_words = [line.split() for line in lines], [line.split() for line in right]
    return [len(line) for line in words] == [len(line) for line in right_words] and all(
        _is_right_word(word, truth)
        for line, truths in zip(words, right_words, strict=True)
        for word, truth in zip(line, truths, strict=True)
    )


def is_right_value(returned: Any, expected: Any) -> bool:
    """Whether a function returned what a data set expects, which comes from JSON: a tuple or an array is as good as a
    list, a key that is a number as good as its text, and a value may be expected as the only one of a list.

    returned: as `sandbox.values.encode` writes it, bounded JSON that may be forged; nothing in it is evaluated.
    """
    try:
        value = _as_json(returned)
        return _is_close(value, expected) or (
            isinstance(expected, list) and len(expected) == 1 and _is_close(value, expected[0])
        )
    except (ValueError, TypeError, ArithmeticError, RecursionError):  # no value, or no number that arithmetic can hold
        return False


def _pairs(inputs: Sequence[Any], outputs: Sequence[Any], function: Any, max_tests: int | None) -> Tests:
    if len(inputs) != len(outputs):
        raise ValueError(f"The ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    inputs, outputs = _not_empty(tuple(inputs[:max_tests])), tuple(outputs[:max_tests])
    if function:
        arguments = tuple(_arguments(each) for each in inputs)
        return CallTests(str(function), arguments, tuple(_parsed(output) for output in outputs))
    return ScriptTests(tuple(_text(each) for each in inputs), tuple(_text(each) for each in outputs))


def _not_empty(tests: tuple[Any, ...]) -> tuple[Any, ...]:
    if not tests:
        raise ValueError(f"The ground truth has no tests; expected {_EXPECTED}")
    return tests


def _text(entry: Any) -> str:
    """Text, or lines of it."""
    return "\n".join(str(line) for line in entry) if isinstance(entry, list | tuple) else str(entry)


def _arguments(entry: Any) -> tuple[Any, ...]:
    """A list of arguments, or text with one JSON value a line."""
    if isinstance(entry, str):
        return tuple(json.loads(line) for line in entry.split("\n") if line.strip())
    return tuple(entry) if isinstance(entry, list | tuple) else (entry,)


def _parsed(output: Any) -> Any:
    if not isinstance(output, str):
        return output
    try:
        return json.loads(output)
    except ValueError:
        return output


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


def _is_right_word(word: str, truth: str) -> bool:
    if word == truth:
        return True
    if not any(mark in truth for mark in ".eE"):
        return False
    try:
        return math.isclose(float(word), float(truth), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False


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
        return value == expected or math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(_is_close, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(_is_close(value[key], expected[key]) for key in expected)
    return bool(value == expected)
