"""The registry of reward functions by `data_source`.

Registered names may be `fnmatch` patterns (`math*`, `reasoning_gym/*`). An exact name takes precedence over a pattern,
and a longer pattern over a shorter one.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from verl_lite.errors import UserError
from verl_lite.json_types import ChatMessage, ExtraInfo, GroundTruth
from verl_lite.registry import Registry, did_you_mean, foreign_modules, takes

RewardFunction = Callable[..., Any]
"""Called as fn(data_source=, solution_str=, ground_truth=, extra_info=, **reward_kwargs), and with prompt= (the chat
messages) if it has that parameter. Returns a finite number, a bool, or a dict with a finite "score". Many calls of an
async function are awaited concurrently."""

REWARDS: Registry[RewardFunction] = Registry("reward for data_source")

NAMED = "rule/"
"""Prefix of the registered names that `reward.functions.PART.reward` selects. A prefixed name is also a data source."""


def register_reward(*patterns: str) -> Callable[[RewardFunction], RewardFunction]:
    """Returns a decorator that registers a function for the rows whose data_source matches one of `patterns`.

    Raises ValueError if a pattern is already registered for another function.
    """

    def decorate(function: RewardFunction) -> RewardFunction:
        for pattern in patterns:
            REWARDS.register(pattern)(function)
        return function

    return decorate


def find_reward(data_source: str) -> RewardFunction:
    """Returns the function that scores `data_source`. Raises UserError, with the registered names, if none does."""
    if data_source in REWARDS:
        return REWARDS[data_source]
    matching = [pattern for pattern in REWARDS if fnmatchcase(data_source, pattern)]
    if matching:
        # the most specific one: a user's `math_mine*` takes precedence over the built-in `math*`
        longest = max(matching, key=len)
        return REWARDS[longest]
    raise UserError(
        f"No reward function for data_source={data_source!r}{did_you_mean(data_source, REWARDS)}. "
        f"Known: {', '.join(sorted(REWARDS))}. "
        "Set reward.custom_reward_function.path=FILE.py (and .name=FUNCTION) to use your own, decorate one with "
        f'@register_reward("{data_source}") from verl_lite.rewards, or correct the data_source column of the data. '
        "reward.function_weight=0 needs no function: a reward model or a teacher is then the only signal."
    )


def find_named_reward(name: str) -> RewardFunction:
    """Returns the function registered as rule/NAME, else the function that scores the data source NAME.

    Raises UserError, with the registered names, if there is neither.
    """
    prefixed_name = NAMED + name
    if prefixed_name in REWARDS:
        return REWARDS[prefixed_name]
    try:
        return find_reward(name)
    except UserError:
        # its remedies do not apply to a name that the user wrote in the configuration
        names = sorted({registered.removeprefix(NAMED) for registered in REWARDS})
        raise UserError(f"no reward has this name{did_you_mean(name, names)}. Known: {', '.join(names)}") from None


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: GroundTruth,
    extra_info: ExtraInfo | None = None,
    prompt: list[ChatMessage] | None = None,
    images: Sequence[object] = (),
    **reward_kwargs: object,
) -> Any:
    """Scores one response with the function registered for its data_source.

    Args:
        data_source: name of the row's dataset or task.
        solution_str: decoded response, without the prompt.
        ground_truth: `reward_model["ground_truth"]` of the row.
        extra_info: further data of the row.
        prompt: chat messages, passed to functions that have this parameter.
        images: PIL images of the prompt, passed to functions that have this parameter.
        reward_kwargs: the user's further arguments.

    Returns:
        The function's result: a number, a bool, a dict with "score", or an awaitable of one of these.

    Raises:
        UserError: no function is registered for the data_source.
    """
    function = find_reward(data_source)
    arguments = {
        "data_source": data_source,
        "solution_str": solution_str,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    }
    # verl's functions do not have these parameters
    if takes(function, "prompt"):
        arguments["prompt"] = prompt
    if takes(function, "images"):
        arguments["images"] = images
    return function(**arguments, **reward_kwargs)


def reward_modules() -> list[str]:
    """Returns the modules outside this project that registered rewards. Each reward process imports them again."""
    return foreign_modules(REWARDS.values())
