"""Assembles the table of a command, and compares a configuration with it."""

from collections.abc import Collection
from typing import Any

from verl_lite.config.conflicts.ppo_rows import PPO_ROWS
from verl_lite.config.conflicts.shared_rows import (
    ADAPTER_ROWS,
    POLICY_ROWS,
    REWARD_FLOW_ROWS,
    REWARD_ROWS,
    RUN_ROWS,
    SFT_ROWS,
)
from verl_lite.config.conflicts.table import Conflict
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.config.fields import Problems
from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.reward import ScoreConfig
from verl_lite.config.run import RunOptions
from verl_lite.config.supervised import SFTConfig

_TABLES: tuple[tuple[tuple[type, ...], tuple[Conflict[Any], ...]], ...] = (
    ((RunOptions,), RUN_ROWS),
    ((PPOConfig,), PPO_ROWS),
    ((PPOConfig, SFTConfig), ADAPTER_ROWS),
    ((PPOConfig, FlowGRPOConfig), POLICY_ROWS),
    ((PPOConfig, ScoreConfig), REWARD_ROWS),
    ((SFTConfig,), SFT_ROWS),
    ((RewardFlowConfig,), REWARD_FLOW_ROWS),
)
"""The root classes of commands, and the rows for their options. The type of a row names the same classes, but only
`table_of` knows at run time which of them a configuration is."""


def table_of(root: type) -> list[Conflict[Any]]:
    """Returns the rows for the options of a command, which the dataclass `root` declares."""
    rows: list[Conflict[Any]] = []
    for roots, rows_of_roots in _TABLES:
        if issubclass(root, roots):
            rows += rows_of_roots
    return rows


def conflict_problems(config: object, out_of_range: Collection[str] = ()) -> Problems:
    """Yields the conflicts of a configuration.

    Args:
        config: the options of a command.
        out_of_range: keys whose value is outside its range. Rows that show one of them are skipped.
    """
    rows = table_of(type(config))
    for row in rows:
        yield from row.problems(config, out_of_range)
