"""The registry and the entries of agentic.custom_envs: what is accepted, and what the errors say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from verl_lite.envs import ENVS, env_modules, env_templates, make_env, register_env
from verl_lite.errors import UserError

HUBS = ["gem", "gymnasium", "openenv", "reasoning_gym", "verifiers"]
OWN = ["calculator", "frozen_lake", "sokoban", *HUBS]


class Corridor:
    """Five cells; the last is the goal."""

    def __init__(self, length: int = 5) -> None:
        self.length, self.place = length, 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.place = 0
        return "0", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.place += action == "on"
        return str(self.place), float(self.place == self.length), self.place == self.length, False, {}


@pytest.fixture
def corridor() -> Iterator[str]:
    register_env("corridor")(Corridor)
    yield "corridor"
    del ENVS["corridor"]


def test_the_names_there_are(corridor: str) -> None:
    assert set(ENVS) == {*OWN, corridor}
    assert env_modules() == [Corridor.__module__]


def test_environments_are_made_by_name_and_by_path(corridor: str) -> None:
    assert isinstance(make_env(corridor, {"length": 2}), Corridor)
    assert type(make_env("tests.verl_lite.envs.test_base:Corridor")).__name__ == "Corridor"


def test_no_torch_in_an_environment_process() -> None:
    code = "import sys, verl_lite.envs; print('torch' in sys.modules, 'gymnasium' in sys.modules, 'ray' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert answer.stdout.split() == ["False", "False", "False"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"env_type": "corridr"}, "agentic.custom_envs.one.env_type='corridr': Unknown environment"),
        ({"env_type": "corridr"}, "did you mean corridor"),
        ({}, "agentic.custom_envs.one is {}: expected a mapping with env_type"),
        ({"max_stps": 3}, "agentic.custom_envs.one.max_stps: unknown key"),
        ({"max_stps": 3}, "did you mean max_steps"),
        ({"max_steps": 0}, "agentic.custom_envs.one.max_steps is 0: expected a whole number of at least 1"),
        ({"max_steps": True}, "max_steps is True"),
        ({"max_tokens_per_step": 0}, "max_tokens_per_step is 0: expected a whole number of at least 1 or null"),
        ({"history_length": -1}, "history_length is -1: expected a whole number of at least 0"),
        ({"use_thread_lock": "yes"}, "use_thread_lock is 'yes': expected true or false"),
        ({"env_config": {"lenght": 3}}, "agentic.custom_envs.one.env_config.lenght: corridor has no such option"),
        ({"env_config": {"lenght": 3}}, "did you mean length"),
        ({"env_config": [3]}, "and env_config, a mapping"),
        ({"env_type": "gymnasium"}, "agentic.custom_envs.one.env_config.env_id is missing"),
        ({"env_manager_cls": "TrajEnvManger"}, "env_manager_cls is 'TrajEnvManger': expected trajectory | step"),
        ({"agent_template": "{observatoin}"}, "found {observatoin}"),
        ({"agent_template": "{history}"}, "with env_manager_cls: step also history"),
        ({"agent_template": "{observation"}, "agent_template is '{observation': expected text for str.format"),
        ({"agent_template": None}, "agent_template is None: expected text"),
        ({"tool_wrapper": {"a": 1}}, "agentic.custom_envs.one.tool_wrapper: not supported; make the tools part of"),
    ],
)
def test_what_is_wrong_is_named(corridor: str, entry: dict[str, Any], said: str) -> None:
    given = entry if not entry or "env_type" in entry else {"env_type": corridor, **entry}
    with pytest.raises(UserError) as caught:
        env_templates({"one": given})
    assert said in str(caught.value)


def test_what_an_entry_means(corridor: str) -> None:
    both = env_templates(
        {
            "plain": {"env_type": corridor},
            "roll": {
                "env_type": corridor,
                "env_manager_cls": "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager",
                "agent_template": "{history} {{braces}} {current_observation}",
                "env_config": {"length": 2},
                "tool_wrapper": None,
            },
        }
    )
    assert not both["plain"].by_step and both["plain"].max_steps == 10
    assert both["plain"].fields == {"observation", "suffix"}
    assert both["roll"].by_step and both["roll"].fields == {"history", "current_observation"}
    env = both["roll"].make()
    assert [env.step("on")[1:3] for _ in range(2)] == [(0.0, False), (1.0, True)]


def test_no_step_is_an_error() -> None:
    with pytest.raises(UserError, match="Half needs the methods"):
        make_env("tests.verl_lite.envs.test_base:Half")


class Half:
    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "", {}
