"""The contract of the endpoint with the `openai` and `anthropic` clients: requests, replies, errors and retries.

The policy of these tests repeats the last message, so a test writes the text that the policy samples as a message.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.workers.agents.endpoint.live import END, LIMITS, TOKENIZER, Live, completion_of, ids_of
from verl_lite.config import EndpointConfig
from verl_lite.errors import UserError
from workers.agents.endpoint import request_fields, server
from workers.agents.endpoint.server import Call, Endpoint

CALL = '<think>hm</think>look<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "d", "parameters": SCHEMA}
ANTHROPIC_TOOLS: Any = [{"name": "weather", "description": "d", "input_schema": SCHEMA}]
PATHS = CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
each_path = pytest.mark.parametrize("path", PATHS)
RETRY = {"x-stainless-retry-count": "1"}
HTTP = httpx.Client(timeout=30, trust_env=False)
OPENAI: Any = (openai.OpenAI(api_key="-"), openai.AsyncOpenAI(api_key="-"))
ANTHROPIC: Any = (anthropic.Anthropic(api_key="-"), anthropic.AsyncAnthropic(api_key="-"))
RUNNER, POOL = asyncio.Runner(), ThreadPoolExecutor(4)
ERRORS = (openai.APIError, anthropic.APIError)


def parrot(prompt: str) -> str:
    return prompt.rpartition("<|user|>")[2].partition(": ")[2].removesuffix("<|assistant|>")


class Session:
    """An episode and its clients. retries: the SDKs' retry count of each request, in the order of arrival."""

    def __init__(self, live: Live, retries: list[str] | None = None, key: str = "") -> None:
        self.live, self.key, self.retries = live, key or live.open(), [] if retries is None else retries
        to_openai: Any = {"base_url": f"{live.url}/v1", "api_key": self.key}
        to_anthropic: Any = {"base_url": live.url, "api_key": self.key}
        self.openai, self.openai_async = (client.with_options(**to_openai) for client in OPENAI)
        self.anthropic, self.anthropic_async = (client.with_options(**to_anthropic) for client in ANTHROPIC)

    def create(self, path: str, content: str = "hi", **fields: Any) -> Any:
        """Makes a request with the client of this API."""
        if path == MESSAGES:
            return self.anthropic.messages.create(**body_of(path, content) | {"max_tokens": 99} | fields)
        api: Any = self.openai.responses if path == RESPONSES else self.openai.chat.completions
        return api.create(**body_of(path, content) | fields)

    def post(self, path: str, body: Any, headers: dict[str, Any] | None = None, timeout: float = 30) -> httpx.Response:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        own = {"authorization": f"Bearer {self.key}"} | (headers or {})
        return HTTP.post(self.live.url + path, content=raw, headers=own, timeout=timeout)

    def leave(self, path: str = CHAT) -> None:
        """Makes a request whose client leaves before the answer."""
        count = len(self.live.calls)
        with pytest.raises(httpx.ReadTimeout):
            self.post(path, body_of(path), timeout=0.3)
        until(lambda: len(self.live.calls) > count and not self.live.calls[-1].waiters)

    def deliver(self, number: int, text: str) -> None:
        self.live.endpoint.deliver(self.live.calls[number], completion_of("", text, 99))

    def rows(self) -> list[list[str]]:
        """Ends the episode. Returns the sampled text of each turn of its rows."""
        rows = self.live.close_episode(self.key)
        return [[str(TOKENIZER.decode(turn.response_ids)).removesuffix("<|im_end|>") for turn in row] for row in rows]

    @property
    def counts(self) -> dict[str, int]:
        return self.live.traces[self.key].counts


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def assistant(content: Any) -> Any:
    return {"role": "assistant", "content": content}


def body_of(path: str, content: Any = "hi") -> dict[str, Any]:
    return {"model": "p", "input" if path == RESPONSES else "messages": [user(content)]}


def until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    retries: list[str] = []
    answer = Endpoint._answer

    async def counted(self: Endpoint, request: Any, api: Any) -> Any:
        retries.append(request.headers.get("x-stainless-retry-count", ""))
        return await answer(self, request, api)

    monkeypatch.setattr(Endpoint, "_answer", counted)
    live = Live(parrot, max_request_mb=1)
    yield Session(live, retries)
    live.stop()


def chat_turns(create: Callable[..., Any]) -> str:
    tools = [{"type": "function", "function": FUNCTION}]
    first = create(model="p", messages=[user(CALL)], tools=tools).choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", "look")
    result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "SUN"}
    history = [user(CALL), first.message.model_dump(exclude_none=True), result]
    return str(create(model="p", messages=history, tools=tools).choices[0].message.content)


def responses_turns(create: Callable[..., Any], by_id: bool = False) -> str:
    same: Any = {"model": "p", "tools": [{"type": "function", **FUNCTION}], "instructions": "be kind"}
    first = create(input=CALL, **same)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "SUN"}
    if by_id:
        return str(create(input=[result], previous_response_id=first.id, **same).output_text)
    items = [item.model_dump(exclude={"parsed", "parsed_arguments"}) for item in first.output]
    return str(create(input=[user(CALL), *items, result], **same).output_text)


def messages_turns(create: Callable[..., Any]) -> str:
    given: list[Any] = [{"role": "system", "content": "be kind"}, user([{"type": "text", "text": CALL}])]
    same: Any = {"model": "p", "max_tokens": 200, "tools": ANTHROPIC_TOOLS}
    first = create(messages=given, **same)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert (first.stop_reason, first.content[2].input) == ("tool_use", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": [{"type": "text", "text": "SUN"}]}
    blocks = [block.to_dict() for block in first.content]  # with its thinking
    return str(create(messages=[*given, assistant(blocks), user([result])], **same).content[0].text)


def streamed(api: Any) -> Callable[..., Any]:
    def create(**fields: Any) -> Any:
        with api.stream(**fields) as stream:
            names = ("get_final_completion", "get_final_response", "get_final_message")
            return next(getattr(stream, name) for name in names if hasattr(stream, name))()

    return create


def in_loop(create: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **fields: RUNNER.run(create(**fields))


INTERFACES: dict[str, Callable[[Session], str]] = {
    "chat": lambda s: chat_turns(s.openai.chat.completions.create),
    "chat, async": lambda s: chat_turns(in_loop(s.openai_async.chat.completions.create)),
    "chat, stream": lambda s: chat_turns(streamed(s.openai.chat.completions)),
    "responses": lambda s: responses_turns(s.openai.responses.create),
    "responses, by id": lambda s: responses_turns(s.openai.responses.create, by_id=True),
    "responses, stream": lambda s: responses_turns(streamed(s.openai.responses)),
    "messages": lambda s: messages_turns(s.anthropic.messages.create),
    "messages, async": lambda s: messages_turns(in_loop(s.anthropic_async.messages.create)),
    "messages, stream": lambda s: messages_turns(streamed(s.anthropic.messages)),
}


@pytest.mark.parametrize("interface", INTERFACES)
def test_a_tool_call_is_continued_from_its_sampled_ids(session: Session, interface: str) -> None:
    assert INTERFACES[interface](session) == "SUN"
    first, second = session.live.calls
    [row] = session.live.close_episode(session.key)
    assert [turn.response_ids for turn in row] == [[*ids_of(CALL), END], [*ids_of("SUN"), END]]
    joined = ids_of("<|user|>tool: SUN<|assistant|>")
    assert list(second.prompt_ids) == [*first.prompt_ids, *ids_of(CALL), END, *joined]
    assert (row[0].prompt_ids, list(row[1].prompt_ids)) == (first.prompt_ids, joined)


def test_a_reply_of_chat_completions_has_usage_log_probs_and_token_ids(session: Session) -> None:
    same = {"logprobs": True, "extra_body": {"return_token_ids": True}, "user": "u", "metadata": {}, "store": True}
    reply = session.create(CHAT, "hé", **same)
    *chunks, last = session.create(CHAT, "hé", stream=True, stream_options={"include_usage": True}, **same)
    prompt, ids = list(session.live.calls[0].prompt_ids), [*ids_of("hé"), END]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == reply.choices[0].message.content == "hé"
    assert chunks[-1].choices[0].finish_reason == reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].token_ids == chunks[0].choices[0].token_ids == ids and reply.prompt_token_ids == prompt
    usage = (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens)
    assert reply.usage == last.usage and usage == (len(prompt), len(ids), len(prompt + ids))
    [streamed] = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert streamed.content == reply.choices[0].logprobs.content and streamed.content[0].token == "h"
    assert [entry.logprob for entry in streamed.content] == [-token / 512 for token in ids]


def test_limits_stop_texts_and_seeds(session: Session) -> None:
    cut = session.create(CHAT, "abcd", max_tokens=2).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", "ab")
    assert session.create(CHAT, "abcd", max_completion_tokens=2).choices[0].message.content == "ab"
    cut = session.create(RESPONSES, "abcd", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "ab")
    assert session.create(MESSAGES, "abcd", max_tokens=2).stop_reason == "max_tokens"
    cut = session.create(MESSAGES, "abcdc", stop_sequences=["d", "c"])
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", "c", "ab")
    assert session.create(CHAT, "abcd", stop="c").choices[0].message.content == "ab"
    for seed in ({"seed": 5}, {"seed": 5}, {"seed": 6}, {}, {}):
        session.create(CHAT, "abcd", **seed)
    seeds = [call.sampling.seed for call in session.live.calls[-5:]]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 4
    assert session.rows() == [["ab"], ["ab"], ["ab"], ["ab"], ["abc"], ["abc"], *[["abcd"]] * 5]


def test_models_and_counted_tokens(session: Session) -> None:
    same: Any = {"system": "be kind", "tools": ANTHROPIC_TOOLS}
    counted = session.anthropic.messages.count_tokens(**body_of(MESSAGES), **same).input_tokens
    assert counted == session.create(MESSAGES, **same).usage.input_tokens
    for client in (session.openai, session.anthropic):
        assert [model.id for model in client.models.list()] == ["policy"]
    assert session.rows() == [["hi"]] and len(session.live.traces[session.key].nodes) == 1  # counting is no request


def test_the_billing_block_does_not_change_the_row(session: Session) -> None:
    history: list[Any] = []
    said = ["a", "x-anthropic-billing-header", "c"]  # only blocks of system messages are removed
    for number, content in enumerate(said):
        bill = {"type": "text", "text": f"x-anthropic-billing-header: {number}"}
        history.append(user([{"type": "tool_result", "content": content}] if number == 1 else content))
        inside = {"role": "system", "content": [bill, {"type": "text", "text": "inside"}]}
        system = [bill, {"type": "text", "text": "be kind"}]
        reply = session.create(MESSAGES, messages=[inside, *history], system=system)
        history.append(assistant([block.to_dict() for block in reply.content]))
    assert session.rows() == [said]
    assert session.live.prompts[0].startswith("<|user|>system: be kind<|user|>system: inside<|user|>user: a")


def test_a_changed_history_forks_a_row_from_its_longest_beginning(session: Session) -> None:
    past = [user("a"), assistant("a"), user("b"), assistant("b")]
    for given in (past[:1], past[:3], [*past, user("c")], [*past[:2], user("B")], [*past, user("d")], [user("new")]):
        session.create(CHAT, messages=given)
    assert session.rows() == [["a", "b", "c"], ["B"], ["d"], ["new"]]


def test_an_edited_tool_call_or_result_is_not_continued_from_the_sampled_one(session: Session) -> None:
    call, result = {"name": "weather", "arguments": '{"city":"Rome"}'}, {"role": "tool", "content": "SUN"}
    said, edited = (
        assistant("look") | {"tool_calls": [{"function": call | {"arguments": arguments}}]}
        for arguments in (call["arguments"], '{"city":"Oslo"}')
    )
    past, tools = [user(CALL), said, result, assistant("SUN")], [{"type": "function", "function": FUNCTION}]
    rain = [user(CALL), said, result | {"content": "RAIN"}, assistant("SUN")]
    for given in (past[:1], past[:3], [*past, user("a")], [*rain, user("b")], [user(CALL), edited, result]):
        session.create(CHAT, messages=given, tools=tools)
    assert session.rows() == [[CALL, "SUN", "a"], ["b"], ["SUN"]]
    assert "tool: RAIN" in session.live.prompts[3] and "tool: SUN" not in session.live.prompts[3]
    assert "Oslo" in session.live.prompts[4]


def test_a_continued_response_has_its_own_instructions_and_its_own_episode(session: Session) -> None:
    first = session.create(RESPONSES, "a", instructions="be kind")
    second = session.create(RESPONSES, "b", instructions="be strict", previous_response_id=first.id)
    session.create(RESPONSES, "c", previous_response_id=second.id)
    beginning = "<|user|>user: a<|assistant|>a<|im_end|><|user|>user: b<|assistant|>"
    assert session.live.prompts[1] == f"<|user|>system: be strict{beginning}"
    assert session.live.prompts[2] == f"{beginning}b<|im_end|><|user|>user: c<|assistant|>"
    with pytest.raises(openai.BadRequestError, match="no such response"):
        Session(session.live).create(RESPONSES, "b", previous_response_id=first.id)


@each_path
@pytest.mark.parametrize(
    ("case", "status", "names", "message"),
    [
        ("unknown key", 401, "AuthenticationError", "belongs to no episode"),
        ("ended episode", 400, "BadRequestError", "has ended"),
        ("overlong", 400, "BadRequestError", "data.max_prompt_length"),
        ("oversized", 413, "APIStatusError ContentTooLargeError", "agentic.endpoint.max_request_mb=1"),
        ("engine without room", 400, "BadRequestError", "no room"),
        ("engine failure", 503, "InternalServerError OverloadedError ServiceUnavailableError", "out of memory"),
    ],
)
def test_errors_as_the_clients_raise_them(
    session: Session, path: str, case: str, status: int, names: str, message: str
) -> None:
    live = session.live
    if case == "unknown key":
        session = Session(live, session.retries, "sk-unknown")
    elif case == "ended episode":
        live.close_episode(session.key)
    elif case == "engine failure":
        live.endpoint.fail("the rollout engine failed: out of memory")
    elif case == "engine without room":
        live._answer = lambda call, prompt: live.endpoint.refuse(call, "no room")  # type: ignore[method-assign]
    content = "x" * {"overlong": LIMITS.max_model_len, "oversized": 2 << 20}.get(case, 1)
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match=message) as raised:
        session.create(path, content, stream=True)
    error: Any = raised.value
    assert error.status_code == status and type(error).__name__ in names.split()
    assert session.retries == (["0", "1", "2"] if status == 503 else ["0"])  # clients repeat a request after 503 only
    if path != MESSAGES:
        assert error.code == {"unknown key": "invalid_api_key", "overlong": "context_length_exceeded"}.get(case)


OVERFLOW_RULES: dict[str, Callable[[str, str | None], bool]] = {
    # langchain-openai 1.7.4, chat_models/base.py, _handle_openai_bad_request
    "langchain-openai": lambda text, code: "context_length_exceeded" in text or "prompt is too long" in text,
    # langchain-anthropic 1.7.10, chat_models.py, line 1277
    "langchain-anthropic": lambda text, code: "prompt is too long" in text,
    # litellm 1.110.2, litellm_core_utils/exception_mapping_utils.py, lines 101 and 625
    "litellm, openai": lambda text, code: "this model's maximum context length is" in text.lower(),
    "litellm, anthropic": lambda text, code: "prompt is too long" in text,
    # pydantic-ai 2.68.0, _model_errors.py, lines 96 to 119, and models/anthropic/_errors.py, line 157
    "pydantic-ai, openai": lambda text, code: code == "context_length_exceeded" or "maximum context length" in text,
    "pydantic-ai, anthropic": lambda text, code: "prompt is too long" in text.lower(),
    # the numbers that coding agents read to decide how much to compact
    "numbers": lambda text, code: re.search(r"prompt is too long: (\d+) tokens > (\d+) maximum", text) is not None,
}


@each_path
@pytest.mark.parametrize("stream", [False, True])
def test_clients_recognize_a_context_overflow(session: Session, path: str, stream: bool) -> None:
    reply = session.post(path, body_of(path, "x" * LIMITS.max_model_len) | {"stream": stream})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (
        400,
        "invalid_request_error",
        "context_length_exceeded",
    )
    assert all(recognizes(error["message"], error["code"]) for recognizes in OVERFLOW_RULES.values())
    begin = "prompt is too long" if path == MESSAGES else "This model's maximum context length is"
    assert error["message"].startswith(begin)


@each_path
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_off_by_a_limit_ends_with_length_in_every_api(session: Session, path: str, stream: bool) -> None:
    call = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
    tools: Any = {
        CHAT: [{"type": "function", "function": FUNCTION}],
        RESPONSES: [{"type": "function", **FUNCTION}],
        MESSAGES: ANTHROPIC_TOOLS,
    }[path]
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    reply = session.post(path, body_of(path, call) | {"tools": tools, limit: len(call) - 5, "stream": stream}).text
    reason = {CHAT: '"finish_reason": "length"', RESPONSES: '"incomplete"', MESSAGES: '"stop_reason": "max_tokens"'}
    assert reason[path] in reply
    assert not any(kind in reply for kind in ("tool_use", "function_call", '"tool_calls"'))


TOO_MUCH: dict[str, dict[str, Any]] = {
    "messages": {"messages": [user("")] * 4097},
    "parts": {"messages": [user([{"type": "text", "text": ""}] * 4097)]},
    "tools": {"tools": [{"type": "function", "function": FUNCTION}] * 1025},
    "number of stop texts": {"stop": [str(number) for number in range(65)]},
    "length of a stop text": {"stop": ["x" * 1025]},
    "identifier of a result": {"messages": [user("a"), {"role": "tool", "tool_call_id": "x" * 257, "content": "a"}]},
    "lists": {"metadata": [[]] * 200_001},
    "values": {"metadata": [1] * 1_000_002},
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_request_with_too_much_of_anything_is_refused_and_counted(name: str) -> None:
    live = Live(parrot)
    session = Session(live)
    reply = session.post(CHAT, body_of(CHAT) | TOO_MUCH[name])
    assert reply.status_code in (400, 413) and "at most" in reply.text or "more than" in reply.text
    assert live.endpoint.take_refused() == {"size": 1} and live.endpoint.take_refused() == {}
    assert session.create(CHAT).choices[0].message.content == "hi"
    live.stop()


def test_a_tool_nested_too_deeply_is_refused(session: Session) -> None:
    nested: dict[str, Any] = {}
    for _ in range(request_fields.MAX_DEPTH):
        nested = {"items": nested}
    tools = [{"type": "function", "function": FUNCTION | {"parameters": nested}}]
    assert session.post(CHAT, body_of(CHAT) | {"tools": tools}).status_code == 400
    assert session.live.endpoint.take_refused() == {"size": 1}


def test_a_type_of_null_is_that_of_the_api(session: Session) -> None:
    tools: dict[str, Any] = {
        CHAT: {"type": None, "function": FUNCTION},
        RESPONSES: {"type": None, **FUNCTION},
        MESSAGES: {"type": None, **ANTHROPIC_TOOLS[0]},
    }
    for path, tool in tools.items():
        reply = session.post(path, body_of(path) | {"tools": [tool]})
        assert reply.status_code == 200, (path, reply.text)
        assert session.live.prompts[-1].startswith("<|user|>TOOLS weather ")
    reply = session.post(RESPONSES, {"model": "p", "input": [user("hi") | {"type": None}]})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_refused(session: Session, value: str) -> None:
    body = json.dumps(body_of(RESPONSES) | {"metadata": {"x": 17}}).replace("17", value).encode()
    reply = session.post(RESPONSES, body)
    assert reply.status_code == 400 and "not valid JSON" in reply.text


@pytest.mark.parametrize("name", request_fields._UNSUPPORTED)
def test_a_field_that_changes_the_sampling_is_refused_by_name(session: Session, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{name}=17") as raised:
        session.create(CHAT, extra_body={name: 17})
    assert raised.value.param == name
    for path in PATHS:
        assert session.post(path, body_of(path) | {name: 17}).status_code == 400
        for value in (*request_fields._UNSUPPORTED[name], None):
            reply = session.post(path, body_of(path) | {name: value})
            assert reply.status_code == 200, (path, value, reply.text)


def test_sampling_other_than_the_runs_is_refused_unless_it_is_ignored(session: Session) -> None:
    for name, value, own in (("temperature", 0.2, 1.0), ("top_p", 0.9, 1), ("top_k", 5, -1), ("min_p", 0.1, 0)):
        for path in PATHS:
            session.create(path, extra_body={name: own})
            with pytest.raises(ERRORS, match=f"400.*{name}={value}: .*rollout.{name}"):
                session.create(path, extra_body={name: value})
    session.create(MESSAGES, output_config={"effort": "high"}, thinking={"type": "enabled", "budget_tokens": 1024})
    with pytest.raises(anthropic.BadRequestError, match="output_config.format="):
        session.create(MESSAGES, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    live = Live(parrot, ignored_fields=["temperature", "response_format"], max_requests=1)
    other = Session(live)
    other.create(CHAT, temperature=0.2, response_format={"type": "json_object"})
    with pytest.raises(openai.BadRequestError, match="agentic.endpoint.max_requests"):
        other.create(CHAT)
    live.stop()


def test_tools_of_other_types_are_refused_unless_they_are_ignored(session: Session) -> None:
    live = Live(parrot, ignored_fields=["tools.web_search", "tools.namespace"])
    other = Session(live)
    own: dict[str, Any] = {
        CHAT: {"type": "function", "function": FUNCTION},
        RESPONSES: {"type": "function", **FUNCTION},
        MESSAGES: ANTHROPIC_TOOLS[0],
    }
    for path, tool in own.items():
        body = body_of(path) | {"tools": [{"type": "web_search"}, tool, {"type": "namespace", "tools": []}]}
        reply = session.post(path, body)
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
        assert "found the type 'web_search', expected" in message and "add 'tools.web_search' to agentic" in message
        assert other.post(path, body).status_code == 200
        assert live.prompts[-1].startswith("<|user|>TOOLS weather <|user|>")
    live.stop()


RAW: list[Any] = [b"", b"{", b"[]", b'"x"', b"\xff\xfe\x00", b'{"a": "\xff"}', b"[" * 100_000, b"1" * 9999]
NESTED = [json.loads(b"[" * depth + b"]" * depth) for depth in (100, 400, 800)]
NO_TEXTS: list[Any] = [5, [5], {"a": 1}, "\ud800", [{"type": "image_url"}], [{"type": "text"}], [{"type": ["text"]}]]
NO_LISTS: list[Any] = [None, 5, {}, True, [], [5], [[]], [None], [{}], [user("a"), 5], [user("a"), assistant("b")]]
NO_LISTS += [*NESTED, *([user(content)] for content in NO_TEXTS + NESTED)]
NO_CALLS: list[Any] = [5, [5], [{"function": {}}], [{"function": {"name": "x", "arguments": '{"a": "\\ud800"}'}}]]
NO_TURNS: Any = [[user("a"), assistant("") | {"tool_calls": calls}, user("b")] for calls in NO_CALLS]
NO_ITEMS = [[{"type": []}], [{"type": "function_call"}], [{"type": "function_call_output", "output": 5}]]
NO_BLOCKS = [[user([{"type": "tool_result", "content": 5}])], [user([{"type": "tool_use"}])]]
NO_TOOLS: list[Any] = [5, [5], [{}], [{"type": "web_search"}], [{"type": "function", "function": 5}]]
NO_CHOICES: list[Any] = [5, "required", {"type": "any"}, ["auto"], {"type": "tool", "name": "x"}]
NO_NUMBERS: list[Any] = [0, -1, 1.5, "9", True, []]
WRONG: dict[str, dict[str, list[Any]]] = {
    CHAT: {"messages": NO_LISTS + NO_TURNS, "max_tokens": NO_NUMBERS, "seed": ["x"], "stream_options": [5, "x", [1]]},
    RESPONSES: {"input": NO_LISTS + NO_ITEMS, "max_output_tokens": NO_NUMBERS, "previous_response_id": [5, [], "x"]},
    MESSAGES: {"messages": NO_LISTS + NO_BLOCKS, "max_tokens": NO_NUMBERS, "stop_sequences": [5], "system": [5, [5]]},
}


@each_path
def test_an_invalid_body_is_refused(session: Session, path: str) -> None:
    wrong = WRONG[path] | {"tools": NO_TOOLS, "tool_choice": NO_CHOICES}
    for body in RAW + [body_of(path) | {name: value} for name, values in wrong.items() for value in values]:
        reply = session.post(path, body)
        assert reply.status_code == 400 and reply.json()["error"]["message"], (str(body)[:200], reply.text[:200])
    for kind in ("gzip", "deflate", "br"):
        headers = {"content-encoding": kind, "connection": "close"}
        assert session.post(path, b"not compressed", headers).status_code == 400
    for schema in NESTED:  # valid, but possibly too deep for the template
        tool = FUNCTION | {"parameters": {"a": schema}, "input_schema": {"a": schema}}
        tools = [{"type": "function", "function": tool} if path == CHAT else tool]
        assert session.post(path, body_of(path) | {"tools": tools}).status_code in (200, 400)
    for count in ("0", "²".encode()):
        assert session.post(path, body_of(path), {"x-stainless-retry-count": count}).status_code == 200
    assert session.rows()[-2:] == [["hi"], ["hi"]]


def test_an_unknown_route_names_the_routes(session: Session) -> None:
    with pytest.raises(openai.NotFoundError, match="GET /v1/files.*/v1/messages/count_tokens"):
        session.openai.files.list()
    assert HTTP.get(session.live.url + CHAT).status_code == 404


def test_a_port_in_use_and_an_address_of_ipv6(session: Session) -> None:
    with pytest.raises(UserError, match=r"agentic.endpoint.host=127.0.0.1, port \d+: .*agentic.endpoint.port=0"):
        Endpoint(EndpointConfig(), session.live.endpoint.port, "policy", lambda: None)
    live = Live(parrot, host="::1")
    assert live.url.startswith("http://[::1]:") and Session(live).create(CHAT).choices[0].message.content == "hi"
    live.stop()


@each_path
def test_a_slow_stream_is_kept_alive_and_reports_a_late_error(
    session: Session, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(server, "PING_S", 0.02)
    session.live.delay_s = 0.3
    ping = b"event: ping" if path == MESSAGES else b": keep-alive"
    assert session.post(path, body_of(path) | {"stream": True}).content.count(ping) > 3
    assert list(session.create(path, stream=True))
    session.live.answers = lambda prompt: None
    stream = session.create(path, stream=True)
    session.live.endpoint.fail("the engine failed")
    with pytest.raises(ERRORS, match="the engine failed"):
        list(stream)


@each_path
def test_a_retry_joins_the_running_request(session: Session, path: str) -> None:
    release = threading.Event()
    session.live.answers = lambda prompt: "answer" if release.wait(20) else None
    reply = POOL.submit(session.create, path, timeout=0.5)
    until(lambda: len(session.retries) == 2)
    release.set()
    assert "answer" in reply.result().model_dump_json()
    assert session.retries[:2] == ["0", "1"] and len(session.live.calls) == 1 and session.rows() == [["answer"]]


@each_path
@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_receives_the_sampled_answer(session: Session, path: str, stream: bool) -> None:
    session.live.answers = lambda prompt: f"answer {len(session.live.calls)}"
    body = body_of(path) | {"stream": stream}
    replies = [session.post(path, body, headers).text for headers in ({}, RETRY, {}, RETRY)]
    found = [re.findall(r"answer \d", reply)[0] for reply in replies]
    assert found == ["answer 1", "answer 1", "answer 2", "answer 2"]  # an identical body is a new request
    assert "answer 3" in session.post(path, body_of(path, "other") | {"stream": stream}, RETRY).text
    assert "answer 4" in Session(session.live).post(path, body, RETRY).text  # another episode
    assert session.rows() == [["answer 1"], ["answer 2"], ["answer 3"]]


def test_a_retry_continues_the_request_that_lost_its_client(session: Session) -> None:
    session.live.answers = lambda prompt: None
    session.leave()
    second = POOL.submit(session.post, CHAT, body_of(CHAT))
    until(lambda: len(session.live.calls) == 2)
    first = POOL.submit(session.post, CHAT, body_of(CHAT), RETRY)
    until(lambda: session.live.calls[0].waiters)
    endpoint = session.live.endpoint  # the time of the client that left is over, but another one waits
    endpoint._loop.call_soon_threadsafe(endpoint._abandon, session.live.calls[0])
    for number in (0, 1):
        session.deliver(number, f"answer {number}")
    assert "answer 0" in first.result().text and "answer 1" in second.result().text
    assert len(session.live.calls) == 2 and session.rows() == [["answer 0"], ["answer 1"]]


def test_a_request_without_a_client_is_aborted_and_its_answer_dropped(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RETRY_S", 0.05)
    session.live.answers = lambda prompt: None
    session.leave()
    until(lambda: session.live.aborted == session.live.calls)
    session.deliver(0, "late")
    session.live.answers = parrot
    assert session.post(CHAT, body_of(CHAT), RETRY).status_code == 200  # sampled again
    assert session.rows() == [["hi"]] and session.counts["discarded/late"] == len("late") + 1


def test_an_answer_whose_client_left_is_in_a_row_only_after_a_retry(session: Session) -> None:
    session.live.answers = lambda prompt: None
    for number, path in enumerate((CHAT, MESSAGES)):
        session.leave(path)
        session.deliver(number, f"answer {number}")
    assert "answer 1" in session.post(MESSAGES, body_of(MESSAGES), RETRY).text
    assert session.rows() == [["answer 1"]] and session.counts["discarded/undelivered"] == len("answer 0") + 1


def test_a_conversation_continues_the_answer_that_was_received(session: Session) -> None:
    session.live.answers = lambda prompt: None
    session.leave()
    session.deliver(0, "hi")
    session.live.answers = parrot
    assert session.create(CHAT).choices[0].message.content == "hi"  # the same text as the answer whose client left
    session.create(CHAT, messages=[user("hi"), assistant("hi"), user("b")])
    assert session.rows() == [["hi", "b"]]


def test_an_answer_is_delivered_if_one_of_its_clients_received_it() -> None:
    here: Any = SimpleNamespace(transport=SimpleNamespace(is_closing=lambda: False))
    gone: Any = SimpleNamespace(transport=SimpleNamespace(is_closing=lambda: True))
    node, episode = SimpleNamespace(is_delivered=False), SimpleNamespace(is_open=True)
    call: Any = SimpleNamespace(node=node, episode=episode, deliveries=0)
    with server._counted_delivery(call, gone):
        assert not node.is_delivered
    for succeeds in (False, True):
        with pytest.raises(ConnectionError), server._counted_delivery(call, here):
            if succeeds:
                with server._counted_delivery(call, here):
                    assert node.is_delivered
            raise ConnectionError
        assert node.is_delivered == succeeds


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_late_handler_commits_no_turn(session: Session, is_answered: bool) -> None:
    session.live.answers, endpoint = lambda prompt: None, session.live.endpoint
    reply = POOL.submit(session.post, CHAT, body_of(CHAT))
    until(lambda: session.live.calls)
    late = (session.live.calls[0], completion_of("", "late", 99))

    async def end() -> list[Call]:
        if is_answered:  # the handler has not sent the answer when the episode ends
            endpoint._commit(*late)
        return await endpoint._close_episode(server._digest(session.key))

    running = asyncio.run_coroutine_threadsafe(end(), endpoint._loop).result()
    assert (reply.result().status_code, running) == ((200, []) if is_answered else (400, session.live.calls))
    if not is_answered:
        endpoint.deliver(*late)
        until(lambda: session.counts["sampled"])
    assert session.live.traces[session.key].rows(1.0) == []


def test_a_late_body_begins_no_request(session: Session) -> None:
    raw = json.dumps(body_of(CHAT)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", session.live.endpoint.port), timeout=20) as connection:
        connection.sendall(head.encode() + raw[:5])
        until(lambda: session.retries)
        session.live.endpoint.close_episode(session.key)
        connection.sendall(raw[5:])
        assert b"400 Bad Request" in connection.recv(4096)
    assert not session.live.calls and not session.live.traces[session.key].nodes
