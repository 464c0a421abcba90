"""Parses tool calls in an agent's text, in the two notations that open models use.

Hermes and Qwen:   <tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>
Qwen3-Coder:       <tool_call><function=calculator><parameter=expression>2+3</parameter></function></tool_call>
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A tool call. problem: syntax error, worded for the agent; name and arguments are then meaningless."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Returns all calls in the order of the text.

    A block with a syntax error becomes a call with a `problem`. A last block without a closing tag extends to the end
    of the text.
    """
    calls: list[ToolCall] = []
    for block in _CALL.finditer(text):
        content = block.group(1).strip()
        calls.extend(_coder_calls(content) if content.startswith("<function=") else [_hermes_call(content)])
    return calls


def _hermes_call(content: str) -> ToolCall:
    try:
        call = json.loads(content)
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"the call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(problem='the call needs a "name", and "arguments"')
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):  # some models write the arguments as a JSON text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(problem=f'"arguments" is not valid JSON: {error}')
    if not isinstance(arguments, dict):
        return ToolCall(problem='"arguments" has to be an object')
    return ToolCall(call["name"], arguments)


def _coder_calls(content: str) -> Iterator[ToolCall]:
    """Yields the calls of a block in the notation of Qwen3-Coder, whose arguments are all texts.

    One line end after the opening tag and one before the closing tag belong to the notation, not to the argument.
    """
    if _FUNCTION.search(content) is None:
        yield ToolCall(problem="<function=NAME> is not closed by a >")
    for function in _FUNCTION.finditer(content):
        arguments = {
            parameter.group(1).strip(): parameter.group(2).removeprefix("\n").removesuffix("\n")
            for parameter in _PARAMETER.finditer(function.group(2))
        }
        yield ToolCall(function.group(1).strip(), arguments)
