"""An agent that answers arithmetic questions with a calculator, written for the openai client.

The trainer calls `run` once per episode. The agent does not know that it is trained: base_url could be any server.
"""

import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError

from recipes.agent_program.data import ERROR
from verl_lite.envs.calculator import TOOL, evaluate, number_in, written

CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="set for each episode")  # episodes share its connections
TOOLS: list[Any] = [{"type": "function", "function": TOOL}]
MOST_TURNS = 4


async def run(base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, float]:
    """Answers the question of `row`. Returns the score 1 for the right number, and the number of tool calls."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = list(row["prompt"])
    calls = errors = 0
    for _ in range(MOST_TURNS):
        try:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        except BadRequestError:  # the conversation is too long, which is a failure of the policy and scores 0
            return {"score": 0.0, "success": 0.0, "tool_calls": calls, "tool_errors": errors}
        answer = reply.choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            result, worked = calculate(call.function.arguments)
            calls, errors = calls + 1, errors + (not worked)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    is_right = number_in(answer.content or "") == number_in(row["reward_model"]["ground_truth"])
    return {"score": float(is_right), "success": float(is_right), "tool_calls": calls, "tool_errors": errors}


def calculate(arguments: str) -> tuple[str, bool]:
    """Returns the result of the calculator or `ERROR`, and True if it worked."""
    try:
        return written(evaluate(str(json.loads(arguments)["expression"]))), True
    except (KeyError, ValueError, ArithmeticError):
        return ERROR, False
