"""Reward functions, which compute a score from a response.

Read `registry.py` first: `default_compute_score` selects a function by the row's `data_source`, and
`@register_reward("my/source", "my/family-*")` registers one. `results.py` has
the values that pass between the trainer and a function, and `scoring.py` builds the reward of a run from its
configuration (`load_scorer`). `rules.py`, `code.py` and `judge.py` have the built-in rewards. README.md in this
folder shows how to write a reward.

This package does not import torch, so reward processes start in a fraction of a second.
"""

# importing these modules registers their rewards
from verl_lite.rewards import code, judge, rules
from verl_lite.rewards.registry import REWARDS, default_compute_score, find_reward, register_reward, reward_modules
from verl_lite.rewards.results import READ_BY_REWARDS, RewardItem, RewardResult, read_score
from verl_lite.rewards.scoring import Scorer, asks_by_source, check_source, load_scorer
