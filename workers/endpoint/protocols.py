"""The three APIs of the endpoint: OpenAI's chat completions and responses, and Anthropic's messages.

Each API reads the body of a request into a `Conversation`, and writes an `Answer` as a reply or as a stream of events.
A field that would change how answers are sampled, and that the engine does not support, is refused by name. Other
fields that the endpoint does not know are ignored. A stream contains the whole answer in few events, because it is sent
when the answer is complete.
"""

import json
import math
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_lite.errors import UserError
from verl_lite.registry import did_you_mean
from workers.endpoint.trace import Answer, ContextOverflow, Conversation, Refusal
from workers.rollout.base import SamplingParams
from workers.rollout.conversation import Message

MAX_MESSAGES = 4096
"""Number of messages, blocks, or input items of a request. Each takes about 50 microseconds of the server's thread."""
MAX_TOOLS = 1024
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_IDENTIFIER = 256
MAX_DEPTH = 64
"""Nesting of objects and lists in a tool."""

Body = Mapping[str, Any]
Event = tuple[str | None, dict[str, Any] | str]
"""Name of a server-sent event, if the API uses names, and its data."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "text.format": ({"type": "text"},),
    "output_format": (),
    "output_config.format": (),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "echo": (False,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "mcp_servers": ([],),
}
"""Fields that change how an answer is sampled, with the values that leave it as it is (in addition to null)."""
_WITH_FORMAT = ("text", "output_config")


@dataclass(frozen=True)
class Settings:
    """Settings of the endpoint. sampling: sampling parameters that requests may repeat. removed_blocks: beginnings of
    text blocks in system messages that are removed. ignored_fields: fields that are ignored instead of refused."""

    sampling: SamplingParams
    removed_blocks: tuple[str, ...] = ()
    ignored_fields: frozenset[str] = frozenset()


def check_ignored_fields(names: Iterable[str]) -> None:
    """Raises UserError for an entry of agentic.endpoint.ignored_fields that the endpoint never refuses."""
    refused = ("temperature", "top_p", "top_k", "min_p", *_UNSUPPORTED)
    for name in names:
        if name not in refused:
            raise UserError(
                f"agentic.endpoint.ignored_fields={name} has no effect: the endpoint never refuses this field"
                f"{did_you_mean(name, refused)}. Remove it, or name one of {', '.join(refused)}"
            )


def check_fields(body: Body, settings: Settings) -> None:
    """Raises Refusal for a field that would change how the answer is sampled."""
    sampling = settings.sampling
    same = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    inner = {f"{name}.format": body[name].get("format") for name in _WITH_FORMAT if isinstance(body.get(name), dict)}
    for name, value in (*body.items(), *inner.items()):
        if name in settings.ignored_fields or value is None:
            continue
        if name in same and value != same[name]:
            expected = f"{same[name]}, the run's own value (rollout.{name}), because training reads its log-probs"
        elif name in _UNSUPPORTED and value not in _UNSUPPORTED[name]:
            expected = f"no value but {' or '.join(map(json.dumps, _UNSUPPORTED[name])) or 'null'}"
        else:
            continue
        raise Refusal(
            f"{name}={_short(value)}: expected {expected}; remove the field, or add it to "
            "agentic.endpoint.ignored_fields if the agent does not depend on it",
            field=name,
        )


class ChatCompletions:
    """/v1/chat/completions."""

    path = "/v1/chat/completions"
    ping = b": keep-alive\n\n"

    def read(self, body: Body, settings: Settings) -> Conversation:
        check_fields(body, settings)
        messages = [_chat_message(m, place, settings) for place, m in enumerate(_list(body, "messages"))]
        limit = _whole(body, "max_completion_tokens")
        _dict(body.get("stream_options") or {}, "stream_options")
        return Conversation(
            messages,
            [_function(tool, "tools") for tool in _list(body, "tools", needed=False)],
            _calls_tools(body),
            _whole(body, "max_tokens") if limit is None else limit,
            _stops(body.get("stop"), "stop"),
            _whole(body, "seed", least=-(2**63)),
            bool(body.get("logprobs")),
        )

    def reply(self, answer: Answer, body: Body, name: str) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "message": _chat_answer(answer),
            "finish_reason": answer.finish_reason,
            "logprobs": _log_probs(answer, body),
        }
        reply = _chat_head(body, name, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}
        if body.get("return_token_ids"):
            choice["token_ids"] = answer.token_ids
            reply["prompt_token_ids"] = answer.prompt_ids
        return reply

    def events(self, answer: Answer, body: Body, name: str) -> Iterator[Event]:
        head = _chat_head(body, name, "chat.completion.chunk")
        message = _chat_answer(answer)
        parts: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        parts += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
        parts += [{"tool_calls": [{"index": n, **call}]} for n, call in enumerate(answer.tool_calls)]
        for number, delta in enumerate(parts):
            chosen: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
            if number == 0 and body.get("return_token_ids"):
                chosen["token_ids"] = answer.token_ids
            if number == len(parts) - 1:
                chosen["logprobs"] = _log_probs(answer, body)
            yield None, head | {"choices": [chosen]}
        yield None, head | {"choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield None, head | {"choices": [], "usage": _usage(answer)}
        yield None, "[DONE]"

    def error(self, refusal: Refusal) -> dict[str, Any]:
        kind = "invalid_request_error" if refusal.status < 500 else "server_error"
        return {"error": {"message": refusal.message, "type": kind, "param": refusal.field, "code": refusal.code}}

    def error_event(self, refusal: Refusal) -> Event:
        return None, self.error(refusal)


class Responses(ChatCompletions):
    """/v1/responses. Conversations by previous_response_id are resolved by the server."""

    path = "/v1/responses"

    def read(self, body: Body, settings: Settings) -> Conversation:
        check_fields(body, settings)
        given = body.get("input", [])
        items = [{"role": "user", "content": given}] if isinstance(given, str) else _list(body, "input")
        messages = self.instructions(body, settings)
        for item in items:
            _add_item(messages, item, settings)
        tools = [_function({"type": "function", "function": _without_type(tool)}, "tools") for tool in _tools(body)]
        return Conversation(messages, tools, _calls_tools(body), _whole(body, "max_output_tokens"))

    def instructions(self, body: Body, settings: Settings) -> list[Message]:
        """Returns the system message of a request, if it has one."""
        text = _text(body.get("instructions"), "instructions", settings)
        return [{"role": "system", "content": text}] if text else []

    def reply(self, answer: Answer, body: Body, name: str) -> dict[str, Any]:
        is_cut = answer.finish_reason == "length"
        usage = _usage(answer)
        return {
            "id": f"resp_{name}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
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
            **{key: body.get(key) for key in ("instructions", "metadata", "previous_response_id", "temperature")},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
            "store": False,
        }

    def events(self, answer: Answer, body: Body, name: str) -> Iterator[Event]:
        whole = self.reply(answer, body, name)
        begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        found: list[tuple[str, dict[str, Any]]] = [
            ("created", {"response": begun}),
            ("in_progress", {"response": begun}),
        ]
        for index, item in enumerate(whole["output"]):
            found += _item_events(item, index)
        found.append(("incomplete" if whole["status"] == "incomplete" else "completed", {"response": whole}))
        for number, (kind, data) in enumerate(found):
            yield f"response.{kind}", {"type": f"response.{kind}", "sequence_number": number, **data}

    def error_event(self, refusal: Refusal) -> Event:
        shown = {"type": "error", "code": "server_error", "message": refusal.message, "param": None}
        # the client of OpenAI raises an error for the field `error` only
        return "error", shown | {"sequence_number": 0} | self.error(refusal)


class Messages(ChatCompletions):
    """/v1/messages."""

    path = "/v1/messages"
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def read(self, body: Body, settings: Settings) -> Conversation:
        check_fields(body, settings)
        messages: list[Message] = []
        if body.get("system") and (text := _text(body["system"], "system", settings)):
            messages.append({"role": "system", "content": text})
        for place, message in enumerate(_list(body, "messages")):
            messages += _anthropic_messages(message, f"messages.{place}", settings)
        tools = [
            {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
            for tool in _tools(body, "custom")
        ]
        return Conversation(
            messages,
            [_function({"type": "function", "function": tool}, "tools") for tool in tools],
            _calls_tools(body),
            _whole(body, "max_tokens"),
            _stops(body.get("stop_sequences"), "stop_sequences"),
        )

    def reply(self, answer: Answer, body: Body, name: str) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if answer.thinking:
            content.append({"type": "thinking", "thinking": answer.thinking, "signature": name})
        if answer.text or not answer.tool_calls:
            content.append({"type": "text", "text": answer.text})
        for call in answer.tool_calls:
            values = json.loads(call["function"]["arguments"])
            content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": values})
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        reason = "stop_sequence" if answer.stop is not None else reasons.get(answer.finish_reason, "end_turn")
        return {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            "model": str(body.get("model", "")),
            "content": content,
            "stop_reason": reason,
            "stop_sequence": answer.stop,
            "usage": {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.token_ids)},
        }

    def events(self, answer: Answer, body: Body, name: str) -> Iterator[Event]:
        whole = self.reply(answer, body, name)
        usage = whole["usage"]
        begun = whole | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield "message_start", {"type": "message_start", "message": begun | {"usage": usage | {"output_tokens": 0}}}
        for index, block in enumerate(whole["content"]):
            empty, deltas = _block_deltas(block)
            yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": empty}
            for delta in deltas:
                yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
            yield "content_block_stop", {"type": "content_block_stop", "index": index}
        end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield "message_delta", {"type": "message_delta", "delta": end, "usage": usage}
        yield "message_stop", {"type": "message_stop"}

    def error(self, refusal: Refusal) -> dict[str, Any]:
        kinds = {
            401: "authentication_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
            503: "overloaded_error",
        }
        kind = kinds.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
        message = refusal.anthropic_message if isinstance(refusal, ContextOverflow) else refusal.message
        error = {"type": kind, "message": message}
        if refusal.code is not None:
            error["code"] = refusal.code
        return {"type": "error", "error": error}

    def error_event(self, refusal: Refusal) -> Event:
        return "error", self.error(refusal)


APIS: tuple[ChatCompletions, ...] = (ChatCompletions(), Responses(), Messages())


def written(event: Event) -> bytes:
    """Returns a server-sent event as bytes."""
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


# -------------------------------------------------------------------------------------------------- reading a request


def _chat_message(given: Any, place: int, settings: Settings) -> Message:
    where = f"messages[{place}]"
    role = _dict(given, where).get("role")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant", "tool"):
        raise Refusal(f"{where}.role={_short(role)}: expected system, developer, user, assistant or tool", field=where)
    message: Message = {"role": role, "content": _text(given.get("content"), f"{where}.content", settings, role)}
    if role == "tool":
        message["tool_call_id"] = _identifier(given.get("tool_call_id"), f"{where}.tool_call_id")
        if isinstance(given.get("name"), str):
            message["name"] = given["name"]
    if role == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in _list(given, "tool_calls")]
    return message


def _call(given: Any, where: str) -> dict[str, Any]:
    function = _dict(_dict(given, where).get("function"), f"{where}.function")
    return _tool_call(given.get("id"), function.get("name"), function.get("arguments"), where)


def _tool_call(identifier: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """Returns a tool call in OpenAI's format. Raises Refusal for a name that is no text."""
    if not isinstance(name, str):
        raise Refusal(f"{where}: a tool call needs a name, found {_short(name)}", field=where)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": _identifier(identifier, where), "type": "function", "function": {"name": name, "arguments": text}}


def _identifier(value: Any, where: str) -> str:
    """Returns the identifier of a tool call; empty if the request has none."""
    if value is None:
        return ""
    text = str(value)
    if len(text) > MAX_IDENTIFIER:
        raise Refusal(
            f"{where}: the identifier of a tool call has {len(text)} characters; at most {MAX_IDENTIFIER} are accepted",
            field=where,
            kind="size",
        )
    return text


def _anthropic_messages(given: Any, where: str, settings: Settings) -> Iterator[Message]:
    """Yields the messages of a message with content blocks: results of tools, and the message itself."""
    role, content = _dict(given, where).get("role"), given.get("content")
    if role not in ("system", "user", "assistant"):
        raise Refusal(f"{where}.role={_short(role)}: expected user, assistant or system", field=where)
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _list(given, "content")
    texts, calls = [], []
    for block in blocks:
        kind = _dict(block, where).get("type")
        if kind == "tool_result":
            text = _text(block.get("content") or "", where, settings, "tool")
            yield {"role": "tool", "tool_call_id": _identifier(block.get("tool_use_id"), where), "content": text}
        elif kind == "tool_use":
            calls.append(_tool_call(block.get("id"), block.get("name"), block.get("input"), where))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    text = _text(texts, where, settings, role)
    if text or calls or role != "user":
        yield {"role": role, "content": text} | ({"tool_calls": calls} if calls else {})


def _add_item(messages: list[Message], item: Any, settings: Settings) -> None:
    """Appends an item of a response's input. The message and the calls of one answer become one message."""
    kind = _dict(item, "input").get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "function_call":
        call = _tool_call(item.get("call_id"), item.get("name"), item.get("arguments"), "input")
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = _text(item.get("output"), "input", settings, "tool")
        messages.append({"role": "tool", "tool_call_id": _identifier(item.get("call_id"), "input"), "content": text})
    elif kind == "message":
        messages.append(_chat_message(item, len(messages), settings))
    elif kind != "reasoning":
        raise Refusal(f"input: items of the type {_short(kind)} are not supported", field="input")


def _text(given: Any, where: str, settings: Settings, role: str = "system") -> str:
    """Returns the text of a message's content. Blocks of a system message that begin with one of `removed_blocks` are
    left out. Raises Refusal for content that is no text."""
    if given is None:
        return ""
    blocks = [{"type": "text", "text": given}] if isinstance(given, str) else given
    if not isinstance(blocks, list):
        raise Refusal(f"{where}={_short(given)}: expected text or a list of parts", field=where)
    check_length(blocks, where, MAX_MESSAGES)
    texts = []
    for block in blocks:
        kind, text = _dict(block, where).get("type"), block.get("text")
        if kind == "refusal":
            text = block.get("refusal")
        if not isinstance(text, str) or kind not in ("text", "input_text", "output_text", "refusal"):
            raise Refusal(
                f"{where}: parts of the type {_short(kind)} are not supported; the model reads text", field=where
            )
        if role != "system" or not text.startswith(settings.removed_blocks):
            texts.append(text)
    return ("" if role == "assistant" else "\n").join(texts)


def _function(tool: Any, where: str) -> dict[str, Any]:
    """Returns a tool in OpenAI's format. Raises Refusal for one that is not a function."""
    function = _dict(_dict(tool, where).get("function"), f"{where}: functions are supported, and {where}.function")
    if _is_deeper(function, MAX_DEPTH):
        raise Refusal(f"{where}: a tool is nested deeper than {MAX_DEPTH} levels", field=where, kind="size")
    if tool.get("type", "function") != "function" or not isinstance(function.get("name"), str):
        raise Refusal(f"{where}={_short(tool)}: expected functions with a name", field=where)
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    kept = {"name": function["name"], "description": function.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": kept}


def _tools(body: Body, kind: str = "function") -> list[dict[str, Any]]:
    """Returns the tools of a request, which have to be of this kind."""
    tools = [_dict(tool, "tools") for tool in _list(body, "tools", needed=False)]
    for tool in tools:
        if tool.get("type", kind) != kind:
            raise Refusal(
                f"tools: type={_short(tool.get('type'))} runs at the provider; expected {kind}", field="tools"
            )
    return tools


def _calls_tools(body: Body) -> bool:
    return body.get("tool_choice") not in ("none", {"type": "none"})


def _without_type(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != "type"}


def _dict(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refusal(f"{where} is {_short(value)}: expected an object", field=where)
    return value


def _list(body: Body, name: str, needed: bool = True) -> list[Any]:
    """Returns a list of a request, whose length is limited."""
    value = body.get(name)
    if value is None and not needed:
        return []
    if not isinstance(value, list):
        raise Refusal(f"{name} is {_short(value)}: expected a list", field=name)
    check_length(value, name, MAX_TOOLS if name in ("tools", "tool_calls") else MAX_MESSAGES)
    return value


def check_length(values: Sequence[Any], name: str, most: int) -> None:
    """Raises Refusal if a list of a request has too many entries."""
    if len(values) > most:
        raise Refusal(f"{name} has {len(values)} entries; at most {most} are accepted", field=name, kind="size")


def _is_deeper(value: Any, most: int) -> bool:
    """Returns True if objects and lists are nested deeper than `most`. Does not recurse."""
    level = [value]
    for _ in range(most + 1):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner.extend(each.values())
            elif isinstance(each, list):
                inner.extend(each)
        if not inner:
            return False
        level = inner
    return True


def _whole(body: Body, name: str, least: int = 1) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise Refusal(f"{name}={_short(value)}: expected a whole number of at least {least}", field=name)
    return value


def _stops(value: Any, name: str) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise Refusal(f"{name}={_short(value)}: expected a text or a list of texts", field=name)
    check_length(stops, name, MAX_STOPS)
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise Refusal(
            f"{name}: a text has {longest} characters; at most {MAX_STOP_CHARACTERS} are accepted",
            field=name,
            kind="size",
        )
    return tuple(dict.fromkeys(each for each in stops if each))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


# ----------------------------------------------------------------------------------------------------- writing a reply


def new_name() -> str:
    """Returns a name for a reply."""
    return uuid.uuid4().hex


def _chat_head(body: Body, name: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": str(body.get("model", ""))}


def _chat_answer(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    message |= {"tool_calls": answer.tool_calls} if answer.tool_calls else {}
    return message | ({"reasoning_content": answer.thinking} if answer.thinking else {})


def _log_probs(answer: Answer, body: Body) -> dict[str, Any] | None:
    """Returns the log-probs of the sampled tokens if the request wants them."""
    if not body.get("logprobs"):
        return None
    entries = [
        {
            "token": token,
            "logprob": number if math.isfinite(number) else -9999.0,  # OpenAI's value for impossible tokens
            "bytes": list(token.encode(errors="replace")),
            "top_logprobs": [],
        }
        for token, number in zip(answer.tokens, answer.log_probs, strict=True)
    ]
    return {"content": entries, "refusal": None}


def _usage(answer: Answer) -> dict[str, int]:
    prompt, sampled = len(answer.prompt_ids), len(answer.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _output_items(answer: Answer, name: str) -> Iterator[dict[str, Any]]:
    """Yields the items of a response: thinking, the message and the calls."""
    if answer.thinking:
        text = {"type": "reasoning_text", "text": answer.thinking}
        yield {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [text]}
    if answer.text or not answer.tool_calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        message = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": "completed"}
        yield message | {"content": [part]}
    for number, call in enumerate(answer.tool_calls):
        item = {"id": f"fc_{name}_{number}", "type": "function_call", "status": "completed", "call_id": call["id"]}
        yield item | call["function"]


def _item_events(item: dict[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the events of one item of a streamed response: names without their prefix, and data."""
    at = {"item_id": item["id"], "output_index": index}
    kind = item["type"]
    empty: dict[str, Any] = dict(item) if kind == "reasoning" else item | {"status": "in_progress"}
    empty["arguments" if kind == "function_call" else "content"] = "" if kind == "function_call" else []
    yield "output_item.added", {"output_index": index, "item": empty}
    if kind == "function_call":
        yield "function_call_arguments.delta", at | {"delta": item["arguments"]}
        yield "function_call_arguments.done", at | {"arguments": item["arguments"], "name": item["name"]}
    elif kind == "message":
        [part] = item["content"]
        at = at | {"content_index": 0}
        yield "content_part.added", at | {"part": part | {"text": ""}}
        yield "output_text.delta", at | {"delta": part["text"], "logprobs": []}
        yield "output_text.done", at | {"text": part["text"], "logprobs": []}
        yield "content_part.done", at | {"part": part}
    yield "output_item.done", {"output_index": index, "item": item}


def _block_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], Iterable[dict[str, Any]]]:
    """Returns the empty content block of a streamed message and the events that fill it."""
    if block["type"] == "tool_use":
        return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    if block["type"] == "thinking":
        deltas: Sequence[dict[str, Any]] = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return block | {"thinking": "", "signature": ""}, deltas
    return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
