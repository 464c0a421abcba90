"""Anthropic's API of messages: reads a request into a `Conversation` and writes a `SampledAnswer` as a reply."""

import json
from collections.abc import Iterator
from typing import Literal, TypedDict

from workers.agents.conversation import Message, MessageCall, Tool
from workers.agents.endpoint.answer_parts import arguments_of
from workers.agents.endpoint.replies import Event, Reply
from workers.agents.endpoint.request_fields import (
    Body,
    Settings,
    allows_calls,
    as_object,
    check_fields,
    read_function,
    read_identifier,
    read_integer,
    read_list,
    read_stops,
    read_text,
    read_tools,
    shortened,
    tool_call,
)
from workers.agents.endpoint.trace import ContextOverflow, Conversation, Refusal, SampledAnswer

ERROR_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Names of errors by HTTP status."""
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's names of OpenAI's finish reasons; all others are the end of the turn."""


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ToolUseBlock(TypedDict):
    """A tool call. The key `input` has its arguments."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: object


Block = ThinkingBlock | TextBlock | ToolUseBlock


class MessageUsage(TypedDict):
    """Number of tokens, as this API names them."""

    input_tokens: int
    output_tokens: int


class MessageReply(TypedDict):
    id: str
    type: str
    role: str
    model: str
    content: list[Block]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage


class Messages:
    """/v1/messages."""

    path = "/v1/messages"
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def read(self, body: Body, settings: Settings) -> Conversation:
        check_fields(body, settings)
        messages: list[Message] = []
        system = read_text(body.get("system") or None, "system", settings)
        # the removed blocks may have been all of it
        if system:
            messages.append({"role": "system", "content": system})
        for number, message in enumerate(read_list(body, "messages")):
            messages += _read_messages(message, f"messages.{number}", settings)
        tools = [_read_tool(tool) for tool in read_tools(body, settings, "custom")]
        return Conversation(
            messages,
            tools,
            calls_tools=allows_calls(body),
            max_tokens=read_integer(body, "max_tokens"),
            stop=read_stops(body, "stop_sequences"),
        )

    def reply(self, answer: SampledAnswer, body: Body, name: str) -> MessageReply:
        stop_reason = STOP_REASONS.get(answer.finish_reason, "end_turn")
        if answer.stop is not None:
            stop_reason = "stop_sequence"
        return {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            "model": str(body.get("model", "")),
            "content": list(_blocks(answer, name)),
            "stop_reason": stop_reason,
            "stop_sequence": answer.stop,
            "usage": {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.token_ids)},
        }

    def events(self, answer: SampledAnswer, body: Body, name: str) -> Iterator[Event]:
        reply = self.reply(answer, body, name)
        # a stream begins with the reply without its content, which follows block by block
        begun = {
            **reply,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**reply["usage"], "output_tokens": 0},
        }
        yield _event({"type": "message_start", "message": begun})
        for index, block in enumerate(reply["content"]):
            yield _event({"type": "content_block_start", "index": index, "content_block": _without_content(block)})
            for delta in _deltas(block):
                yield _event({"type": "content_block_delta", "index": index, "delta": delta})
            yield _event({"type": "content_block_stop", "index": index})
        end = {"stop_reason": reply["stop_reason"], "stop_sequence": reply["stop_sequence"]}
        yield _event({"type": "message_delta", "delta": end, "usage": reply["usage"]})
        yield _event({"type": "message_stop"})

    def error(self, refusal: Refusal) -> Reply:
        other_kind = "invalid_request_error" if refusal.status < 500 else "api_error"
        error = {"type": ERROR_KINDS.get(refusal.status, other_kind), "message": refusal.message}
        # clients recognize a prompt that is too long by the words of this API's message
        if isinstance(refusal, ContextOverflow):
            error["message"] = refusal.anthropic_message
        if refusal.code is not None:
            error["code"] = refusal.code
        return {"type": "error", "error": error}

    def error_event(self, refusal: Refusal) -> Event:
        return _event(self.error(refusal))


def _event(data: Reply) -> Event:
    """Returns an event. In this API, its name is the type in its data."""
    return Event(str(data["type"]), data)


def _read_tool(tool: Body) -> Tool:
    """Returns a tool in OpenAI's format, which has other names for its fields."""
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return read_function({"type": "function", "function": function})


def _read_messages(value: object, where: str, settings: Settings) -> Iterator[Message]:
    """Splits a message of this API, whose content blocks may contain results of tools. Yields the results as messages
    of their own, and then the message with its text and its calls.

    Args:
        value: The message.
        where: Its place in the request, for messages of errors.
        settings: Settings of the endpoint.
    """
    message = as_object(value, where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ("system", "user", "assistant"):
        raise Refusal(f"{where}.role={shortened(role)}: expected user, assistant or system", field=where)

    texts: list[Body] = []
    calls: list[MessageCall] = []
    for entry in _content_blocks(message):
        block = as_object(entry, where)
        kind = block.get("type")
        if kind == "tool_result":
            result = read_text(block.get("content") or "", where, settings, "tool")
            identifier = read_identifier(block.get("tool_use_id"), where)
            yield {"role": "tool", "tool_call_id": identifier, "content": result}
        elif kind == "tool_use":
            call = tool_call(block.get("id"), block.get("name"), block.get("input"), where)
            calls.append(call)
        # the trace has the thinking of its answers, and does not compare what a client sends back
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)

    text = read_text(texts, where, settings, role)
    if calls:
        yield {"role": role, "content": text, "tool_calls": calls}
    # a user's message that consists of results only has no text of its own
    elif text or role != "user":
        yield {"role": role, "content": text}


def _content_blocks(message: Body) -> list[object]:
    """Returns the blocks of a message, whose content may also be a text."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return read_list(message, "content")


def _blocks(answer: SampledAnswer, name: str) -> Iterator[Block]:
    """Yields the content blocks of an answer: thinking, text and tool calls. `name` is the name of the reply."""
    if answer.thinking:
        # clients expect a signature, which nobody checks here
        yield {"type": "thinking", "thinking": answer.thinking, "signature": name}
    # an empty answer has a block, too
    if answer.text or not answer.tool_calls:
        yield {"type": "text", "text": answer.text}
    for call in answer.tool_calls:
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": arguments_of(call),
        }


def _without_content(block: Block) -> Reply:
    """Returns the beginning of a block in a stream, which its content follows."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}
    if block["type"] == "thinking":
        return {**block, "thinking": "", "signature": ""}
    return {**block, "text": ""}


def _deltas(block: Block) -> list[Reply]:
    """Returns the parts of a block in a stream."""
    if block["type"] == "tool_use":
        return [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    if block["type"] == "thinking":
        return [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    return [{"type": "text_delta", "text": block["text"]}]
