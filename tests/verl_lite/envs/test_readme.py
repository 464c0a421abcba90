"""trainer/AGENTIC.md: its code runs, its YAML is accepted, its tables name what there is."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import verl_lite.envs
from verl_lite.config import AgenticConfig
from verl_lite.envs import ENVS, env_templates
from verl_lite.envs.base import STEP_FIELDS, TRAJECTORY_FIELDS, EnvTemplate, find_env

README = (Path(verl_lite.envs.__file__).parents[2] / "trainer" / "AGENTIC.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def my_worlds() -> Iterator[ModuleType]:
    module = ModuleType("my_worlds")
    sys.modules["my_worlds"] = module
    exec(blocks("python")[0], module.__dict__)
    yield module
    del sys.modules["my_worlds"], ENVS["treasure"]


def test_the_environment_is_as_short_as_it_says_and_works(my_worlds: ModuleType) -> None:
    assert len(blocks("python")[0].splitlines()) <= 31
    exec(blocks("python")[1], {})
    world = my_worlds.Treasure(chests=16)
    world.reset(3)
    low, high, turns = 0, 15, 0
    while True:
        guess, turns = (low + high) // 2, turns + 1
        observation, reward, terminated, _, info = world.step(f"<answer>{guess}</answer>")
        assert info["metrics"]["action_is_valid"]
        if terminated:
            break
        low, high = (guess + 1, high) if "right" in observation else (low, guess - 1)
    assert reward == 1.0 and turns <= 5
    assert world.step("<answer>99</answer>")[4]["metrics"] == {"action_is_valid": False, "success": False}


def test_the_configurations_are_accepted(my_worlds: ModuleType) -> None:
    options = set(AgenticConfig.__dataclass_fields__)
    managers = set(AgenticConfig().train_env_manager.__dataclass_fields__)
    for block in blocks("yaml"):
        agentic = yaml.safe_load(block)["agentic"]
        assert set(agentic) <= options and set(agentic["train_env_manager"]) <= managers
        for template in env_templates(agentic["custom_envs"]).values():
            template.make().reset(0)


def test_the_tables_are_complete() -> None:
    for name in set(ENVS) - {"treasure", "corridor"}:
        row = next(line for line in README.splitlines() if line.startswith(f"| `{name}` |"))
        told = set(re.findall(r"`(\w+)`", row)) | set(re.findall(r"`(\w+)`", README[README.index("The first two") :]))
        assert set(inspect.signature(find_env(name)).parameters) <= told, name
    for option in EnvTemplate.__dataclass_fields__:
        assert option == "tag" or f"`{option}`" in README
    for field in (*TRAJECTORY_FIELDS, *STEP_FIELDS):
        assert f"`{{{field}}}`" in README
