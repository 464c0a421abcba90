"""An environment of `verifiers` with packaged data: sums with and without tools, and what can be wrong with one."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

from tests.verl_lite.envs.hub_sums import score

ROWS = [{"question": f"What is {a} + {a + 1}?", "answer": str(2 * a + 1)} for a in range(3, 8)]


def add(a: int, b: int | None = None) -> int:
    """Adds two integers."""
    return a + (b or 0)


def echo(text: str) -> str:
    """Returns the text."""
    return text


def exact(completion: Any, answer: str) -> float:
    return score(completion[-1].content, answer)


def compared(states: list[Any]) -> list[float]:
    return [0.0 for _ in states]


class Guessing(vf.MultiTurnEnv):
    """Replies until the right answer; "error" breaks it."""

    cleaned = 0

    @vf.cleanup
    async def count(self, state: Any) -> None:
        self.cleaned += 1

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        said = messages[-1].content
        if said == "error":
            raise vf.InfraError("the sandbox is gone")
        if said == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="Right.")]
        return [vf.UserMessage(content=f"Not {said}.")]


def load_environment(kind: str = "tools", rows: int = 5) -> vf.Environment:
    data = Dataset.from_list(ROWS).select(range(rows))
    rubric = vf.Rubric(funcs=[compared if kind == "group" else exact])
    if kind == "single":
        few_shot = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}]
        return vf.SingleTurnEnv(dataset=data, rubric=rubric, few_shot=few_shot)
    if kind == "several":
        return vf.EnvGroup(envs=[load_environment("tools"), load_environment("single")])
    if kind == "guess":
        return Guessing(eval_dataset=data, rubric=rubric)
    return vf.ToolEnv(dataset=data, rubric=rubric, tools=[add, echo], system_prompt="Add.")
