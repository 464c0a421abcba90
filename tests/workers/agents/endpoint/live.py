"""An endpoint whose answers come from a function instead of an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from recipes.embedded import byte_tokenizer
from verl_lite.config import EndpointConfig
from workers.agents.conversation import ChatJoins
from workers.agents.endpoint.server import Call, Endpoint
from workers.agents.endpoint.trace import Trace
from workers.agents.episodes import TokenLimits
from workers.agents.turns import Turn
from workers.engines.base import Completion, SamplingParams

TEMPLATE = (
    "{% if tools %}<|user|>TOOLS {% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>"
    "{% else %}<|user|>{{ message['role'] }}: {{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENIZER = byte_tokenizer()
TOKENIZER.chat_template = TEMPLATE
LIMITS = TokenLimits(max_prompt_length=512, max_response_length=4096, max_model_len=4608)
JOINS = ChatJoins(TOKENIZER, most_tokens=LIMITS.max_model_len)
END = JOINS.end_of_turn
SAMPLING = SamplingParams(max_tokens=256, stop_token_ids=(END,))

Answers = Callable[[str], str | Completion | None]
"""(text of the prompt) -> the answer; None = the engine never finishes this request."""


def new_trace(limits: TokenLimits = LIMITS) -> Trace:
    return Trace(JOINS, TOKENIZER, limits, [END])


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def completion_of(request_id: str, text: str, most: int, version: int = 1) -> Completion:
    """The completion of an engine that samples the bytes of `text` and the end of the turn."""
    ids = [*ids_of(text), END]
    reason = "stop" if len(ids) <= most else "length"
    ids = ids[:most]
    return Completion(request_id, ids, [-token / 512 for token in ids], reason, [version] * len(ids))  # type: ignore[arg-type]


class Live:
    """answers: text of the prompt -> answer. delay_s: seconds for which the engine works on each request."""

    def __init__(self, answers: Answers, delay_s: float = 0.0, **options: Any) -> None:
        self.answers, self.delay_s = answers, delay_s
        self.prompts: list[str] = []
        self.calls: list[Call] = []
        self.aborted: list[Call] = []
        self._woken, self._stopping = threading.Event(), False
        config = EndpointConfig(**options)
        self.endpoint = Endpoint(config, config.port, "policy", self._woken.set)
        self.traces: dict[str, Trace] = {}
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return self.endpoint.url

    def open(self, name: str = "", sampling: SamplingParams = SAMPLING, limits: TokenLimits = LIMITS) -> str:
        trace = new_trace(limits)
        key = self.endpoint.open(name or f"episode-{len(self.traces)}", trace, sampling, 7)
        self.traces[key] = trace
        return key

    def close_episode(self, key: str, reward: float = 1.0) -> list[list[Turn]]:
        """Ends the episode. Returns its rows, and checks that every sampled token is explained."""
        self.endpoint.close_episode(key)
        trace = self.traces[key]
        rows = trace.rows(reward)
        counts = dict(trace.counts)
        assert counts.pop("sampled", 0) == sum(counts.values()), counts
        return rows

    def _serve(self) -> None:
        while not self._stopping:
            self._woken.wait(0.05)
            self._woken.clear()
            new, aborted = self.endpoint.take()
            self.aborted += aborted
            for call in new:
                self.calls.append(call)
                self.prompts.append(str(TOKENIZER.decode(list(call.prompt_ids))))
                threading.Thread(target=self._answer, args=(call, self.prompts[-1]), daemon=True).start()

    def _answer(self, call: Call, prompt: str) -> None:
        time.sleep(self.delay_s)
        answer = self.answers(prompt)
        if isinstance(answer, str):
            answer = completion_of(call.request_id, answer, call.sampling.max_tokens)
        if answer is not None:
            self.endpoint.deliver(call, answer)

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()
        self.endpoint.close()
