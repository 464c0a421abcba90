"""The conflicts between the options of agents: of environments, which provide the tasks, and of programs, which work on
the rows of a data set."""

import math
from collections import Counter
from collections.abc import Callable

from verl_lite.config.agentic import EnvManagerConfig
from verl_lite.config.conflicts.table import Conflict
from verl_lite.config.ppo import PPOConfig

_SEVERAL_ROWS = "the episodes of agentic.program have several rows, which would not have the same weight"


def _is_set_for_program(config: PPOConfig, option: bool) -> bool:
    return option and config.runs_program


def _manager_rows(
    manager: str,
    size_key: str,
    manager_of: Callable[[PPOConfig], EnvManagerConfig],
    batch_size: Callable[[PPOConfig], int],
) -> tuple[Conflict[PPOConfig], ...]:
    """Returns the rows of one manager of environments.

    Args:
        manager: the dotted key of its section.
        size_key: the option with the number of episodes in a batch.
        manager_of: returns the section `manager` of a configuration.
        batch_size: returns the value of `size_key` in a configuration.
    """

    def is_used(config: PPOConfig) -> bool:
        # the validation needs environments of its own, and an agentic run
        return not config.reads_prompts and bool(manager_of(config).tags)

    def lists_tag_twice(config: PPOConfig, tags: list[str]) -> bool:
        return is_used(config) and max(Counter(tags).values()) > 1

    def is_other_partition(config: PPOConfig, shares: list[int]) -> bool:
        if not is_used(config):
            return False
        tags = manager_of(config).tags
        num_groups = manager_of(config).num_env_groups
        if not shares:
            # `lists_tag_twice` reports a list with a tag twice
            are_different = len(set(tags)) == len(tags)
            return are_different and num_groups < len(tags)
        return len(shares) != len(tags) or sum(shares) != num_groups or min(shares) < 1

    def splits_group(config: PPOConfig, group_size: int) -> bool:
        return is_used(config) and batch_size(config) % group_size != 0

    def needed_episodes(config: PPOConfig) -> int:
        """Number of episodes that each environment has to run for a batch."""
        options = manager_of(config)
        num_environments = max(1, options.num_env_groups * options.group_size)
        return math.ceil(batch_size(config) / num_environments)

    return (
        Conflict(
            (f"{manager}.tags",),
            lists_tag_twice,
            "a tag is listed twice",
            f"set its share in {manager}.num_groups_partition instead",
        ),
        Conflict(
            (f"{manager}.num_groups_partition",),
            is_other_partition,
            lambda config: (
                f"expected at least one group for each tag, {manager_of(config).num_env_groups} groups in total; or "
                "[] for equal shares"
            ),
            "set other shares or another number of groups",
            beside=(f"{manager}.tags", f"{manager}.num_env_groups"),
        ),
        Conflict(
            (f"{manager}.group_size",),
            splits_group,
            "a batch has whole groups, so the size of a group divides it",
            "set another size",
            beside=(size_key,),
        ),
        Conflict(
            (f"{manager}.max_traj_per_env",),
            lambda config, episodes: is_used(config) and 0 <= episodes < needed_episodes(config),
            lambda config: f"a batch needs {needed_episodes(config)} episodes of each environment",
            lambda config: f"set {needed_episodes(config)}, -1, or more num_env_groups",
            beside=(size_key, f"{manager}.num_env_groups", f"{manager}.group_size"),
        ),
    )


AGENT_ROWS: tuple[Conflict[PPOConfig], ...] = (
    Conflict(
        ("agentic.train_env_manager.tags",),
        lambda config, tags: bool(tags) and config.agentic.has_program,
        "these environments and the program (agentic.program or agentic.mcp_servers) both define the episodes",
        "remove one of them",
    ),
    Conflict(
        ("agentic.program",),
        lambda config, program: program is not None and bool(config.agentic.mcp_servers),
        "the servers are tools of the built-in agent, which the program replaces",
        "remove one of them",
        beside=("agentic.mcp_servers",),
    ),
    Conflict(
        ("agentic.env_pool.num_workers",),
        lambda config, processes: processes == 0 and config.agentic.has_program,
        "a program needs a process of its own",
        "set agentic.env_pool.num_workers=1 or more",
    ),
    *_manager_rows(
        "agentic.train_env_manager",
        "agentic.rollout_batch_size",
        lambda config: config.agentic.train_env_manager,
        lambda config: config.agentic.rollout_batch_size,
    ),
    *_manager_rows(
        "agentic.val_env_manager",
        "agentic.val_batch_size",
        lambda config: config.agentic.val_env_manager,
        lambda config: config.agentic.val_batch_size,
    ),
    Conflict(
        ("agentic.val_env_manager.group_size_redundancy", "agentic.val_env_manager.group_filter_cls"),
        lambda config, option: bool(option) and not config.reads_prompts and config.validates,
        "a validation measures all episodes",
        "remove it",
    ),
    Conflict(
        ("rollout.n",),
        lambda config, answers: answers != 1 and not config.reads_prompts,
        "agentic.train_env_manager.group_size is the number of episodes of a task",
        "set rollout.n=1",
        beside=("agentic.train_env_manager.tags",),
    ),
    Conflict(
        ("trainer.test_freq", "trainer.save_freq"),
        # -1 stands for the last step, which is not checked
        lambda config, steps: (
            not config.reads_prompts and steps > 0 and steps % config.agentic.model_update_frequency != 0
        ),
        "the engine's weights would be updated between two updates",
        lambda config: f"set a multiple of {config.agentic.model_update_frequency}, or -1",
        beside=("agentic.model_update_frequency",),
    ),
    # programs, whose episodes have one weight, whatever their number of rows
    Conflict(
        ("algorithm.use_kl_in_reward",),
        _is_set_for_program,
        _SEVERAL_ROWS,
        "set actor.use_kl_loss=true algorithm.use_kl_in_reward=false",
    ),
    Conflict(
        ("reward_model.enable",),
        _is_set_for_program,
        _SEVERAL_ROWS,
        "set reward_model.enable=false, and score with reward.* or in the program",
    ),
    *(
        Conflict((key,), _is_set_for_program, _SEVERAL_ROWS, f"set {key}=false")
        for key in (
            "algorithm.whiten_advantages",
            "algorithm.whiten_rewards",
            "algorithm.use_pf_ppo",
            "actor.shuffle",
            "reward.overlong_buffer.enable",
        )
    ),
    Conflict(
        ("actor.loss_agg_mode",),
        # each row, short or long, would have the same weight
        lambda config, mode: mode == "seq-mean-token-mean" and config.runs_program,
        "with agentic.program it would give the tokens of short rows more weight",
        "set actor.loss_agg_mode=token-mean, seq-mean-token-sum or seq-mean-token-sum-norm",
    ),
    Conflict(
        ("agentic.train_env_manager.group_filter_cls",),
        lambda config, name: name is not None and config.runs_program,
        "it filters groups of environments, and the episodes are those of agentic.program",
        "use algorithm.filter_groups",
    ),
    Conflict(
        ("algorithm.filter_groups.metric",),
        lambda config, metric: (
            config.algorithm.filter_groups.enable and metric not in (None, "score") and config.runs_program
        ),
        "the outcome of an episode of agentic.program is its score",
        "set algorithm.filter_groups.metric=score",
    ),
)
