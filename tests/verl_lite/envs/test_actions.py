"""What an agent wrote, and the action or the calls that are understood."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from verl_lite.envs.actions import ActionParser, ParsedAction
from verl_lite.envs.calculator import evaluate, number_in, written
from verl_lite.envs.tool_calls import ToolCall, parse_tool_calls
from verl_lite.errors import UserError

MOVES = {0: "Left", 1: "Down"}


@pytest.mark.parametrize(
    ("text", "action", "content"),
    [
        ("<answer>Left</answer>", 0, "Left"),
        ("I go <answer> down\n</answer><|im_end|>", 1, "down"),
        ("<answer>LEFT</answer> or <answer>Down</answer>", 0, "LEFT"),  # the first counts
        ("<answer>Up</answer>", None, "Up"),
        ("<answer></answer>", None, ""),
        ("Left", None, "Left"),
        ("", None, ""),
    ],
)
def test_an_action_is_found(text: str, action: int | None, content: str) -> None:
    assert ActionParser(lookup=MOVES)(text) == ParsedAction(action, content)


def test_thoughts_and_action_are_two_groups() -> None:
    parser = ActionParser(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", MOVES)
    assert parser("<think>a\nhole</think>\n<answer>Down</answer>") == ParsedAction(1, "Down")
    assert parser("<answer>Down</answer>").action is None


def test_without_names_any_text_is_an_action_and_keys_of_a_file_are_numbers() -> None:
    assert ActionParser()("<answer>x = 3</answer>").action == "x = 3"
    assert ActionParser(lookup={"0": "Left", "b": "Down"}).names == {0: "Left", "b": "Down"}
    assert ActionParser(lookup=["Left", "Down"])("<answer>down</answer>").action == 1


@pytest.mark.parametrize("pattern", ["no group", "(a)(b)(c)", "("])
def test_a_pattern_has_one_group_or_two(pattern: str) -> None:
    with pytest.raises(UserError, match="action_pattern=" + re.escape(repr(pattern))):
        ActionParser(pattern)


# --------------------------------------------------------------------------------------------------- calls of tools


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', [ToolCall("f", {"x": 1})]),
        ('a <tool_call>\n{"name": "f"}\n</tool_call> b', [ToolCall("f")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [ToolCall("f", {"x": 1})]),
        ('<tool_call>{"name": "f"}', [ToolCall("f")]),  # cut off by the token limit, and complete all the same
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>', [ToolCall("f"), ToolCall("g")]),
        (
            "<tool_call>\n<function=f>\n<parameter=x>\n1 + 2\n</parameter>\n<parameter=y>\na\nb\n</parameter>\n"
            "</function>\n</tool_call>",
            [ToolCall("f", {"x": "1 + 2", "y": "a\nb"})],
        ),
        ("<answer>3</answer>", []),
    ],
)
def test_calls_are_read(text: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>f(1)</tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", 'needs a "name"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "has to be an object"),
        ('<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "f", "arguments": {"n": ' + "7" * 5000 + "}}</tool_call>", "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text: str, problem: str) -> None:
    (call,) = parse_tool_calls(text)
    assert call.problem is not None and problem in call.problem


# ------------------------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1+2)*3", 9),
        ("7 // 2 + 7 % 2", 4),
        ("-3 - -2", -1),
        ("1/3", Fraction(1, 3)),
        ("0.1 + 0.2", Fraction(3, 10)),  # exactly, not 0.30000000000000004
    ],
)
def test_expressions_are_evaluated_exactly(expression: str, value: Fraction) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "().__class__",
        "lambda: 1",
        "x",
        "True",
        "'a' * 9",
        "9 ** 9 ** 9",
        "2 ** 0.5",
        "(2 ** 999) ** 999",
        "1 if 1 else 2",
        "[1][0]",
        "1 +",
        "",
        "round(1, 2)",
        "max()",
        "1" * 500,
        "(" * 300 + "1" + ")" * 300,
        "1j",
    ],
)
def test_what_is_not_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ValueError):
        evaluate(expression)


def test_numbers_are_read_and_written() -> None:
    assert [number_in(text) for text in ("1,234", " 12. ", "-3", "$5", "2/4", "0.50")] == [1234, 12, -3, 5, *[0.5] * 2]
    assert [number_in(text) for text in ("", "twelve", "1/0", "1e999999999", "nan")] == [None] * 5
    assert [written(Fraction(4)), written(Fraction(1, 3)), written(Fraction(-5, 2))] == ["4", "0.3333333333", "-2.5"]
