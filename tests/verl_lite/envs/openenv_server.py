"""An OpenEnv server: sums, and what can go wrong. `python -m tests.verl_lite.envs.openenv_server PORT`."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from tests.verl_lite.envs.hub_sums import score


class SumAction(Action):
    message: str
    factor: int = 1


class SumObservation(Observation):
    prompt: str = ""


class SumClient(GenericEnvClient):
    """A client with types."""

    def _step_payload(self, action: SumAction) -> dict[str, Any]:
        return {"message": action.message, "factor": action.factor}

    def _parse_result(self, payload: dict[str, Any]) -> Any:
        result = super()._parse_result(payload)
        result.observation = SumObservation(**result.observation)
        return result


class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._answer = 0

    def reset(self, seed: int = 0, largest: int = 99, **_: Any) -> SumObservation:
        a, b = random.Random(seed).choices(range(largest + 1), k=2)
        self._answer = a + b
        return SumObservation(prompt=f"What is {a} + {b}?")

    def step(self, action: SumAction, timeout_s: float | None = None, **_: Any) -> SumObservation:
        reward = score(action.message, str(self._answer * action.factor))
        return SumObservation(prompt="Right." if reward == 1 else action.message, reward=reward, done=reward != 0)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Sums, SumAction, SumObservation, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
