"""The options of agents that act in environments: which environments, how many at one time, how rewards are normalised.

Names are ROLL's. `agentic.train_env_manager.tags` turns the whole on: training samples are then episodes of the
environments that `agentic.custom_envs` describes, and there is no dataset of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_lite.config.fields import ALL_OR_SOME, POSITIVE, SHARE, at_least, opt, section


@dataclass
class EnvManagerConfig:
    """Groups of environments: the members of a group share configuration and seed, and are compared with each other."""

    tags: list[str] = opt([], "environments of agentic.custom_envs that are used; empty = none")
    num_groups_partition: list[int] = opt([], "groups of each tag, in sum num_env_groups; empty = equal shares")
    num_env_groups: int = opt(16, "groups that run at one time", at_least(1))
    group_size: int = opt(1, "episodes of one task that are compared with each other", at_least(1))
    group_size_redundancy: int = opt(
        0, "episodes started beyond group_size; the first group_size to end are kept", at_least(0)
    )
    max_traj_per_env: int = opt(
        -1, "episodes of one environment in a step at most; -1 = as many as the batch takes", ALL_OR_SOME
    )
    format_penalty: float = opt(0.0, "added to the reward of an action that the environment does not understand")
    group_filter_cls: str | None = opt(None, "registered filter, or pkg.module:Class; groups it drops are replaced")
    max_replaced_groups: int = opt(
        -1, "groups replaced in one step at most; -1 = as many as num_env_groups, 4 times", at_least(-1)
    )


@dataclass
class EnvPoolConfig:
    """The processes that environments run in."""

    num_workers: int = opt(
        1, "processes for each rollout engine; 0 = threads of the engine's own, without deadlines", at_least(0)
    )
    threads: int = opt(64, "environments of one process that step at the same time at most", at_least(1))
    timeout_s: float = opt(60.0, "a reset or step that takes longer has failed, and its process is replaced", POSITIVE)
    max_memory_mb: int | None = opt(
        None, "a process that holds more memory is replaced, MiB; null = never", at_least(1)
    )
    max_error_rate: float = opt(
        0.1, "the run stops when more than this share of a step's episodes failed (of 20, in smaller steps)", SHARE
    )


@dataclass
class RewardNormalizationConfig:
    grouping: str | None = opt(
        None,
        "rows normalised together: batch | traj_group_id | tags | state_group_id; null = batch, gigpo: its task",
        ("batch", "traj_group_id", "tags", "state_group_id"),
    )
    method: str | None = opt(
        None,
        "older name for the two below: identity | mean | mean_std | asym_clip (also clips to -1 .. 3); "
        "null = identity, gigpo: mean_std, if the two below are null",
        ("identity", "mean", "mean_std", "asym_clip"),
    )
    norm_mean_type: str | None = opt(None, "mean subtracted: null | batch | group", ("batch", "group"))
    norm_std_type: str | None = opt(
        None, "standard deviation that is divided by: null | batch | group", ("batch", "group")
    )


@dataclass
class AgenticConfig:
    """An agent that learns by acting."""

    custom_envs: dict[str, Any] = opt({}, "by tag: env_type, env_config, max_steps, ...; see trainer/AGENTIC.md")
    train_env_manager: EnvManagerConfig = section(EnvManagerConfig, "environments of training")
    val_env_manager: EnvManagerConfig = section(EnvManagerConfig, "environments of validation; no tags = none")
    rollout_batch_size: int = opt(128, "episodes of a training step", at_least(1))
    val_batch_size: int = opt(
        128, "episodes of a validation; -1 = until the environments' datasets are exhausted", ALL_OR_SOME
    )
    async_generation_ratio: int = opt(
        0, "steps that episodes are begun before the one that learns from them", at_least(0)
    )
    model_update_frequency: int = opt(1, "steps between two updates of the rollout engine's weights", at_least(1))
    reward_normalization: RewardNormalizationConfig = section(RewardNormalizationConfig, "of episodes' scores")
    episode_reward_weight: float = opt(1.0, "gigpo: weight of the episode's normalised score")
    step_reward_weight: float = opt(1.0, "gigpo: weight of the step's normalised return")
    step_reward_gamma: float = opt(
        0.95, "gigpo, step_reinforce: discount from one step of an episode to the next", SHARE
    )
    logging_steps: int = opt(1, "steps between two episodes shown in the log; 0 = never", at_least(0))
    render_save_dir: str | None = opt(None, "folder for what validation episodes looked like, GIF or text; null = none")
    env_pool: EnvPoolConfig = section(EnvPoolConfig, "processes of the environments")
