"""Which reward function scores which `data_source`.

Names are patterns of `fnmatch` (`math*`, `reasoning_gym/*`). The full name wins over a pattern, a longer pattern over a
shorter one.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from verl_lite.errors import UserError
from verl_lite.registry import Registry, did_you_mean, foreign_modules, takes

RewardFunction = Callable[..., Any]
"""Called as fn(data_source=, solution_str=, ground_truth=, extra_info=, **reward_kwargs), and with prompt= (the chat
messages) if it names that argument; returns a finite number, a bool, or a dict with a finite "score". Async functions
are awaited, many at once."""

REWARDS: Registry[RewardFunction] = Registry("reward for data_source")

NAMED = "rule/"
"""Beginning of the names under which rewards are registered to be named by `reward.functions.PART.reward`. They are
data sources like any other, too."""


def register_reward(*patterns: str) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: the function scores rows whose data_source matches one of `patterns`.

    Raises ValueError if one of them belongs to another function.
    """

    def decorate(function: RewardFunction) -> RewardFunction:
        for pattern in patterns:
            REWARDS.register(pattern)(function)
        return function

    return decorate


def find_reward(data_source: str) -> RewardFunction:
    """The function that scores `data_source`. Raises UserError if there is none, listing what is known."""
    if data_source in REWARDS:
        return REWARDS[data_source]
    if matching := [pattern for pattern in REWARDS if fnmatchcase(data_source, pattern)]:
        return REWARDS[max(matching, key=len)]
    raise UserError(
        f"No reward function for data_source={data_source!r}{did_you_mean(data_source, REWARDS)}. "
        f"Known: {', '.join(sorted(REWARDS))}. "
        "Set reward.custom_reward_function.path=FILE.py (and .name=FUNCTION) to use your own, decorate one with "
        f'@register_reward("{data_source}") from verl_lite.rewards, or correct the data_source column of the data.'
    )


def find_named_reward(name: str) -> RewardFunction:
    """The function registered as rule/NAME, or that scores the data source NAME. Raises UserError if there is none,
    listing what is known."""
    if NAMED + name in REWARDS:
        return REWARDS[NAMED + name]
    try:
        return find_reward(name)
    except UserError:
        known = sorted({full.removeprefix(NAMED) for full in REWARDS})
        raise UserError(f"no reward has this name{did_you_mean(name, known)}. Known: {', '.join(known)}") from None


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    prompt: list[dict[str, str]] | None = None,
    **reward_kwargs: Any,
) -> Any:
    """Scores one answer with the function registered for its data_source.

    Args:
        solution_str: the decoded answer, without the prompt.
        ground_truth: `reward_model["ground_truth"]` of the row.
        prompt: the chat messages, for functions that name this argument.

    Returns: what the function returns: a number, a bool, a dict with "score", or an awaitable of these.
    Raises: UserError for an unknown source.
    """
    function = find_reward(data_source)
    if takes(function, "prompt"):
        reward_kwargs = {"prompt": prompt, **reward_kwargs}
    sample = {"data_source": data_source, "solution_str": solution_str, "ground_truth": ground_truth}
    return function(**sample, extra_info=extra_info, **reward_kwargs)


def reward_modules() -> list[str]:
    """Modules outside this project that registered rewards here; a reward process imports them to know them too."""
    return foreign_modules(REWARDS.values())
