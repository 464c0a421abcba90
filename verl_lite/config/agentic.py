"""The options of agents that act in environments: which environments, how many at one time, how rewards are normalised.

Names are ROLL's. `agentic.train_env_manager.tags` turns the whole on: training samples are then episodes of the
environments that `agentic.custom_envs` describes, and there is no dataset of prompts.
"""

import math
from dataclasses import dataclass
from typing import Any

from verl_lite.config.fields import (
    ALL_OR_SOME,
    POSITIVE,
    SHARE,
    Options,
    Problems,
    at_least,
    opt,
    section,
    unknown_value,
)

_GROUPINGS = ("batch", "traj_group_id", "tags", "state_group_id")
_METHODS = ("identity", "mean", "mean_std", "asym_clip")


@dataclass
class EnvManagerConfig(Options):
    """Groups of environments: the members of a group share configuration and seed, and are compared with each other."""

    tags: list[str] = opt([], "environments of agentic.custom_envs that are used; empty = none")
    num_groups_partition: list[int] = opt([], "groups of each tag, in sum num_env_groups; empty = equal shares")
    num_env_groups: int = opt(16, "groups that run at one time", at_least(1))
    group_size: int = opt(1, "episodes of one task that are compared with each other", at_least(1))
    group_size_redundancy: int = opt(0, "episodes beyond group_size; the first group_size to end are kept", at_least(0))
    max_traj_per_env: int = opt(-1, "episodes of one environment in a step at most; -1 = any number", ALL_OR_SOME)
    format_penalty: float = opt(0.0, "added to the reward of an action that the environment does not understand")
    group_filter_cls: str | None = opt(None, "registered filter, or pkg.module:Class; groups it drops are replaced")
    max_replaced_groups: int = opt(-1, "groups replaced in a step at most; -1 = 4 x num_env_groups", at_least(-1))

    def check_groups(self, key: str, known: dict[str, Any], size: int, size_key: str) -> Problems:
        """Tags, their partition, and whether a batch of `size` episodes is made of whole groups."""
        for tag in (tag for tag in self.tags if tag not in known):
            yield unknown_value(f"{key}.tags", tag, list(known)) + "; they are the entries of agentic.custom_envs"
        shares, groups, each = self.num_groups_partition, self.num_env_groups, self.max_traj_per_env
        if len(set(self.tags)) < len(self.tags):
            yield f"{key}.tags={self.tags}: one is named twice; give its share in {key}.num_groups_partition"
        elif groups < len(self.tags) or (
            shares and (len(shares) != len(self.tags) or sum(shares) != groups or min(shares) < 1)
        ):
            yield (
                f"{key}.num_groups_partition={shares}: at least one of {key}.num_env_groups={groups} for each of "
                f"{key}.tags={self.tags}, in sum all, is expected; or leave it out for equal shares"
            )
        if size < 1 or self.group_size < 1 or groups < 1:
            return
        if size % self.group_size:
            yield f"{key}.group_size={self.group_size} does not divide {size_key}={size}: whole groups are expected"
        if 0 <= each < (needed := math.ceil(size / (groups * self.group_size))):
            yield f"{key}.max_traj_per_env={each}: {size_key}={size} needs {needed}, or -1, or more num_env_groups"


@dataclass
class EnvPoolConfig(Options):
    """The processes that environments run in."""

    num_workers: int = opt(1, "processes for each engine; 0 = in the engine, where no deadline holds", at_least(0))
    threads: int = opt(64, "environments of one process that step at the same time at most", at_least(1))
    timeout_s: float = opt(60.0, "a reset or step that takes longer has failed, and its process is replaced", POSITIVE)
    max_error_rate: float = opt(0.1, "the run stops when a larger share of a step's episodes failed", SHARE)


@dataclass
class RewardNormalizationConfig(Options):
    """Of episodes' scores."""

    grouping: str | None = opt(None, "rows normalised together; null = batch, gigpo: its task", _GROUPINGS)
    method: str | None = opt(None, "for both below; null = identity, gigpo: mean_std", _METHODS)
    norm_mean_type: str | None = opt(None, "mean subtracted: null | batch | group", ("batch", "group"))
    norm_std_type: str | None = opt(None, "deviation divided by: null | batch | group", ("batch", "group"))


@dataclass
class AgenticConfig(Options):
    """An agent that learns by acting."""

    custom_envs: dict[str, Any] = opt({}, "by tag: env_type, env_config, max_steps, ...; see trainer/AGENTIC.md")
    train_env_manager: EnvManagerConfig = section(EnvManagerConfig, "environments of training")
    val_env_manager: EnvManagerConfig = section(EnvManagerConfig, "environments of validation; no tags = none")
    rollout_batch_size: int = opt(128, "episodes of a training step", at_least(1))
    val_batch_size: int = opt(128, "episodes of a validation", at_least(1))
    async_generation_ratio: int = opt(0, "steps that episodes begin before the one that learns from them", at_least(0))
    model_update_frequency: int = opt(1, "steps between two updates of the rollout engine's weights", at_least(1))
    reward_normalization: RewardNormalizationConfig = section(RewardNormalizationConfig, "of episodes' scores")
    episode_reward_weight: float = opt(1.0, "gigpo: weight of the episode's normalised score")
    step_reward_weight: float = opt(1.0, "gigpo: weight of the step's normalised return")
    step_reward_gamma: float = opt(0.95, "gigpo, step_reinforce: discount from one step to the next", SHARE)
    logging_steps: int = opt(1, "steps between two episodes shown in the log; 0 = never", at_least(0))
    env_pool: EnvPoolConfig = section(EnvPoolConfig, "processes of the environments")

    def check_run(self) -> Problems:
        """Of a run of agents: groups of both managers."""
        train, val, known = self.train_env_manager, self.val_env_manager, self.custom_envs
        size = self.rollout_batch_size
        yield from train.check_groups("agentic.train_env_manager", known, size, "agentic.rollout_batch_size")
        if val.tags:
            at = "agentic.val_env_manager"
            yield from val.check_groups(at, known, self.val_batch_size, "agentic.val_batch_size")
            if val.group_size_redundancy or val.group_filter_cls is not None:
                yield f"{at}: leave group_size_redundancy and group_filter_cls out: a validation measures all episodes"
