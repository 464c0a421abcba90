"""An agent that answers arithmetic questions with a calculator, written for the openai client.

The trainer calls `run` once per episode. The agent does not know that it is trained: base_url could be any server.
"""

import json

from openai import AsyncOpenAI, BadRequestError

from recipes.agent_program.data import ERROR
from verl_lite.envs.calculator import TOOL, evaluate, number_in, written
from verl_lite.json_types import DatasetRow

# one client for all episodes, which share its connections
CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="set for each episode")
TOOLS = [{"type": "function", "function": TOOL}]
MOST_TURNS = 4


async def run(base_url: str, api_key: str, row: DatasetRow) -> dict[str, float]:
    """Answers the question of `row`. Returns the score, which is 1 for the right number, and counts of tool calls.

    Args:
        base_url: Address of the episode's endpoint.
        api_key: Key that identifies the episode at the endpoint.
        row: A row of the data with `prompt` and `reward_model`.
    """
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = list(row["prompt"])
    calls = 0
    errors = 0
    for _ in range(MOST_TURNS):
        try:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        except BadRequestError:
            # the conversation is too long, which is a failure of the policy and scores 0
            return {"score": 0.0, "success": 0.0, "tool_calls": calls, "tool_errors": errors}

        answer = reply.choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            result, worked = calculate(call.function.arguments)
            calls += 1
            if not worked:
                errors += 1
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    number = number_in(answer.content or "")
    truth = number_in(row["reward_model"]["ground_truth"])
    score = float(number == truth)
    return {"score": score, "success": score, "tool_calls": calls, "tool_errors": errors}


def calculate(arguments: str) -> tuple[str, bool]:
    """Runs the calculator on the JSON arguments of a tool call.

    Returns:
        The result and True, or `ERROR` and False if the arguments contain no expression with a value.
    """
    # the arguments are tokens of the policy, which can be anything
    try:
        expression = str(json.loads(arguments)["expression"])
        value = evaluate(expression)
        return written(value), True
    except (KeyError, ValueError, ArithmeticError):
        return ERROR, False
