"""Reward functions: how an answer becomes a number.

`default_compute_score` picks a function by the row's `data_source`; `@register_reward("my/source", "my/family-*")` adds
one; `load_reward` returns the user's own function where the configuration names one. Nothing in this package imports
torch, so that reward processes start in a fraction of a second.
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
from verl_lite.rewards.result import RewardItem, RewardResult, load_reward, read_score, score_item

__all__ = [
    "REWARDS",
    "RewardFunction",
    "RewardItem",
    "RewardResult",
    "default_compute_score",
    "exact_match",
    "find_reward",
    "gsm8k",
    "load_reward",
    "load_reward_function",
    "math",
    "read_score",
    "reasoning_gym",
    "register_reward",
    "reward_modules",
    "score_item",
]
