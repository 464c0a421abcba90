"""The reward of a run, as its configuration names it: from `RewardConfig` to a scorer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from verl_lite.config import RewardConfig
from verl_lite.rewards.dispatch import (
    NAMED,
    REWARDS,
    RewardFunction,
    awaits,
    default_compute_score,
    find_named_reward,
    names_prompt,
)
from verl_lite.rewards.parts import RewardPart, check_kwargs, reward_parts
from verl_lite.rewards.rubric import Rubric
from verl_lite.rewards.scorers import (
    AsyncScorer,
    BatchScorer,
    FunctionScorer,
    PlainScorer,
    lists_of_trl,
    lists_of_verl,
)
from verl_lite.rewards.weighted import (
    WeighedPart,
    WeightedAsync,
    WeightedLists,
    WeightedPlain,
    weighted_scorer,
)
from verl_lite.user_code import load_module, load_object, object_of

SampleScorer = PlainScorer | WeightedPlain
AwaitingScorer = AsyncScorer | WeightedAsync
ListScorer = BatchScorer | WeightedLists
Scorer = SampleScorer | AwaitingScorer | ListScorer


def load_scorer(config: RewardConfig) -> Scorer:
    """The reward of a run: several rewards if reward.functions names them, a server if reward.remote.url names one, the
    user's own function if reward.custom_reward_function names one, else the registered functions by data_source.

    reward.reward_kwargs are added to every call of a single reward; they win over the call's own arguments.
    Raises UserError for a part of reward.functions that does not exist or does not take its kwargs.
    """
    if config.functions:
        return weighted_scorer(_load_parts(reward_parts(config.functions)))
    custom, kwargs = config.custom_reward_function, dict(config.reward_kwargs)
    if config.remote.url is not None:
        from verl_lite.rewards.remote import RemoteReward  # slow to import, and seldom needed

        return AsyncScorer(_with_kwargs(RemoteReward(config.remote), kwargs), with_prompt=True)
    if custom.path is None:
        return _scorer(default_compute_score, "sample", kwargs)
    option = "reward.custom_reward_function"
    return _scorer(load_object(custom.path, custom.name, f"{option}.path", f"{option}.name"), custom.style, kwargs)


def asks_by_source(config: RewardConfig) -> bool:
    """Whether a row's data_source picks its reward, or one of its parts."""
    if config.functions:
        return any(part.is_by_source for part in reward_parts(config.functions))
    return config.custom_reward_function.path is None and config.remote.url is None


def _load_parts(parts: list[RewardPart]) -> tuple[WeighedPart, ...]:
    modules: dict[str, ModuleType] = {}  # a file that has several parts is run once
    return tuple(
        WeighedPart(
            part.label, part.weight, _scorer(_function(part, modules), part.style, part.kwargs), part.is_outcome
        )
        for part in parts
    )


def _function(part: RewardPart, modules: dict[str, ModuleType]) -> RewardFunction:
    if part.is_by_source:
        return default_compute_score
    if part.path is None:
        function = find_named_reward(str(part.reward))
    else:
        if part.path not in modules:
            modules[part.path] = load_module(part.path, f"{part.option}.path")
        function = object_of(modules[part.path], part.path, part.name, f"{part.option}.name")
    check_kwargs(function, part.kwargs, part.option)
    return function


def _scorer(function: RewardFunction, style: str, kwargs: dict[str, Any]) -> FunctionScorer:
    """style: sample, batch or trl, as in reward.custom_reward_function."""
    call = _with_kwargs(function, kwargs)
    if style != "sample":
        return BatchScorer(call, {"batch": lists_of_verl, "trl": lists_of_trl}[style])
    return (AsyncScorer if _is_async(function) else PlainScorer)(call, names_prompt(function))


def _with_kwargs(function: RewardFunction, kwargs: dict[str, Any]) -> RewardFunction:
    return (lambda **call: function(**{**call, **kwargs})) if kwargs else function


def _is_async(function: RewardFunction) -> bool:
    """Whether calls of it are awaited. Of the functions by data_source one that awaits makes all of them so, but not
    those that are there to be named, which most runs never ask."""
    if function is default_compute_score:
        return any(_is_async(each) for name, each in REWARDS.items() if not name.startswith(NAMED))
    if isinstance(function, Rubric):
        return function.is_async
    return awaits(function)
