"""The parts of an answer's text: thinking, tool calls, and the text itself."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_lite.envs.tool_calls import Notation, end_of_thinking, tagged_calls, with_types
from workers.agents.conversation import CalledFunction, Message, MessageCall, Tool


def split_thinking(text: str, is_open: bool = False) -> tuple[str, str]:
    """Splits the text of an answer into its thinking and the rest; for the arguments see `end_of_thinking`."""
    end = end_of_thinking(text, is_open)
    if not end:
        return "", text
    thinking = text[:end].removesuffix("</think>")
    # the tag is missing if the prompt ends with it
    thinking = thinking.replace("<think>", "", 1)
    return thinking.strip(), text[end:].lstrip("\n")


@dataclass(frozen=True)
class SplitAnswer:
    """The text of an answer before its tool calls, the calls in OpenAI's format, and the text behind them."""

    text: str
    calls: list[MessageCall] = field(default_factory=list)
    rest: str = ""


def split_tool_calls(
    text: str, number: int, notation: Notation = tagged_calls, tools: Sequence[Tool] = ()
) -> SplitAnswer:
    """Splits the text of an answer at its tool calls. If one of them has a syntax error or is cut off, the answer has
    the whole text and no calls.

    Args:
        text: the text of the answer, without thinking.
        number: number of the request, for the identifiers of the calls.
        notation: reads the calls.
        tools: tools of the request, whose schemas give the types of arguments.
    """
    parsed = notation(text)
    are_valid = all(not call.problem and _is_encodable(call.name) for call in parsed.calls)
    if not parsed.calls or not are_valid:
        return SplitAnswer(text)

    schemas: dict[str, object] = {}
    for tool in tools:
        schemas[tool["function"]["name"]] = tool["function"]["parameters"]
    calls: list[MessageCall] = []
    for index, call in enumerate(parsed.calls):
        # some notations write every argument as text
        typed_call = with_types(call, schemas.get(call.name))
        arguments = json.dumps(typed_call.arguments)
        function: CalledFunction = {"name": call.name, "arguments": arguments}
        calls.append({"id": _call_id(number, index), "type": "function", "function": function})
    text_before = text[: parsed.start].rstrip()
    text_behind = text[parsed.end :]
    return SplitAnswer(text_before, calls, text_behind)


def _call_id(number: int, index: int) -> str:
    """Returns the identifier of a call, unique in its episode: nine letters or digits, as Mistral's templates need."""
    return f"c{number:05d}{index:03d}"


def _is_encodable(name: str) -> bool:
    """Returns False for a name with lone surrogates, which clients cannot send back."""
    encodable = name.encode(errors="replace").decode()
    return name == encodable


def message_text(message: Message) -> str:
    """Returns the text of a message with its tool calls, for logs and reports."""
    parts = [message["content"]]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(f"{function['name']}({function['arguments']})")
    return "\n".join(part for part in parts if part)


def arguments_of(call: MessageCall) -> object:
    """Returns the arguments of a tool call as a value, so that their spelling as JSON does not matter."""
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        # an agent may send back what it has edited; it is then compared as text
        return arguments
