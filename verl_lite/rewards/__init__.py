"""Reward functions: how an answer becomes a number.

`default_compute_score` picks a function by the row's `data_source`; `@register_reward("my/source", "my/family-*")` adds
one; `load_scorer` gives the reward of a run as the configuration names it. Nothing in this package imports torch, so
that reward processes start in a fraction of a second. How to write a reward: README.md beside this file.
"""

from verl_lite.rewards import exact_match, gsm8k, math, reasoning_gym
from verl_lite.rewards.custom import load_reward_function
from verl_lite.rewards.dispatch import (
    REWARDS,
    RewardFunction,
    default_compute_score,
    find_reward,
    register_reward,
    reward_modules,
)
from verl_lite.rewards.result import RewardItem, RewardResult, read_score
from verl_lite.rewards.scorers import AsyncScorer, BatchScorer, PlainScorer, Scorer, load_scorer

__all__ = [
    "REWARDS",
    "AsyncScorer",
    "BatchScorer",
    "PlainScorer",
    "RewardFunction",
    "RewardItem",
    "RewardResult",
    "Scorer",
    "default_compute_score",
    "exact_match",
    "find_reward",
    "gsm8k",
    "load_reward_function",
    "load_scorer",
    "math",
    "read_score",
    "reasoning_gym",
    "register_reward",
    "reward_modules",
]
