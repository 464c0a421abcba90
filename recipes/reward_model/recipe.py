"""A reward model is trained from pairs of answers, and a policy by it: what the model likes, and what is right.

The policy, the questions and the warm start are the quickstart's. The score is the reward model's alone; the true rule
is called too, with weight 0, so that `acc` says what the model does not know. `prepare` makes policy, pairs and reward
model where the cache does not hold them yet.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.embedded import ONE_GROUP, make_once
from recipes.embedded import cache_folder as folder_of
from recipes.quickstart import recipe as quickstart
from recipes.quickstart import start as quickstart_start
from recipes.reward_model.start import NAME, build, made_from

if TYPE_CHECKING:
    from verl_lite.config import PPOConfig

RL_STEPS = 40
KL_COEFFICIENT = 1.0
"""Smaller ones let the policy find what the reward model likes and is not right: README.md has the curves."""


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    return quickstart.overrides() | {
        "data.train_batch_size": 64,
        "actor.ppo_mini_batch_size": 64,
        "actor.use_kl_loss": True,
        "actor.kl_loss_coef": KL_COEFFICIENT,
        "actor.kl_loss_type": "low_var_kl",
        "reward.functions.truth": {"weight": 0.0},
        "reward_model.enable": True,
        "reward_model.model.path": str(cache_folder() / "model"),
        "reward_model.fsdp_config.wrap_policy.min_num_params": ONE_GROUP,
        "trainer.total_training_steps": RL_STEPS,
        "trainer.test_freq": 10,
    }


def prepare(config: PPOConfig) -> None:
    """Makes what the run needs and the cache does not hold; models and data of the user's own are left alone."""
    quickstart.prepare(config)
    folder = cache_folder()
    if Path(config.reward_model.model.path or "").is_relative_to(folder):
        policy = quickstart.cache_folder()
        make_once(policy, quickstart_start.NAME, quickstart_start.build)
        make_once(folder, NAME, partial(build, policy=policy))


def cache_folder() -> Path:
    """The folder of this version of pairs and reward model."""
    return folder_of(NAME, made_from())
