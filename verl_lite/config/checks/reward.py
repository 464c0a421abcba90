"""Whether something scores, and whether the options of function and model fit each other: a part of `checks.config`.

Takes a `PPOConfig`; yields problems, each naming key, value, what was expected and what to change. An option that would
have no effect counts as a problem.
"""

from __future__ import annotations

import math
import os

from verl_lite.config.checks.values import Problems, given, listed, python_file, value_of
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.reward import RewardConfig
from verl_lite.rewards import code, judge
from verl_lite.rewards.scoring import part_problems, reward_parts

FUNCTION_KEYS = (
    "reward.custom_reward_function.path",
    "reward.functions",
    "reward.reward_kwargs",
    "reward.remote.url",
    "reward.max_rpm",
    "reward.max_memory_mb",
)
"""What is meant for a reward function."""

ALONE_KEYS = ("reward.custom_reward_function.", "reward.reward_kwargs", "reward.remote.")
"""What is meant for a single reward, and has no meaning beside several."""

SUPERVISED_KEYS = ("reward.remote.url", "reward.max_rpm", "reward.max_memory_mb")
"""What the pool sees to for reward processes."""


def rewards(config: PPOConfig) -> Problems:
    """The weights of reward function and reward model, and what each of them needs."""
    for name in ("reward.function_weight", "reward_model.weight"):
        if not math.isfinite(value_of(config, name)):
            yield f"{name}={value_of(config, name)}: a finite number is expected"
    yield from reward_function(config)
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
    if options := given(config, "reward_model."):
        yield (
            f"{listed(options)}: without effect, because reward_model.enable=false: set reward_model.enable=true, or "
            "leave all reward_model.* out"
        )


def _reward_model(config: PPOConfig) -> Problems:
    model, reward = config.reward_model, config.reward
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
    for name in ("optimizer_offload", "reduce_every_micro_batch"):
        if getattr(model.fsdp_config, name):
            key = f"reward_model.fsdp_config.{name}=true"
            yield f"{key} has no effect: the reward model learns nothing, so leave it out"
    if reward.function_weight == 0:
        for name, value in given(config, "reward.", FUNCTION_KEYS):
            yield (
                f"{name}={value} has no effect with reward.function_weight=0, where no reward function is called: "
                "leave it out, or give the function a weight"
            )


def reward_function(config: PPOConfig) -> Problems:
    """Who scores (several parts, a server, the user's function, the registered ones), and in which process."""
    reward = config.reward
    yield from _parts(config)
    custom, remote = reward.custom_reward_function, reward.remote
    if remote.url is None:
        for name, value in given(config, "reward.remote."):
            yield f"{name}={value} has no effect without reward.remote.url: give the URL, or leave it out"
    elif not remote.url.startswith(("http://", "https://")):
        yield f"reward.remote.url={remote.url}: a URL that starts with http:// or https:// is expected"
    elif custom.path is not None:
        yield (
            f"reward.remote.url={remote.url} and reward.custom_reward_function.path={custom.path}: one of them can be "
            "the reward; leave the other out"
        )
    if remote.api_key_env is not None and not os.environ.get(remote.api_key_env):
        yield f"reward.remote.api_key_env={remote.api_key_env}: this environment variable is not set"
    if custom.style != "sample" and custom.path is None:
        yield (
            f"reward.custom_reward_function.style={custom.style} has no effect without "
            "reward.custom_reward_function.path: name the file of your function, or leave it out"
        )
    styles = {custom.style} | {entry.get("style") for entry in reward.functions.values() if isinstance(entry, dict)}
    if not styles & {"batch", "trl"} and reward.batch_size != RewardConfig().batch_size:
        yield (
            f"reward.batch_size={reward.batch_size} has no effect with reward.custom_reward_function.style=sample, "
            "where each sample is a call: set the style to batch or trl, or leave it out"
        )
    if reward.num_workers == 0:
        for name, value in given(config, "reward.", SUPERVISED_KEYS):
            yield (
                f"{name}={value} needs a reward process, and with reward.num_workers=0 there is none: set "
                "reward.num_workers to at least 1, or leave it out"
            )


def _parts(config: PPOConfig) -> Problems:
    """reward.functions, as far as it can be judged without running the user's files."""
    functions = config.reward.functions
    if not functions:
        return
    for start in ALONE_KEYS:
        for name, value in given(config, start):
            yield (
                f"{name}={value} has no effect beside reward.functions, where each part says its own: give it as a "
                "part, {path: FILE.py, name: FUNCTION, kwargs: {}}, or leave it out"
                if name != "reward.remote.url"
                else f"reward.remote.url={value} cannot be one of several rewards: leave out reward.functions, or ask "
                "the server in an async function of your own and name that as a part"
            )
    problems = list(part_problems(functions))
    yield from problems
    if problems:
        return
    parts = reward_parts(functions)
    for part in parts:
        yield from python_file(f"{part.option}.path", part.path)
        if part.path is None and part.reward in ("code", "rule/code"):
            yield from code.time_problems(part.kwargs, config.reward.timeout_s, f"{part.option}.kwargs")
        if part.path is None and part.reward in ("judge", "rule/judge"):
            yield from judge.option_problems(part.kwargs, f"{part.option}.kwargs")
    # beside a model, parts may be logged
    if all(part.weight == 0 for part in parts) and not config.reward_model.enable:
        yield "reward.functions: every weight is 0, so nothing scores: give one of the parts a weight"
