"""OpenAI's API of chat completions: reads a request into a `Conversation` and writes a `SampledAnswer` as a reply."""

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
    read_tools,
    shortened,
    tool_call,
)
from workers.agents.endpoint.trace import Conversation, Refusal, SampledAnswer

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
    """An answer. The key `token_ids` is vLLM's extension, which a request has to ask for."""

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
        for number, message in enumerate(read_list(body, "messages")):
            messages.append(read_chat_message(message, number, settings))
        # the second name is the older one, which clients still send
        max_tokens = read_integer(body, "max_completion_tokens")
        if max_tokens is None:
            max_tokens = read_integer(body, "max_tokens")
        # read for the answer only, but a wrong value is refused before anything is sampled
        _includes_usage(body)
        tools = [read_function(tool) for tool in read_tools(body, settings)]
        return Conversation(
            messages,
            tools,
            calls_tools=allows_calls(body),
            max_tokens=max_tokens,
            stop=read_stops(body, "stop"),
            # clients may send negative seeds
            seed=read_integer(body, "seed", least=-(2**63)),
            names_tokens=bool(body.get("logprobs")),
        )

    def reply(self, answer: SampledAnswer, body: Body, name: str) -> ChatReply:
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

    def events(self, answer: SampledAnswer, body: Body, name: str) -> Iterator[Event]:
        head = {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion.chunk",
            "created": unix_time(),
            "model": str(body.get("model", "")),
        }
        choices: list[dict[str, object]] = []
        for delta in _deltas(_message_of(answer)):
            choices.append({"index": 0, "delta": delta, "finish_reason": None, "logprobs": None})
        if body.get("return_token_ids"):
            choices[0]["token_ids"] = answer.token_ids
        # the last delta has the log-probs of the whole answer
        choices[-1]["logprobs"] = _log_probs(answer, body)
        for choice in choices:
            yield Event(None, {**head, "choices": [choice]})

        end = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
        yield Event(None, {**head, "choices": [end]})
        if _includes_usage(body):
            yield Event(None, {**head, "choices": [], "usage": usage_of(answer)})
        yield Event(None, "[DONE]")

    def error(self, refusal: Refusal) -> Reply:
        return openai_error(refusal)

    def error_event(self, refusal: Refusal) -> Event:
        return Event(None, openai_error(refusal))


def read_chat_message(value: object, number: int, settings: Settings) -> Message:
    """Returns a message of a conversation.

    Args:
        value: The message as the request has it.
        number: Its place in the conversation, for the message of Refusal.
        settings: Settings of the endpoint.

    Raises:
        Refusal: Its role is unknown, or its content is no text.
    """
    where = f"messages[{number}]"
    fields = as_object(value, where)
    role = fields.get("role")
    # OpenAI's newer name; chat templates read the older one
    if role == "developer":
        role = "system"
    if not isinstance(role, str) or role not in ("system", "user", "assistant", "tool"):
        raise Refusal(
            f"{where}.role={shortened(role)}: expected system, developer, user, assistant or tool", field=where
        )

    content = read_text(fields.get("content"), f"{where}.content", settings, role)
    message: Message = {"role": role, "content": content}
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


def _message_of(answer: SampledAnswer) -> AnswerMessage:
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


def _includes_usage(body: Body) -> bool:
    """Returns True if the request wants the numbers of tokens at the end of its stream. Raises Refusal."""
    options = as_object(body.get("stream_options") or {}, "stream_options")
    return bool(options.get("include_usage"))


def _log_probs(answer: SampledAnswer, body: Body) -> LogProbs | None:
    """Returns the log-probs of the sampled tokens if the request wants them."""
    if not body.get("logprobs"):
        return None
    entries: list[TokenLogProb] = []
    for token, log_prob in zip(answer.tokens, answer.log_probs, strict=True):
        # JSON has no -inf
        finite_log_prob = log_prob if math.isfinite(log_prob) else IMPOSSIBLE
        token_bytes = list(token.encode(errors="replace"))
        entries.append({"token": token, "logprob": finite_log_prob, "bytes": token_bytes, "top_logprobs": []})
    return {"content": entries, "refusal": None}
