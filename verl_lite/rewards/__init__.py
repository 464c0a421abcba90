"""Reward functions: how an answer becomes a number.

`default_compute_score` picks a function by the row's `data_source`; `@register_reward("my/source", "my/family-*")` adds
one; `load_scorer` gives the reward of a run as the configuration names it. Nothing in this package imports torch, so
that reward processes start in a fraction of a second. How to write a reward: README.md beside this file.
"""

from verl_lite.rewards import code, judge, rules  # they register themselves
from verl_lite.rewards.registry import REWARDS, default_compute_score, find_reward, register_reward, reward_modules
from verl_lite.rewards.scoring import RewardItem, RewardResult, Scorer, asks_by_source, load_scorer, read_score
