"""Whether something scores, and whether the options of function and model fit each other: a part of `config_checks`.

Takes a `PPOConfig`; yields problems, each naming key, value, what was expected and what to change. An option that would
have no effect counts as a problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from verl_lite.config import PPOConfig, RewardConfig
from verl_lite.config_checks import value_of
from verl_lite.config_keys import KEYS

Problems = Iterator[str]


def rewards(config: PPOConfig) -> Problems:
    """The weights of reward function and reward model, and what each of them needs."""
    for name in ("reward.function_weight", "reward_model.weight"):
        if not math.isfinite(value_of(config, name)):
            yield f"{name}={value_of(config, name)}: a finite number is expected"
    if config.reward_model.enable:
        yield from _reward_model(config)
    else:
        yield from _no_reward_model(config)


def _no_reward_model(config: PPOConfig) -> Problems:
    if config.reward.function_weight == 0:
        yield (
            "reward.function_weight=0 without a reward model leaves nothing that scores: set reward_model.enable=true "
            "and reward_model.model.path, or give the reward function a weight"
        )
    given = [
        f"{key.name}={value_of(config, key.name)}"
        for key in KEYS.values()
        if key.name.startswith("reward_model.") and value_of(config, key.name) != key.default
    ]
    if given:
        yield (
            f"{', '.join(given)}: without effect, because reward_model.enable=false: set reward_model.enable=true, or "
            "leave all reward_model.* out"
        )


def _reward_model(config: PPOConfig) -> Problems:
    model, reward, untouched = config.reward_model, config.reward, RewardConfig()
    if model.model.path is None:
        yield (
            "reward_model.enable=true needs reward_model.model.path, which is null: give a Hugging Face folder of a "
            "sequence-classification model with one label"
        )
    if model.weight == 0:
        yield (
            "reward_model.weight=0: the model would score every answer without effect: give a weight, or set "
            "reward_model.enable=false"
        )
    if not model.model.enable_gradient_checkpointing:
        yield (
            "reward_model.model.enable_gradient_checkpointing=false has no effect: the reward model is never trained, "
            "so leave it out"
        )
    if model.fsdp_config.optimizer_offload:
        yield (
            "reward_model.fsdp_config.optimizer_offload=true has no effect: the reward model has no optimizer, so "
            "leave it out"
        )
    functions = {
        "reward.custom_reward_function.path": (reward.custom_reward_function.path, None),
        "reward.reward_kwargs": (reward.reward_kwargs, untouched.reward_kwargs),
    }
    for name, (value, default) in functions.items():
        if reward.function_weight == 0 and value != default:
            yield (
                f"{name}={value} has no effect with reward.function_weight=0, where no reward function is called: "
                "leave it out, or give the function a weight"
            )
