"""Reward functions, which compute a score from a response.

`default_compute_score` selects a function by the row's `data_source`; `@register_reward("my/source", "my/family-*")`
registers a function; `load_scorer` builds the reward of a run from its configuration. This package does not import
torch, so reward processes start in a fraction of a second. README.md in this folder shows how to write a reward.
"""

from verl_lite.rewards import code, judge, rules  # importing these modules registers their rewards
from verl_lite.rewards.registry import REWARDS, default_compute_score, find_reward, register_reward, reward_modules
from verl_lite.rewards.scoring import (
    READ_BY_REWARDS,
    RewardItem,
    RewardResult,
    Scorer,
    asks_by_source,
    load_scorer,
    read_score,
)
