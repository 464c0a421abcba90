"""Random clients of the endpoint. Whatever they do, each delivered token is in exactly one row, and nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from tests.workers.agents.endpoint.live import Live, completion_of
from workers.agents.endpoint import server
from workers.agents.endpoint.server import Call
from workers.agents.turns import Turn

CALL = '<think>hm</think>look<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
TEXTS = ("ok", "ok", "#NUMBER", "é🦜 #NUMBER", "", CALL, CALL, "<think>#NUMBER</think> so", "a STOP b", "x" * 300)
TOOLS = [{"type": "function", "function": {"name": "look"}}]
PATHS = CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GARBAGE = (b"", b"[" * 9999, b'{"messages": 5}', b"\xff", b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
REFUSALS = re.compile("has ended|tokens of the first prompt|agentic.endpoint.max_requests")


class Engine(Live):
    """Samples random texts after random times. The log-prob of a token is minus the number of its answer and, after
    the decimal point, its place. lost_share: share of the requests that never end."""

    lost_share = 0.03

    def __init__(self) -> None:
        self.numbers, self.sampled = itertools.count(1), dict[int, tuple[list[int], list[int]]]()
        super().__init__(lambda prompt: None)
        take, self.lock = self.endpoint.take, threading.Lock()

        def take_alone() -> tuple[list[Call], list[Call]]:
            with self.lock:  # in a run, the thread that takes requests also closes episodes
                return take()

        self.endpoint.take = take_alone  # type: ignore[method-assign]

    def _answer(self, call: Call, prompt: str) -> None:
        number = next(self.numbers)
        rng = random.Random(number)
        time.sleep(rng.choice((0, 0, 0.003, 0.03, 0.1)))
        done = completion_of("", rng.choice(TEXTS).replace("NUMBER", f"{number}"), call.sampling.max_tokens)
        done.log_probs = [-number - place / 8192 for place in range(len(done.token_ids))]
        self.sampled[number] = list(call.prompt_ids), done.token_ids
        if rng.random() >= self.lost_share:
            self.endpoint.deliver(call, done)

    def checked_rows(self, key: str) -> list[int]:
        """Ends the episode. Returns the numbers of the trained answers, whose contexts have to be the sampled ones."""
        with self.lock:
            rows: list[list[Turn]] = self.close_episode(key)
        numbers = []
        for row in rows:
            context: list[int] = []
            for turn in row:
                numbers.append(number := int(-turn.log_probs[0]))
                prompt, sampled = self.sampled[number]
                kept = len(turn.response_ids)
                assert (context := context + list(turn.prompt_ids)) == prompt
                assert turn.response_ids == sampled[:kept]
                assert turn.log_probs == [-number - place / 8192 for place in range(kept)]
                context += turn.response_ids
        return numbers


class Client:
    """A random program. received: numbers of the answers that it received. unknown: maximum number of answers that it
    received without reading their numbers."""

    def __init__(self, live: Live, key: str, seed: int, http: httpx.AsyncClient) -> None:
        self.live, self.key, self.rng, self.http = live, key, random.Random(seed), http
        self.sdk = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=key)
        self.history: list[Any] = []
        self.received, self.unknown, self.is_ended = set[int](), 0, False

    async def run(self, steps: int) -> None:
        talks, rewrites = [self.talk] * 3, [self.rewrite] * 2
        actions = (*talks, *rewrites, self.repeat, self.retry, self.use_sdk, self.spoil)
        for _ in range(steps):
            if not self.is_ended:
                await self.rng.choice(actions)()

    def request(self) -> tuple[str, dict[str, Any]]:
        messages = [*self.history, {"role": "user", "content": f"say {self.rng.randrange(9)}"}]
        if self.history and self.history[-1]["role"] == "tool":
            messages.pop()
        path = CHAT if any("tool_calls" in message for message in messages) else self.rng.choice(PATHS)
        more = {"logprobs": True, "stop": "STOP", "tools": TOOLS} if path == CHAT else {}
        stream = {"stream": self.rng.random() < 0.2}
        return path, {"model": "p", "input" if path == RESPONSES else "messages": messages} | more | stream

    async def post(self, path: str, body: dict[str, Any], timeout: float = 1.0, retry: int = 0) -> None:
        """Makes a request. Its answer, if there is one, continues the history."""
        headers = {"authorization": f"Bearer {self.key}", "x-stainless-retry-count": str(retry)}
        try:
            async with asyncio.timeout(timeout):
                reply = await self.http.post(self.live.url + path, json=body, headers=headers)
        except (httpx.TransportError, TimeoutError):
            self.unknown += 1
            return
        if reply.status_code == 200:
            return self.read(path, body, reply)
        assert reply.status_code == 400 and REFUSALS.search(reply.text), reply.text
        self.is_ended, self.history = self.is_ended or "has ended" in reply.text, []

    def read(self, path: str, body: dict[str, Any], reply: httpx.Response) -> None:
        found = re.findall(r'"logprob": -(\d+)' if path == CHAT else r"#(\d+)", reply.text)[:1]
        self.received |= set(map(int, found))
        self.unknown += not found
        if body["stream"]:
            return
        answer = reply.json()
        if path == CHAT:
            message = answer["choices"][0]["message"]
        else:
            blocks = answer["output"][-1]["content"] if path == RESPONSES else answer["content"]
            message = {"role": "assistant", "content": "".join(block.get("text", "") for block in blocks)}
        results = ({"role": "tool", "content": f"result {len(self.history)}"} for _ in message.get("tool_calls", ()))
        self.history = [*body["input" if path == RESPONSES else "messages"], message, *results]

    async def talk(self) -> None:
        await self.post(*self.request())

    async def rewrite(self) -> None:
        """Goes back in the history, replaces it by a summary, or edits a message or the result of a tool."""
        place = self.rng.randrange(len(self.history) + 1)
        edited = [message | {"content": "edited"} for message in self.history[place : place + 1]]
        summary = [{"role": "user", "content": f"summary of {place} messages"}]
        before, after = self.history[:place], self.history[place + 1 :]
        self.history = self.rng.choice((before, summary, [*before, *edited, *after]))
        await self.talk()

    async def repeat(self) -> None:
        request = self.request()
        await asyncio.gather(*(self.post(*request) for _ in range(3)))

    async def retry(self) -> None:
        request = self.request()
        await self.post(*request, timeout=self.rng.choice((0.001, 0.02, 0.2)))
        await self.post(*request, retry=self.rng.randrange(2))

    async def use_sdk(self) -> None:
        self.unknown += 3
        with contextlib.suppress(openai.APIConnectionError, openai.BadRequestError):
            messages: Any = [*self.history, {"role": "user", "content": "hi"}]
            timeout = self.rng.choice((0.05, 1.0))
            await self.sdk.chat.completions.create(model="p", messages=messages, timeout=timeout)

    async def spoil(self) -> None:
        body = self.rng.choice((*GARBAGE, self.rng.randbytes(50)))
        headers = {"authorization": f"Bearer {self.key}"}
        reply = await self.http.post(self.live.url + self.rng.choice(PATHS), content=body, headers=headers)
        assert reply.status_code == 400
        reader, writer = await asyncio.open_connection("127.0.0.1", self.live.endpoint.port)
        head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        writer.write(self.rng.choice((b"", head)) + body)
        writer.close()


async def run(live: Engine, seed: int, episodes: int, clients: int, steps: int) -> None:
    rng, trained = random.Random(seed), list[int]()

    async def episode(number: int) -> None:
        key = live.open()
        programs = [Client(live, key, seed * 1000 + number * 100 + place, http) for place in range(clients)]
        work = asyncio.gather(*(program.run(steps) for program in programs))
        if number % 2:  # the episode ends while its requests are running
            await asyncio.wait([work], timeout=rng.random() * steps / 10)
        else:
            await work
        received = set[int]().union(*(program.received for program in programs))
        numbers = await asyncio.to_thread(live.checked_rows, key)
        assert received <= set(numbers), "an answer that a client received is not trained on"
        await work
        received.update(*(program.received for program in programs))
        assert len(set(numbers) - received) <= sum(program.unknown for program in programs)
        trained.extend(numbers)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as http:
        async with asyncio.timeout(60 + steps):
            await asyncio.gather(*map(episode, range(episodes)))
        assert len(trained) == len(set(trained)) > 0
        live.lost_share, last = 0.0, Client(live, live.open(), 0, http)
        await last.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "stream": False}, timeout=20)
        assert last.history and len(live.checked_rows(last.key)) == 1
    for trace in live.traces.values():
        counts = dict(trace.counts)
        assert counts.pop("sampled", 0) == sum(counts.values())


@pytest.mark.parametrize(
    ("seed", "episodes", "clients", "steps"),
    [(0, 4, 3, 12), (1, 4, 3, 12), *(pytest.param(seed, 16, 4, 100, marks=pytest.mark.long) for seed in range(2, 10))],
)
def test_random_clients(monkeypatch: pytest.MonkeyPatch, seed: int, episodes: int, clients: int, steps: int) -> None:
    monkeypatch.setattr(server, "RETRY_S", 0.1)
    monkeypatch.setattr(server, "PING_S", 0.02)
    live = Engine()
    asyncio.run(run(live, seed, episodes, clients, steps))
    live.stop()
