"""Environments of gymnasium, GEM and reasoning-gym that ask for a sum, and raise or hang if the answer says so."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import gymnasium
from reasoning_gym.factory import ProceduralDataset, register_dataset

Step = tuple[str, float, bool, bool, dict[str, Any]]
BROKEN = "broken by the test"
BROKEN_SEED = 7
"""The question of reasoning-gym whose own answer makes the scorer raise, so that the entry is at fault."""


def score(answer: str, right: str) -> float:
    if answer == "raise":
        raise ZeroDivisionError(BROKEN)
    if answer == "hang":
        time.sleep(1000)
    return float("nan") if answer == "nan" else float(answer == right)


class GemSums:
    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        return f"What is {seed} + {seed + 1}?", {"env_instruction": "Add."}

    def step(self, action: str) -> Step:
        return "", score(action, str(2 * self.seed + 1)), True, False, {}


class GymSums(gymnasium.Env[str, str]):
    action_space = gymnasium.spaces.Text(max_length=20)
    observation_space = gymnasium.spaces.Text(max_length=20)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.sums = GemSums()
        return self.sums.reset(seed or 0)

    def step(self, action: str) -> Step:
        return self.sums.step(action)


@dataclass
class Config:
    size: int = 10
    seed: int = 0


class ReasoningSums(ProceduralDataset):
    def __init__(self, config: Config) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        answer = "raise" if index == BROKEN_SEED else str(2 * index + 1)
        return {"question": f"What is {index} + {index + 1}?", "answer": answer, "metadata": {}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return score(str(answer), entry["answer"])


gymnasium.register("HubSums-v0", GymSums, disable_env_checker=True)
register_dataset("hub_sums", ReasoningSums, Config)
