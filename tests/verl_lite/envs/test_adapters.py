"""Worlds of other libraries behind the protocol, and every registered environment against it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from tests.guess_number import GUESS_NUMBER
from verl_lite.envs import make_env
from verl_lite.errors import UserError


class Echo(gymnasium.Env[str, str]):
    """Text in, text out; "end" ends it with reward 2."""

    action_space = gymnasium.spaces.Text(max_length=20)
    observation_space = gymnasium.spaces.Text(max_length=20)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"seed {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"you said {action}", 2.0 if action == "end" else 0.0, action == "end", False, {}


@pytest.fixture(scope="module")
def echo() -> str:
    gymnasium.register("verl_lite_tests/Echo-v0", Echo, disable_env_checker=True)
    return "verl_lite_tests/Echo-v0"


def test_gymnasium_text_actions_go_through(echo: str) -> None:
    env = make_env("gymnasium", {"env_id": echo})
    assert env.reset(3)[0] == "seed 3"
    assert env.step("<answer>hello</answer>")[:2] == ("you said hello", 0.0)
    observation, reward, terminated, _, info = env.step("hello")
    assert observation == "you said hello" and not info["metrics"]["action_is_valid"]
    assert env.step("<answer>end</answer>")[4]["metrics"] == {"action_is_valid": True, "success": True}


def test_gymnasium_discrete_actions_have_names() -> None:
    options = {"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}}
    env = make_env("gymnasium", {**options, "observe": "render", "action_lookup": ["Left", "Down", "Right", "Up"]})
    assert env.reset(0)[0] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    for word in ("Down", "Down", "Right", "Down", "right"):
        env.step(f"<answer>{word}</answer>")
    observation, reward, terminated, _, info = env.step("<answer>Right</answer>")
    assert (reward, terminated, info["metrics"]["success"]) == (1.0, True, True)
    numbers = make_env("gymnasium", options)
    assert numbers.reset(0)[0] == "0"
    assert numbers.step("<answer>2</answer>")[0] == "1"


class Compound(Echo):
    """Its observation has parts of different shapes."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        grid = np.zeros((1, 2), dtype=np.float32)
        return {"hands": (np.array([1, 2]), np.int64(3)), "grid": grid, "goal": "reach it"}, {}


def test_gymnasium_observations_of_several_parts_are_text() -> None:
    gymnasium.register("verl_lite_tests/Compound-v0", Compound, disable_env_checker=True)
    env = make_env("gymnasium", {"env_id": "verl_lite_tests/Compound-v0"})
    assert env.reset(0)[0] == "{'hands': [[1, 2], 3], 'grid': [[0.0, 0.0]], 'goal': 'reach it'}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env_id": "NoSuchThing-v1"}, "gymnasium cannot create it"),
        ({"env_id": "MountainCarContinuous-v0"}, "expected Text or Discrete"),
        ({"env_id": "FrozenLake-v1", "action_lookup": {9: "Up"}}, "the actions of FrozenLake-v1 are [0, 1, 2, 3]"),
        ({"env_id": "FrozenLake-v1", "observe": "pixels"}, "observe='pixels'"),
    ],
)
def test_gymnasium_errors(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        make_env("gymnasium", options)
    assert said in str(caught.value)


class GemLike:
    """GEM's signature: seed by keyword."""

    def __init__(self, mark: str = "!") -> None:
        self.mark = mark

    def reset(self, seed: int | None = None, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        assert seed is not None
        return f"question {seed}", {"suffix": self.mark}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "end", float(action == "yes"), True, False, {}

    def sample_random_action(self) -> str:
        return "yes"


def test_gem_objects() -> None:
    path = f"{__name__}:GemLike"
    env = make_env("gem", {"env": path, "env_kwargs": {"mark": "?"}})
    assert env.reset(0) == ("question 0", {"suffix": "?"})
    assert env.step("yes")[1:4] == (1.0, True, False)
    assert env.step("yes")[4]["metrics"] == {"success": True}
    with pytest.raises(UserError, match="is not pkg.module:Class .*, and names of GEM need"):
        make_env("gem", {"env": "game:NoSuchGame-v0"})


def test_reasoning_gym_questions_are_scored_by_its_scorer() -> None:
    pytest.importorskip("reasoning_gym")
    task = {"task": "spell_backward", "size": 3}
    env = make_env("reasoning_gym", task)
    questions = [env.reset(seed)[0] for seed in range(5)]
    assert len(set(questions)) == 3 and questions[3:] == questions[:2], "the seed modulo size"
    env.reset(1)
    word = env.dataset[1]["metadata"]["word"]  # type: ignore[attr-defined]
    assert env.step(f"<answer>{word[::-1]}</answer>")[1:3] == (1.0, True)
    env.reset(1)
    _, reward, terminated, _, info = env.step(word[::-1])  # not in the notation
    assert (reward, terminated, info["metrics"]["action_is_valid"]) == (0.0, True, False)
    with pytest.raises(UserError, match="no_such_task"):
        make_env("reasoning_gym", {"task": "no_such_task"})


# ------------------------------------------------------------------------------- every environment, the same promise

EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("frozen_lake", {}),
    ("frozen_lake", {"is_slippery": True}),
    ("sokoban", {}),
    ("calculator", {}),
    (GUESS_NUMBER, {}),
    ("gymnasium", {"env_id": "FrozenLake-v1", "observe": "render"}),
    ("gymnasium", {"env_id": "CartPole-v1"}),
    ("gem", {"env": f"{__name__}:GemLike"}),
    ("reasoning_gym", {"task": "spell_backward", "size": 10}),
]


@pytest.mark.parametrize(("env_type", "options"), EXAMPLES)
def test_the_protocol_holds(env_type: str, options: dict[str, Any]) -> None:
    """Same seed, same episode, in a fresh object and in one that was used before; any text is answered."""
    env, other = make_env(env_type, options), make_env(env_type, options)
    episodes = [play(env, 5), play(other, 6) and play(other, 5), play(env, 5)]
    assert episodes[0] == episodes[1] == episodes[2]
    for text in (
        "",
        "<answer>",
        "<answer></answer>",
        "\x00√" * 50,
        "<tool_call>{",
        "<answer>" + "9" * 5_000 + "</answer>",
    ):
        env.reset(1)
        assert isinstance(env.step(text)[0], str)


def play(env: Any, seed: int) -> list[Any]:
    observation, info = env.reset(seed)
    assert isinstance(observation, str) and isinstance(info, dict)
    seen: list[Any] = [observation]
    for turn in range(6):
        action = env.sample_random_action() if turn % 2 else "nonsense"
        observation, reward, terminated, truncated, info = env.step(action)
        assert type(observation) is str and type(reward) is float and np.isfinite(reward)
        assert type(terminated) is bool and type(truncated) is bool and isinstance(info, dict)
        for name, value in info.get("metrics", {}).items():
            assert isinstance(name, str) and np.isfinite(float(value))
        assert set(info.get("metrics_agg_mode", {}).values()) <= {"mean", "sum", "min", "max", "last", "first"}
        seen.append((observation, reward, terminated, truncated, info.get("metrics")))
        if terminated or truncated:
            break
    return seen
