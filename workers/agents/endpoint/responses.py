"""OpenAI's API of responses: reads a request into a `Conversation` and writes a `SampledAnswer` as a reply.

The server resolves conversations by previous_response_id.
"""

from collections.abc import Iterator
from typing import Literal, TypedDict

from verl_lite.json_types import JsonObject
from workers.agents.conversation import Message
from workers.agents.endpoint.chat_completions import ChatCompletions, read_chat_message
from workers.agents.endpoint.replies import Event, Reply, openai_error, unix_time, usage_of
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
    read_text,
    read_tools,
    shortened,
    tool_call,
)
from workers.agents.endpoint.trace import Conversation, Refusal, SampledAnswer

Unread = object
"""A field that a reply repeats from its request. The name `object` is a field of `ResponseReply`."""


class ResponseUsage(TypedDict):
    """Number of tokens, as this API names them."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class OutputText(TypedDict):
    type: str
    text: str
    annotations: list[object]
    logprobs: list[object]


class ReasoningItem(TypedDict):
    """The thinking of an answer."""

    id: str
    type: Literal["reasoning"]
    summary: list[object]
    content: list[dict[str, str]]


class MessageItem(TypedDict):
    """The text of an answer, in one part."""

    id: str
    type: Literal["message"]
    role: str
    status: str
    content: list[OutputText]


class CallItem(TypedDict):
    """A tool call of an answer."""

    id: str
    type: Literal["function_call"]
    status: str
    call_id: str
    name: str
    arguments: str | JsonObject


OutputItem = ReasoningItem | MessageItem | CallItem


class ResponseReply(TypedDict):
    """A response. The fields of type `Unread` repeat the request."""

    id: str
    object: str
    created_at: int
    status: str
    incomplete_details: dict[str, str] | None
    error: None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage
    instructions: Unread
    metadata: Unread
    previous_response_id: Unread
    temperature: Unread
    parallel_tool_calls: bool
    tool_choice: str
    tools: Unread
    top_p: Unread
    store: bool


class Responses:
    """/v1/responses."""

    path = "/v1/responses"
    ping = ChatCompletions.ping

    def read(self, body: Body, settings: Settings) -> Conversation:
        check_fields(body, settings)
        messages = self.instructions(body, settings)
        for item in _input_items(body):
            _add_item(messages, item, settings)
        tools = []
        for tool in read_tools(body, settings):
            # a tool of chat completions has these fields, except its type, in an object `function`
            function = {name: value for name, value in tool.items() if name != "type"}
            tools.append(read_function({"type": "function", "function": function}))
        max_tokens = read_integer(body, "max_output_tokens")
        return Conversation(messages, tools, calls_tools=allows_calls(body), max_tokens=max_tokens)

    def instructions(self, body: Body, settings: Settings) -> list[Message]:
        """Returns the system message of a request, if it has one."""
        text = read_text(body.get("instructions"), "instructions", settings)
        if not text:
            return []
        return [{"role": "system", "content": text}]

    def reply(self, answer: SampledAnswer, body: Body, name: str) -> ResponseReply:
        usage = usage_of(answer)
        reply: ResponseReply = {
            "id": f"resp_{name}",
            "object": "response",
            "created_at": unix_time(),
            "status": "completed",
            "incomplete_details": None,
            "error": None,
            "model": str(body.get("model", "")),
            "output": list(_output_items(answer, name)),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "previous_response_id": body.get("previous_response_id"),
            "temperature": body.get("temperature"),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
            "store": False,
        }
        # this API has no finish reasons; an answer that a limit has cut off is incomplete
        if answer.finish_reason == "length":
            reply["status"] = "incomplete"
            reply["incomplete_details"] = {"reason": "max_output_tokens"}
        return reply

    def events(self, answer: SampledAnswer, body: Body, name: str) -> Iterator[Event]:
        response = self.reply(answer, body, name)
        # a stream begins with the response without its content, and ends with the complete one
        begun: Reply = {
            **response,
            "status": "in_progress",
            "output": [],
            "usage": None,
            "incomplete_details": None,
        }
        # names without their prefix, and data
        events: list[tuple[str, Reply]] = [
            ("created", {"response": begun}),
            ("in_progress", {"response": begun}),
        ]
        for index, item in enumerate(response["output"]):
            events += _item_events(item, index)
        events.append((response["status"], {"response": response}))

        for number, (kind, fields) in enumerate(events):
            event_name = f"response.{kind}"
            yield Event(event_name, {"type": event_name, "sequence_number": number, **fields})

    def error(self, refusal: Refusal) -> Reply:
        return openai_error(refusal)

    def error_event(self, refusal: Refusal) -> Event:
        data = {
            "type": "error",
            "code": "server_error",
            "message": refusal.message,
            "param": None,
            "sequence_number": 0,
            # the client of OpenAI raises an error for the field `error` only
            **openai_error(refusal),
        }
        return Event("error", data)


def _input_items(body: Body) -> list[object]:
    """Returns the items of a request, whose input may also be a text."""
    content = body.get("input", [])
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return read_list(body, "input")


def _add_item(messages: list[Message], value: object, settings: Settings) -> None:
    """Appends an item of a response's input. The message and the calls of one answer become one message."""
    item = as_object(value, "input")
    kind = item.get("type")
    # messages may leave their type out, or open
    if kind is None or kind == "message":
        messages.append(read_chat_message(item, len(messages), settings))
    elif kind == "function_call":
        call = tool_call(item.get("call_id"), item.get("name"), item.get("arguments"), "input")
        # an answer without text has no item of the type message
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        answer = messages[-1]
        answer.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = read_text(item.get("output"), "input", settings, "tool")
        identifier = read_identifier(item.get("call_id"), "input")
        messages.append({"role": "tool", "tool_call_id": identifier, "content": text})
    # the trace has the thinking of its answers, and does not compare what a client sends back
    elif kind != "reasoning":
        raise Refusal(f"input: items of the type {shortened(kind)} are not supported", field="input")


def _output_items(answer: SampledAnswer, name: str) -> Iterator[OutputItem]:
    """Yields the items of a response: thinking, the message and the calls."""
    if answer.thinking:
        thinking = {"type": "reasoning_text", "text": answer.thinking}
        yield {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [thinking]}
    # an empty answer has a message, too
    if answer.text or not answer.tool_calls:
        part: OutputText = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        yield {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
    for number, call in enumerate(answer.tool_calls):
        yield {
            "id": f"fc_{name}_{number}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }


def _item_events(item: OutputItem, index: int) -> Iterator[tuple[str, Reply]]:
    """Yields the events of one item of a streamed response: names without their prefix, and data."""
    yield "output_item.added", {"output_index": index, "item": _without_content(item)}
    if item["type"] == "function_call":
        yield from _call_events(item, index)
    elif item["type"] == "message":
        yield from _text_events(item, index)
    yield "output_item.done", {"output_index": index, "item": item}


def _without_content(item: OutputItem) -> Reply:
    """Returns the beginning of an item in a stream, which its content follows."""
    if item["type"] == "reasoning":
        return {**item, "content": []}
    if item["type"] == "function_call":
        return {**item, "status": "in_progress", "arguments": ""}
    return {**item, "status": "in_progress", "content": []}


def _call_events(item: CallItem, index: int) -> Iterator[tuple[str, Reply]]:
    """Yields the events with the arguments of a tool call, which are complete at once."""
    arguments = item["arguments"]
    head: Reply = {"item_id": item["id"], "output_index": index}
    yield "function_call_arguments.delta", {**head, "delta": arguments}
    yield "function_call_arguments.done", {**head, "arguments": arguments, "name": item["name"]}


def _text_events(item: MessageItem, index: int) -> Iterator[tuple[str, Reply]]:
    """Yields the events with the text of a message, which is complete at once."""
    [part] = item["content"]
    text = part["text"]
    head: Reply = {"item_id": item["id"], "output_index": index, "content_index": 0}
    yield "content_part.added", {**head, "part": {**part, "text": ""}}
    yield "output_text.delta", {**head, "delta": text, "logprobs": []}
    yield "output_text.done", {**head, "text": text, "logprobs": []}
    yield "content_part.done", {**head, "part": part}
