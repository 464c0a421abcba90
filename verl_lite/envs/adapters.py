"""Adapters for environments of other libraries: gymnasium, GEM, reasoning-gym.

gymnasium       environments whose action space is Text, or Discrete with names of the actions
gem             objects with GEM's reset(seed=) and step(action), named as pkg.module:Class or by GEM's name
reasoning_gym   generators of reasoning-gym: one question, one answer, the generator's scorer
"""

import functools
import importlib
import re
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from verl_lite import gym_scores
from verl_lite.envs.actions import ANSWER_PATTERN, SPECIAL_TOKENS, ActionParser, Lookup
from verl_lite.envs.base import Info, StepResult, register_env
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject, KeywordArguments
from verl_lite.registry import object_at

AGG_MODES = {"action_is_valid": "mean", "success": "last"}
_HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]*m([^\x1b]*)\x1b\[0m")
"""A letter in a terminal color, with which text environments mark the player's position."""


@register_env("gymnasium")
class GymnasiumEnv:
    """A gymnasium environment by its id, "FrozenLake-v1" or "module:Id-v0".

    Args:
        env_id: the id.
        env_kwargs: keyword arguments of gymnasium.make.
        action_lookup: names of the actions of a Discrete space; None = their numbers.
        action_pattern, special_token_list: see `ActionParser`.
        observe: "space", the returned observation as text, or "render", the text frame (render_mode "ansi").
        env_instruction: description of the task.
        success_reward: sum of rewards from which a terminated episode is a success.
    """

    def __init__(
        self,
        env_id: str,
        env_kwargs: KeywordArguments | None = None,
        action_lookup: Lookup | None = None,
        action_pattern: str = ANSWER_PATTERN,
        special_token_list: Sequence[str] = SPECIAL_TOKENS,
        observe: str = "space",
        env_instruction: str = "",
        success_reward: float = 1.0,
    ) -> None:
        import gymnasium

        if observe not in ("space", "render"):
            raise UserError(f"observe={observe!r}: expected space or render")
        kwargs = dict(env_kwargs or {})
        if observe == "render":
            # the mode that returns a text
            kwargs["render_mode"] = "ansi"
        try:
            self.env = gymnasium.make(env_id, **kwargs)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise UserError(f"env_id={env_id!r}: gymnasium cannot create it: {error}") from error

        space = self.env.action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            start = int(space.start)
            numbers = range(start, start + int(space.n))
            if action_lookup is None:
                action_lookup = {number: str(number) for number in numbers}
        elif not isinstance(space, gymnasium.spaces.Text):
            raise UserError(f"env_id={env_id!r}: its action space is {space}; expected Text or Discrete")
        self.parser = ActionParser(action_pattern, action_lookup, special_token_list)
        # after the parser, which converts keys such as "0" to numbers
        actions = set(self.parser.names or {})
        if isinstance(space, gymnasium.spaces.Discrete) and not actions <= set(numbers):
            raise UserError(f"action_lookup={action_lookup!r}: the actions of {env_id} are {list(numbers)}")

        self.by_render = observe == "render"
        self.instruction = env_instruction
        self.success_reward = success_reward
        self.text = ""
        self.score = 0.0

    def reset(self, seed: int) -> tuple[str, Info]:
        observation, _ = self.env.reset(seed=seed % 2**31)
        self.score = 0.0
        self.text = self._text(observation)
        return self.text, {"env_instruction": self.instruction, "metrics_agg_mode": AGG_MODES}

    def step(self, action: str) -> StepResult:
        parsed = self.parser(action)
        if parsed.action is None:
            # nothing has happened, so the agent sees the same observation again
            hint = ""
            if self.parser.names:
                hint = f"This is not an action. Actions are {', '.join(self.parser.names.values())}.\n"
            return hint + self.text, 0.0, False, False, self._info(is_valid=False, is_success=False)

        observation, reward, terminated, truncated, _ = self.env.step(parsed.action)
        self.score += float(reward)
        self.text = self._text(observation)
        is_success = bool(terminated) and self.score >= self.success_reward
        info = self._info(is_valid=True, is_success=is_success)
        return self.text, float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        self.env.close()

    def sample_random_action(self) -> str:
        # without names any text is an action
        name = "a"
        if self.parser.names:
            name = next(iter(self.parser.names.values()))
        return f"<answer>{name}</answer>"

    def _text(self, observation: object) -> str:
        """Returns what the agent sees: the text frame, or the observation."""
        if self.by_render:
            frame = str(self.env.render())
            return _HIGHLIGHTED.sub(r"[\1]", frame).strip("\n")
        if isinstance(observation, str):
            return observation
        return str(_plain(observation))

    def _info(self, *, is_valid: bool, is_success: bool) -> Info:
        return {"metrics": {"action_is_valid": is_valid, "success": is_success}, "metrics_agg_mode": AGG_MODES}


def _plain(value: object) -> object:
    """Returns an observation with Python's numbers and lists instead of numpy's, at any depth of a Dict or Tuple."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    # not as one array, because the parts of a Tuple may have different shapes
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value


@register_env("gem")
class GemEnv:
    """An object with the interface of GEM (`gem-llm`): `reset(seed=)` and `step(action)` on texts.

    The environment's info is passed on. If it has no metrics, the metric success is added.

    Args:
        env: "pkg.module:Class", which does not need the package gem, or a name for gem.make,
            "game:GuessTheNumber-v0".
        env_kwargs: arguments of the environment.
        success_reward: final reward from which an episode is a success.
    """

    def __init__(self, env: str, env_kwargs: KeywordArguments | None = None, success_reward: float = 1.0) -> None:
        try:
            factory = object_at(env)
        except UserError as problem:
            try:
                gem = importlib.import_module("gem")
                factory = functools.partial(gem.make, env)
            except ImportError as error:
                raise UserError(
                    f"env={env!r} is not pkg.module:Class ({problem}), and names of GEM need the package gem-llm; "
                    "install gem-llm or set env to the path of a class with reset(seed) and step(action)"
                ) from error
        self.env = factory(**dict(env_kwargs or {}))
        self.success_reward = success_reward

    def reset(self, seed: int) -> tuple[str, Info]:
        observation, info = self.env.reset(seed=seed)
        return observation, dict(info or {})

    def step(self, action: str) -> StepResult:
        observation, reward, terminated, truncated, env_info = self.env.step(action)
        reward = float(reward)
        terminated = bool(terminated)
        info: Info = dict(env_info or {})
        if "metrics" not in info:
            is_success = terminated and reward >= self.success_reward
            info["metrics"] = {"success": is_success}
            info["metrics_agg_mode"] = AGG_MODES
        return observation, reward, terminated, bool(truncated), info

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()

    def sample_random_action(self) -> str:
        if not hasattr(self.env, "sample_random_action"):
            return ""
        return str(self.env.sample_random_action())


@register_env("reasoning_gym")
class ReasoningGymEnv:
    """One question of a reasoning-gym generator. The reward is the score of its scorer, as `gym_scores` limits it.

    The question of an episode has the number seed modulo `size`. An episode with the full score is a success.

    Args:
        task: name of the generator, such as "spell_backward".
        task_config: options of the generator.
        size, dataset_seed: size and seed of the set of questions.
        answer_pattern: see `ActionParser`.
        env_instruction: description of the task.
    """

    def __init__(
        self,
        task: str,
        task_config: KeywordArguments | None = None,
        size: int = 10_000,
        dataset_seed: int = 0,
        answer_pattern: str = ANSWER_PATTERN,
        env_instruction: str = "Write your answer as <answer>...</answer>.\n",
    ) -> None:
        self.task = task
        self.size = size
        self.instruction = env_instruction
        self.parser = ActionParser(answer_pattern)
        options = dict(task_config or {}) | {"size": size, "seed": dataset_seed}
        try:
            with warnings.catch_warnings():
                # raised by a dependency when it is first compiled
                warnings.simplefilter("ignore", SyntaxWarning)
                reasoning_gym = importlib.import_module("reasoning_gym")
            self.dataset = reasoning_gym.create_dataset(task, **options)
        except ImportError as error:
            raise UserError(f"task={task!r}: reasoning-gym is not installed: pip install reasoning-gym") from error
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(f"task={task!r} with {options}: reasoning-gym cannot create it: {error}") from error
        self.entry: JsonObject = {}

    def reset(self, seed: int) -> tuple[str, Info]:
        self.entry = self.dataset[seed % self.size]
        question = str(self.entry["question"])
        return question, {"env_instruction": self.instruction, "metrics_agg_mode": AGG_MODES}

    def step(self, action: str) -> StepResult:
        parsed = self.parser(action)
        is_valid = parsed.action is not None
        score = 0.0
        if is_valid:
            score = gym_scores.score(self.task, self.dataset.score_answer, str(parsed.action), self.entry)
        info: Info = {
            "metrics": {"action_is_valid": is_valid, "success": score >= 1},
            "metrics_agg_mode": AGG_MODES,
        }
        return f"Score {score:g}.", score, True, False, info

    def sample_random_action(self) -> str:
        return "<answer>0</answer>"
