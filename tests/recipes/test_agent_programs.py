"""The agents of recipes/agent_program and recipes/agent_sdk against an endpoint with scripted answers."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest

from recipes.agent_program import data, program
from tests.workers.agents.endpoint.live import LIMITS, Live
from verl_lite.envs.calculator import evaluate, written

ROW = {"prompt": [{"role": "user", "content": "17*8-5"}], "reward_model": {"ground_truth": "131"}}
CALL = f"<tool_call>{data.BEFORE}17*8-5{data.AFTER}</tool_call>"


RUNNER = asyncio.Runner()  # the agents of a process share connections, which belong to one event loop


def agents() -> list[Any]:
    os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # as the trainer does
    from recipes.agent_sdk import program as of_sdk

    return [pytest.param(program.run, id="openai"), pytest.param(of_sdk.run, id="agents sdk")]


@pytest.mark.parametrize("run", agents())
@pytest.mark.parametrize(
    ("first", "last", "score"),
    [(CALL, "131", 1.0), (CALL, "130", 0.0), ("131", "", 1.0), (CALL.replace("17", "0"), "no", 0.0), (CALL, CALL, 0.0)],
)
def test_an_agent_calls_the_calculator_and_its_episode_is_one_row(
    run: Any, first: str, last: str, score: float
) -> None:
    live = Live(lambda prompt: last if "<tool_call>" in prompt else first)
    try:
        key = live.open()
        result = RUNNER.run(run(base_url=f"{live.url}/v1", api_key=key, row=ROW))
        assert result["score"] == score
        [turns] = live.close_episode(key, score)
        assert turns[0].action.endswith(first if first == "131" else '"})') and LIMITS.max_response_length
    finally:
        live.stop()


def test_the_demonstrations_call_the_tool_with_careless_copies() -> None:
    rng = random.Random(1)
    questions = data.questions(rng)
    shown = [(question := next(questions), data.demonstration(question, rng)["messages"]) for _ in range(200)]
    right = [chat[-1]["content"] == question.answer for question, chat in shown]  # type: ignore[index]
    assert 40 < sum(right) < 160
    for question, chat in shown:
        assert question.answer == written(evaluate(question.prompt))
        assert chat[1]["content"].startswith("<tool_call>")  # type: ignore[index]
