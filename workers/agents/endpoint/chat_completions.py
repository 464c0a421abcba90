"""OpenAI's API of chat completions: reads a request into a `Conversation` and writes an `Answer` as a reply."""

import math
from collections.abc import Iterator
from typing import NotRequired, TypedDict

from workers.agents.conversation import Message, MessageCall
from workers.agents.endpoint.replies import Event, Reply, Usage, openai_error, unix_time, usage_of
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
    shortened,
    tool_call,
)
from workers.agents.endpoint.trace import Answer, Conversation, Refusal

IMPOSSIBLE = -9999.0
"""OpenAI's log-prob of impossible tokens."""


class TokenLogProb(TypedDict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[object]


class LogProbs(TypedDict):
    content: list[TokenLogProb]
    refusal: None


class AnswerMessage(TypedDict):
    role: str
    content: str
    refusal: None
    tool_calls: NotRequired[list[MessageCall]]
    reasoning_content: NotRequired[str]


class Choice(TypedDict):
    """An answer. token_ids: vLLM's extension, if the request wants it."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: LogProbs | None
    token_ids: NotRequired[list[int]]


class ChatReply(TypedDict):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]


class ChatCompletions:
    """/v1/chat/completions."""

    path = "/v1/chat/completions"
    ping = b": keep-alive\n\n"

    def read(self, body: Body, settings: Settings) -> Conversation:
        check_fields(body, settings)
        messages = []
        for place, message in enumerate(read_list(body, "messages")):
            messages.append(read_chat_message(message, place, settings))
        max_tokens = read_integer(body, "max_completion_tokens")
        if max_tokens is None:
            max_tokens = read_integer(body, "max_tokens")
        as_object(body.get("stream_options") or {}, "stream_options")
        return Conversation(
            messages,
            [read_function(tool) for tool in read_list(body, "tools", needed=False)],
            allows_calls(body),
            max_tokens,
            read_stops(body, "stop"),
            read_integer(body, "seed", least=-(2**63)),
            bool(body.get("logprobs")),
        )

    def reply(self, answer: Answer, body: Body, name: str) -> ChatReply:
        choice: Choice = {
            "index": 0,
            "message": _message_of(answer),
            "finish_reason": answer.finish_reason,
            "logprobs": _log_probs(answer, body),
        }
        reply: ChatReply = {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion",
            "created": unix_time(),
            "model": str(body.get("model", "")),
            "choices": [choice],
            "usage": usage_of(answer),
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = answer.token_ids
            reply["prompt_token_ids"] = answer.prompt_ids
        return reply

    def events(self, answer: Answer, body: Body, name: str) -> Iterator[Event]:
        head = {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion.chunk",
            "created": unix_time(),
            "model": str(body.get("model", "")),
        }
        deltas = _deltas(_message_of(answer))
        for number, delta in enumerate(deltas):
            choice: dict[str, object] = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
            if number == 0 and body.get("return_token_ids"):
                choice["token_ids"] = answer.token_ids
            if number == len(deltas) - 1:
                choice["logprobs"] = _log_probs(answer, body)
            yield Event(None, {**head, "choices": [choice]})

        end = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
        yield Event(None, {**head, "choices": [end]})
        if as_object(body.get("stream_options") or {}, "stream_options").get("include_usage"):
            yield Event(None, {**head, "choices": [], "usage": usage_of(answer)})
        yield Event(None, "[DONE]")

    def error(self, refusal: Refusal) -> Reply:
        return openai_error(refusal)

    def error_event(self, refusal: Refusal) -> Event:
        return Event(None, openai_error(refusal))


def read_chat_message(value: object, place: int, settings: Settings) -> Message:
    """Returns the message at this place of the conversation. Raises Refusal for an unknown role or other content than
    text."""
    where = f"messages[{place}]"
    fields = as_object(value, where)
    role = fields.get("role")
    if role == "developer":
        role = "system"
    if not isinstance(role, str) or role not in ("system", "user", "assistant", "tool"):
        raise Refusal(
            f"{where}.role={shortened(role)}: expected system, developer, user, assistant or tool", field=where
        )

    message: Message = {"role": role, "content": read_text(fields.get("content"), f"{where}.content", settings, role)}
    if role == "tool":
        message["tool_call_id"] = read_identifier(fields.get("tool_call_id"), f"{where}.tool_call_id")
        name = fields.get("name")
        if isinstance(name, str):
            message["name"] = name
    if role == "assistant" and fields.get("tool_calls"):
        message["tool_calls"] = [_read_call(call, f"{where}.tool_calls") for call in read_list(fields, "tool_calls")]
    return message


def _read_call(value: object, where: str) -> MessageCall:
    call = as_object(value, where)
    function = as_object(call.get("function"), f"{where}.function")
    return tool_call(call.get("id"), function.get("name"), function.get("arguments"), where)


def _message_of(answer: Answer) -> AnswerMessage:
    message: AnswerMessage = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.tool_calls:
        message["tool_calls"] = answer.tool_calls
    if answer.thinking:
        message["reasoning_content"] = answer.thinking
    return message


def _deltas(message: AnswerMessage) -> list[Reply]:
    """Returns the parts of a streamed message: its role, thinking, text, and each tool call."""
    deltas: list[Reply] = [{"role": "assistant", "content": ""}]
    if message.get("reasoning_content"):
        deltas.append({"reasoning_content": message["reasoning_content"]})
    if message["content"]:
        deltas.append({"content": message["content"]})
    for index, call in enumerate(message.get("tool_calls") or ()):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    return deltas


def _log_probs(answer: Answer, body: Body) -> LogProbs | None:
    """Returns the log-probs of the sampled tokens if the request wants them."""
    if not body.get("logprobs"):
        return None
    entries: list[TokenLogProb] = []
    for token, log_prob in zip(answer.tokens, answer.log_probs, strict=True):
        entries.append(
            {
                "token": token,
                "logprob": log_prob if math.isfinite(log_prob) else IMPOSSIBLE,
                "bytes": list(token.encode(errors="replace")),
                "top_logprobs": [],
            }
        )
    return {"content": entries, "refusal": None}
