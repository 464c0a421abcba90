"""What an agent wrote, and the action or the calls that are understood."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import pytest

from verl_lite.envs.actions import ActionParser, ParsedAction
from verl_lite.envs.calculator import evaluate, number_in, written
from verl_lite.envs.tool_calls import (
    ParsedCalls,
    ToolCall,
    calls_behind_thinking,
    llama_calls,
    mistral_calls,
    parse_tool_calls,
    tagged_calls,
    with_types,
)
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject, JsonValue

MOVES = {0: "Left", 1: "Down"}


@pytest.mark.parametrize(
    ("text", "action", "content"),
    [
        ("<answer>Left</answer>", 0, "Left"),
        ("I go <answer> down\n</answer><|im_end|>", 1, "down"),
        ("<answer>LEFT</answer> or <answer>Down</answer>", 0, "LEFT"),  # the first counts
        ("<answer>Up</answer>", None, "Up"),
        ("<answer></answer>", None, ""),
        # an answer in the thinking is a draft
        ("<think>maybe <answer>Left</answer></think><answer>Down</answer>", 1, "Down"),
        ("maybe <answer>Left</answer></think>\n<answer>Down</answer>", 1, "Down"),  # the prompt ends with <think>
        ("<think>maybe <answer>Left</answer></think>", None, "<think>maybe <answer>Left</answer></think>"),
        (" <think>maybe <answer>Left</answer>", None, "<think>maybe <answer>Left</answer>"),
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
        ('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', [ToolCall("f", {"x": 1})]),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
            [ToolCall("f", {"x": "</tool_call>"})],
        ),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>', [ToolCall("f"), ToolCall("g")]),
        (
            "<tool_call>\n<function=f>\n<parameter=x>\n1 + 2\n</parameter>\n<parameter=y>\na\nb\n</parameter>\n"
            "</function>\n</tool_call>",
            [ToolCall("f", {"x": "1 + 2", "y": "a\nb"})],
        ),
        (
            "<tool_call><function=f><parameter=x></function></tool_call></parameter></function></tool_call>",
            [ToolCall("f", {"x": "</function></tool_call>"})],
        ),
        (
            "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1 + 2</arg_value>\n<arg_key>y</arg_key>\n"
            "<arg_value>a\nb</arg_value>\n</tool_call>",
            [ToolCall("f", {"x": "1 + 2", "y": "a\nb"})],
        ),
        ("<tool_call>f</tool_call>", [ToolCall("f")]),
        ("<answer>3</answer>", []),
        # a call in the thinking is a draft
        ('<think><tool_call>{"name": "f"}</tool_call></think><tool_call>{"name": "g"}</tool_call>', [ToolCall("g")]),
        ('<tool_call>{"name": "f"}</think><tool_call>{"name": "g"}</tool_call>', [ToolCall("g")]),
        ('<think>so <tool_call>{"name": "f"}</tool_call>', []),
    ],
)
def test_calls_are_read(text: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>f(1)</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is no JSON number"),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": -Infinity}"}</tool_call>', "-Infinity is no JSON number"),
        ('<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "1e999 is too large"),
        ('<tool_call>{"name": "f", "args": {"x": 1}}</tool_call>', "unknown key 'args'"),
        ('<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>', '"arguments" only'),
        ('<tool_call>{"name": "f"} and more</tool_call>', "not followed by"),
        ("<tool_call><function=f><parameter=x>1</parameter</function></tool_call>", "not closed by </tool_call>"),
        ("<tool_call><function=f>x</function></tool_call>", "the function f is not closed"),
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


COMPLETE = {
    "hermes": (tagged_calls, '<tool_call>{"name": "f", "arguments": {"path": "a.py"}}</tool_call>'),
    "qwen3_coder": (
        tagged_calls,
        "<tool_call>\n<function=f>\n<parameter=path>\na.py\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (tagged_calls, "<tool_call>f\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n</tool_call>"),
    "mistral, list": (mistral_calls, '[TOOL_CALLS] [{"name": "f", "arguments": {"path": "a.py"}}]'),
    "mistral, name": (mistral_calls, '[TOOL_CALLS]f[ARGS]{"path": "a.py"}'),
    "mistral, id": (mistral_calls, '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"path": "a.py"}'),
    "llama": (llama_calls, '{"name": "f", "parameters": {"path": "a.py"}}'),
    "llama, marked": (llama_calls, '<|python_tag|>{"name": "f", "parameters": {"path": "a.py"}}'),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_a_call_that_is_cut_off_anywhere_is_no_call(name: str) -> None:
    notation, text = COMPLETE[name]
    assert notation(text).calls == [ToolCall("f", {"path": "a.py"})]
    for length in range(len(text)):
        calls = notation(text[:length]).calls
        assert all(call.problem for call in calls), text[:length]


def test_several_calls_of_one_answer_are_read_with_their_place() -> None:
    both = [ToolCall("f", {"x": 1}), ToolCall("g")]
    texts = {
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]': mistral_calls,
        '[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g{}': mistral_calls,
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}': llama_calls,
        '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\n'
        '<tool_call>{"name": "g"}</tool_call>': tagged_calls,
    }
    for text, notation in texts.items():
        parsed = notation(text)
        assert (parsed.calls, parsed.start, parsed.end) == (both, 0, len(text)), text
    parsed = mistral_calls('I look. [TOOL_CALLS]f{"x": 1} so')
    assert (parsed.start, parsed.end) == (len("I look. "), len('I look. [TOOL_CALLS]f{"x": 1} '))


def test_the_place_of_the_calls_behind_the_thinking_is_that_in_the_whole_answer() -> None:
    draft, call = '<think>a <tool_call>{"name": "f"}</tool_call></think>', '<tool_call>{"name": "g"}</tool_call>'
    parsed = calls_behind_thinking(f"{draft} b {call} c")
    start = len(draft) + len(" b ")
    assert parsed == ParsedCalls([ToolCall("g")], start, start + len(call))


@pytest.mark.parametrize("text", ['{"name": "Ada", "age": 3}', "{x}", '[{"name": "f"}]', "a", "", '{"name": "f"} text'])
def test_a_json_answer_that_is_no_call_of_llama_is_text(text: str) -> None:
    assert llama_calls(text).calls == []


def test_arguments_written_as_text_get_the_types_that_the_tool_declares() -> None:
    written = {"n": "3", "flag": "True", "path": "3", "any": "3", "list": "[1]", "wrong": "x", "either": "null"}
    properties: Any = {
        "n": {"type": "integer"},
        "flag": {"type": "boolean"},
        "path": {"type": "string"},
        "list": {"type": "array"},
        "wrong": {"type": "number"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    }
    typed = with_types(ToolCall("f", written), {"properties": properties})
    expected = {"n": 3, "flag": True, "path": "3", "any": "3", "list": [1], "wrong": "x", "either": None}
    assert typed.arguments == expected
    for schema in (None, 5, {}, {"properties": 5}, {"properties": {"n": 5}}, {"properties": {"n": {"type": {}}}}):
        assert with_types(ToolCall("f", written), schema).arguments == written


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        # what pydantic writes for a model, an enumeration, and a default of either
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Level"}, "2", 2),
        ({"allOf": [{"$ref": "#/$defs/Point"}], "description": "d"}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, "True", True),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": 3}, "3", 3),
        # a text is accepted, so that it stays one
        ({"$ref": "#/$defs/Name"}, "2", "2"),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/Name"}]}, "2", "2"),
        # definitions that are missing, elsewhere, or circular declare nothing
        ({"$ref": "#/$defs/Missing/deeper"}, "2", "2"),
        ({"$ref": "https://example.org/schema"}, "2", "2"),
        ({"$ref": "#/$defs/Circle"}, "2", "2"),
    ],
)
def test_types_behind_references_and_alternatives_are_found(schema: JsonObject, written: str, value: JsonValue) -> None:
    definitions = {
        "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "Level": {"enum": [1, 2, 3]},
        "Name": {"type": "string"},
        "Circle": {"anyOf": [{"$ref": "#/$defs/Circle"}]},
    }
    parameters = {"$defs": definitions, "properties": {"argument": schema}}
    typed = with_types(ToolCall("f", {"argument": written}), parameters)
    assert typed.arguments == {"argument": value}


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
