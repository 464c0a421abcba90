"""Parses tool calls in an agent's text, in the notations that open models use.

Between tags, which `parse_tool_calls` and `tagged_calls` read:
    Hermes and Qwen:   <tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>
    Qwen3-Coder:       <tool_call><function=calculator><parameter=expression>2+3</parameter></function></tool_call>
    GLM:               <tool_call>calculator<arg_key>expression</arg_key><arg_value>2+3</arg_value></tool_call>

Without tags, because the chat template of the model says so:
    Mistral:           [TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "2+3"}}]
                       [TOOL_CALLS]calculator[ARGS]{"expression": "2+3"}
    Llama:             {"name": "calculator", "parameters": {"expression": "2+3"}}, and nothing else

A call counts only if it is complete: an answer that a limit cuts off ends with a call that has a `problem`. A call in
the thinking at the beginning of an answer is a draft and does not count.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from verl_lite.json_types import JsonObject, JsonValue

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION_OPEN, _FUNCTION_CLOSE = "<function=", "</function>"
_PARAMETER_OPEN, _PARAMETER_CLOSE = "<parameter=", "</parameter>"
_TAG_NAME = re.compile(r"([^<>\n]+)>")
# possessive quantifiers, so that a text that does not match is read only once
_GLM_NAME = re.compile(r"([\w.:/-]++)\s*+(?=<arg_key>|</tool_call>)")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MISTRAL_MARK = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"([^\s\[\]{}]++)\s*+(?:\[CALL_ID\][^\s\[\]{}]*+\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
_LLAMA_MARK = "<|python_tag|>"
_SPACE = re.compile(r"\s*")

_CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
_TYPE_NAMES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
"""Names of JSON types by type of Python."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call.

    Attributes:
        name: name of the tool.
        arguments: arguments by name.
        problem: syntax error, worded for the agent; name and arguments are then meaningless.
    """

    name: str = ""
    arguments: JsonObject = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class ParsedCalls:
    """The calls of a text in their order.

    Attributes:
        calls: the calls.
        start: position of the first call.
        end: position behind the last call.
    """

    calls: Sequence[ToolCall]
    start: int
    end: int


Notation = Callable[[str], ParsedCalls]
"""Reads the calls of a text. A call with a syntax error or without its end has a `problem`."""


class _SyntaxError(Exception):
    """A call that cannot be read, because of an error at a position of the text."""

    def __init__(self, problem: str, position: int) -> None:
        super().__init__(problem)
        self.problem = problem
        self.position = position


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Returns all calls between tags behind the thinking of an answer, in the order of the text.

    A block with a syntax error, and a block without a closing tag, become a call with a `problem`.
    """
    return list(calls_behind_thinking(text).calls)


def calls_behind_thinking(text: str) -> ParsedCalls:
    """Reads calls between tags, with their place in the answer. Calls in its thinking are drafts and are left out."""
    end = end_of_thinking(text)
    parsed = tagged_calls(text[end:])
    return ParsedCalls(parsed.calls, end + parsed.start, end + parsed.end)


def end_of_thinking(text: str, is_open: bool = False) -> int:
    """Returns the position behind the thinking at the beginning of an answer; 0 if the answer has none.

    Thinking that is not closed extends to the end.

    Args:
        text: the answer.
        is_open: True if the prompt ends with the <think> that opens the thinking.
    """
    close = text.find(_THINK_CLOSE)
    if close >= 0:
        return close + len(_THINK_CLOSE)
    if is_open or text.lstrip().startswith(_THINK_OPEN):
        return len(text)
    return 0


def tagged_calls(text: str) -> ParsedCalls:
    """Reads calls between <tool_call> and </tool_call>: those of Hermes, Qwen3-Coder and GLM."""
    first = text.find(_OPEN)
    if first < 0:
        return ParsedCalls([], len(text), 0)
    calls: list[ToolCall] = []
    position = first
    end = 0
    while position >= 0:
        start = position + len(_OPEN)
        try:
            block, end = _tagged_block(text, start)
            calls.extend(block)
        except _SyntaxError as error:
            # the search continues behind the error, so that no part of a long text is read twice
            close = text.find(_CLOSE, max(start, error.position))
            if close < 0:
                calls.append(ToolCall(problem=f"the call is not closed by {_CLOSE}"))
                return ParsedCalls(calls, first, len(text))
            calls.append(ToolCall(problem=error.problem))
            end = close + len(_CLOSE)
        position = text.find(_OPEN, end)
    return ParsedCalls(calls, first, end)


def mistral_calls(text: str) -> ParsedCalls:
    """Reads calls behind [TOOL_CALLS]: a list of objects, or names, each followed by its arguments."""
    first = text.find(_MISTRAL_MARK)
    if first < 0:
        return ParsedCalls([], len(text), len(text))
    calls: list[ToolCall] = []
    position = first
    try:
        while text.startswith(_MISTRAL_MARK, position):
            position = _skip_space(text, position + len(_MISTRAL_MARK))
            name = _MISTRAL_NAME.match(text, position)
            if name is not None:
                arguments, position = _json_value(text, name.end())
                calls.append(_checked(name.group(1), arguments))
            else:
                value, position = _json_value(text, position)
                entries = [value]
                if isinstance(value, list):
                    entries = value
                calls.extend(_call_of_object(entry) for entry in entries)
            position = _skip_space(text, position)
    except _SyntaxError as error:
        return ParsedCalls([*calls, ToolCall(problem=error.problem)], first, len(text))
    return ParsedCalls(calls, first, position)


def llama_calls(text: str) -> ParsedCalls:
    """Reads the calls of an answer that consists of them: JSON objects, separated by semicolons.

    An answer that is another text, or JSON without "name" and "parameters", contains no call.
    """
    no_calls = ParsedCalls([], len(text), len(text))
    first = _skip_space(text, 0)
    position = first
    is_marked = text.startswith(_LLAMA_MARK, first)
    if is_marked:
        position = _skip_space(text, first + len(_LLAMA_MARK))
    if not text.startswith("{", position):
        return no_calls

    calls: list[ToolCall] = []
    while position < len(text):
        try:
            value, position = _json_value(text, position)
        except _SyntaxError as error:
            # without the mark it is a text that begins with a brace
            if not is_marked:
                return no_calls
            return ParsedCalls([ToolCall(problem=error.problem)], first, len(text))
        if not isinstance(value, dict) or "name" not in value:
            return no_calls
        if "parameters" not in value and "arguments" not in value:
            return no_calls
        calls.append(_call_of_object(value))
        position = _skip_space(text, position)
        if text.startswith(";", position):
            position = _skip_space(text, position + 1)
    return ParsedCalls(calls, first, position)


NOTATIONS: dict[str, Notation] = {
    "hermes, qwen3_coder, glm": tagged_calls,
    "mistral": mistral_calls,
    "llama": llama_calls,
}
"""All notations by name. `workers.agents.conversation` chooses the one in which the chat template writes calls."""


def with_types(call: ToolCall, schema: object) -> ToolCall:
    """Returns the call with arguments of the types that the tool declares.

    Qwen3-Coder and GLM write every argument as a text. A text becomes the JSON value that it spells unless the tool
    accepts a text for this argument, or declares nothing about it.

    Args:
        call: the call.
        schema: the parameters of the tool, a JSON schema; anything else declares nothing.
    """
    if not isinstance(schema, Mapping):
        return call
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return call
    arguments = dict(call.arguments)
    for name, value in arguments.items():
        types = _declared_types(properties.get(name), schema)
        if not isinstance(value, str) or not types or "string" in types:
            continue
        spelling = value.strip()
        if "boolean" in types and spelling in ("True", "False"):
            spelling = spelling.lower()
        try:
            arguments[name] = strict_json(spelling)
        except (ValueError, RecursionError):
            continue  # the tool reports the wrong type
    return replace(call, arguments=arguments)


def strict_json(text: str) -> JsonValue:
    """Reads JSON as RFC 8259 defines it. Raises ValueError for NaN, Infinity, and numbers that no double can hold."""
    value: JsonValue = _DECODER.decode(text)
    return value


# --------------------------------------------------------------------------------------------------- parts of a text


def _tagged_block(text: str, start: int) -> tuple[list[ToolCall], int]:
    """Reads the block whose content begins at `start`. Returns its calls and the position behind its closing tag.

    The content is read by its own grammar, because a text inside it may contain the closing tag.
    """
    position = _skip_space(text, start)
    glm_name = _GLM_NAME.match(text, position)
    if text.startswith(_FUNCTION_OPEN, position):
        calls, position = _coder_calls(text, position)
    elif glm_name is not None:
        call, position = _glm_call(text, glm_name)
        calls = [call]
    else:
        value, position = _json_value(text, position)
        calls = [_call_of_object(value)]
    position = _skip_space(text, position)
    if not text.startswith(_CLOSE, position):
        raise _SyntaxError(f"the call is not followed by {_CLOSE}", position)
    return calls, position + len(_CLOSE)


def _coder_calls(text: str, position: int) -> tuple[list[ToolCall], int]:
    """Reads the functions of a block in the notation of Qwen3-Coder, whose arguments are all texts.

    One line end after the opening tag and one before the closing tag belong to the notation, not to the argument.
    """
    calls: list[ToolCall] = []
    while text.startswith(_FUNCTION_OPEN, position):
        name, position = _tag_name(text, position, _FUNCTION_OPEN)
        arguments: dict[str, str] = {}
        position = _skip_space(text, position)
        while text.startswith(_PARAMETER_OPEN, position):
            parameter, start = _tag_name(text, position, _PARAMETER_OPEN)
            end = text.find(_PARAMETER_CLOSE, start)
            if end < 0:
                # the rest of the text belongs to the parameter, whatever it looks like
                raise _SyntaxError(f"the parameter {parameter} is not closed by {_PARAMETER_CLOSE}", len(text))
            arguments[parameter] = text[start:end].removeprefix("\n").removesuffix("\n")
            position = _skip_space(text, end + len(_PARAMETER_CLOSE))
        if not text.startswith(_FUNCTION_CLOSE, position):
            raise _SyntaxError(f"the function {name} is not closed by {_FUNCTION_CLOSE} after its parameters", position)
        calls.append(ToolCall(name, arguments))
        position = _skip_space(text, position + len(_FUNCTION_CLOSE))
    return calls, position


def _tag_name(text: str, position: int, tag: str) -> tuple[str, int]:
    """Returns the name in a tag such as <function=NAME>, and the position behind the tag."""
    match = _TAG_NAME.match(text, position + len(tag))
    if match is None:
        raise _SyntaxError(f"{tag}NAME> is not closed by a >", position)
    name = match.group(1).strip()
    return name, match.end()


def _glm_call(text: str, name: re.Match[str]) -> tuple[ToolCall, int]:
    """Reads the arguments of a block in the notation of GLM, after its name. They are all texts."""
    arguments: dict[str, str] = {}
    position = name.end()
    while argument := _GLM_ARGUMENT.match(text, position):
        key, value = argument.groups()
        arguments[key.strip()] = value
        position = argument.end()
    position = _skip_space(text, position)
    if text.startswith("<arg_key>", position):
        raise _SyntaxError("an argument is not closed by </arg_value>", len(text))
    return ToolCall(name.group(1), arguments), position


def _json_value(text: str, position: int) -> tuple[JsonValue, int]:
    """Returns the JSON value that begins at `position`, and the position behind it."""
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise _SyntaxError(f"the call is not valid JSON: {error}", error.pos) from error
    except (ValueError, RecursionError) as error:
        raise _SyntaxError(f"the call is not valid JSON: {error}", position) from error


def _call_of_object(call: JsonValue) -> ToolCall:
    """Returns the call that a JSON object describes. Llama's "parameters" are accepted as "arguments"."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(problem='the call needs a "name", and "arguments"')
    # a misspelt key would otherwise leave the call without arguments
    unknown = sorted(set(call) - _CALL_KEYS)
    if unknown:
        return ToolCall(problem=f'the call has the unknown key {unknown[0][:50]!r}; it needs a "name", and "arguments"')
    if "arguments" in call and "parameters" in call:
        return ToolCall(problem='the call has "arguments" and "parameters"; write "arguments" only')
    arguments = call.get("arguments", call.get("parameters", {}))
    return _checked(call["name"], arguments)


def _checked(name: str, arguments: JsonValue) -> ToolCall:
    """Returns a call with these arguments, an object or its spelling as JSON, or a call with a `problem`."""
    # some models write the arguments as a JSON text
    if isinstance(arguments, str):
        try:
            arguments = strict_json(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(problem=f'"arguments" is not valid JSON: {error}')
    if not isinstance(arguments, dict):
        return ToolCall(problem='"arguments" has to be an object')
    return ToolCall(name, arguments)


def _declared_types(schema: object, root: Mapping[str, object]) -> set[str]:
    """Returns the JSON types that a tool declares for one argument; none if it declares nothing about it.

    Args:
        schema: Schema of the argument. Its types may be those of alternatives, of a definition that it refers to, or
            of the values that it lists.
        root: Schema of all arguments, which has the definitions.
    """
    types: set[str] = set()
    followed: set[str] = set()
    parts = [schema]
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping):
            continue
        types.update(_own_types(part))
        for key in ("anyOf", "oneOf", "allOf"):
            alternatives = part.get(key)
            if isinstance(alternatives, list):
                parts += alternatives
        reference = part.get("$ref")
        # a definition may refer to itself
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            parts.append(_definition(reference, root))
    return types


def _own_types(schema: Mapping[str, object]) -> Iterator[str]:
    """Yields the types that a schema names, and those of the values that it lists instead of a type."""
    declared = schema.get("type")
    # one type or a list of types
    names = declared if isinstance(declared, list) else [declared]
    for name in names:
        if isinstance(name, str):
            yield name

    listed = schema.get("enum")
    values = list(listed) if isinstance(listed, list) else []
    if "const" in schema:
        values.append(schema["const"])
    for value in values:
        yield _TYPE_NAMES.get(type(value), "null")


def _definition(reference: str, root: Mapping[str, object]) -> object:
    """Returns the part of a schema at a reference such as #/$defs/Point; None if there is none."""
    start, *names = reference.split("/")
    # other documents are not loaded
    if start != "#":
        return None
    part: object = root
    for name in names:
        if not isinstance(part, Mapping):
            return None
        # the escapes of JSON pointers
        part = part.get(name.replace("~1", "/").replace("~0", "~"))
    return part


def _skip_space(text: str, position: int) -> int:
    """Returns the position of the first character that is no white space, from `position` on."""
    space = _SPACE.match(text, position)
    # the pattern also matches an empty text
    assert space is not None
    return space.end()


def _no_constant(name: str) -> NoReturn:
    """Refuses NaN and Infinity, which Python's decoder accepts."""
    raise ValueError(f"{name} is no JSON number")


def _finite_float(digits: str) -> float:
    """Refuses numbers such as 1e999, which Python's decoder reads as infinite."""
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is too large for a number")
    return number


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite_float)
