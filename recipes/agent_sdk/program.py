"""An agent of the OpenAI Agents SDK with a calculator. For OpenAI's own models it would have no `model_provider`."""

from agents import Agent, RunConfig, Runner, function_tool
from agents.exceptions import AgentsException
from agents.models.openai_provider import OpenAIProvider
from openai import BadRequestError

from recipes.agent_program.data import ERROR
from verl_lite.envs.calculator import evaluate, number_in, written
from verl_lite.json_types import DatasetRow


@function_tool
def calculator(expression: str) -> str:
    """The value of an arithmetic expression."""
    # the docstring is what the model reads about the tool
    try:
        value = evaluate(expression)
        return written(value)
    except (ValueError, ArithmeticError):
        return ERROR


AGENT = Agent(name="accountant", tools=[calculator])


async def run(base_url: str, api_key: str, row: DatasetRow) -> dict[str, float]:
    """Answers the question of `row`. Returns the score, which is 1 for the right number, and the number of turns."""
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    run_config = RunConfig(model_provider=provider)
    question = row["prompt"][0]["content"]
    try:
        # as many turns as in agent_program
        result = await Runner.run(AGENT, question, max_turns=4, run_config=run_config)
    except (AgentsException, BadRequestError):
        # too many turns, an unknown tool, or a conversation that is too long
        return {"score": 0.0, "success": 0.0}

    number = number_in(str(result.final_output))
    truth = number_in(row["reward_model"]["ground_truth"])
    score = float(number == truth)
    turns = float(len(result.raw_responses))
    return {"score": score, "success": score, "turns": turns}
