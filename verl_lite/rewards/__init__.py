"""Reward functions: how an answer becomes a number.

`default_compute_score` picks a function by the row's `data_source`; `@register_reward("my/source", "my/family-*")` adds
one; `load_scorer` gives the reward of a run as the configuration names it. Nothing in this package imports torch, so
that reward processes start in a fraction of a second. How to write a reward: README.md beside this file.
"""

from verl_lite.rewards import (  # noqa: F401  they register themselves
    code,
    exact_answer,
    exact_match,
    format,
    gsm8k,
    json_schema,
    judge,
    math,
    math_dapo,
    multiple_choice,
    reasoning_gym,
    regex,
)
from verl_lite.rewards.dispatch import (
    REWARDS,
    RewardFunction,
    default_compute_score,
    find_named_reward,
    find_reward,
    register_reward,
    reward_modules,
)
from verl_lite.rewards.load import Scorer, asks_by_source, load_scorer
from verl_lite.rewards.result import RewardItem, RewardResult, read_score
from verl_lite.rewards.rubric import Rubric
from verl_lite.rewards.scorers import AsyncScorer, BatchScorer, PlainScorer, Style

__all__ = [
    "REWARDS",
    "AsyncScorer",
    "BatchScorer",
    "PlainScorer",
    "RewardFunction",
    "RewardItem",
    "RewardResult",
    "Rubric",
    "Scorer",
    "Style",
    "asks_by_source",
    "default_compute_score",
    "find_named_reward",
    "find_reward",
    "load_scorer",
    "read_score",
    "register_reward",
    "reward_modules",
]
