"""How good the answers of a scored batch are, as dynamic sampling and its metrics look at it: without any shaping.

The outcome of an answer is what the reward function calls `acc`, or its score before the penalty for its length; or
what `algorithm.filter_groups.metric` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.rewards.scores import OVERLONG, OVERLONG_TAKEN, check_no_such_entry
from verl_lite.algos.advantages import outcome_scores
from verl_lite.algos.group_outcomes import KINDS, GroupKinds, group_kinds
from verl_lite.algos.masked import group_ids
from verl_lite.config import PPOConfig
from verl_lite.config.ppo import MODEL_METRICS
from verl_lite.errors import UserError
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.rewards import RewardResult

SCORE, ACCURACY = "score", "acc"


@dataclass(frozen=True)
class Groups:
    """The groups of a batch. of_row: (B,) the number of each row's group, by first appearance; kinds: of each group."""

    of_row: torch.Tensor
    kinds: GroupKinds

    def __len__(self) -> int:
        return len(self.kinds.kept)


def groups_of(batch: DataProto, metric: str | None) -> Groups:
    """The groups of a scored batch, rows that share a uid, and whether their outcomes differ.

    Reads uid, response_mask, token_level_scores, outcomes where there, and `reward/<metric>`. metric: `score`, an
    entry of the reward function's dict, or None = `acc` in rows that have one, else the score, as for `acc` itself (in
    verl a number that is returned alone is acc). An answer does not count if its response_mask is empty (its reward
    failed, or it has no token) or if it has no such entry.
    """
    values, counted = outcomes_of(batch, metric)
    of_row, number = group_ids(batch.non_tensor_batch["uid"], values.device)
    return Groups(of_row, group_kinds(values, counted, of_row, number))


def outcomes_of(batch: DataProto, metric: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(B,) outcomes in fp64, and (B,) bool which answers have one; see `groups_of`."""
    mask = batch.batch["response_mask"]
    has_outcomes = "outcomes" in batch
    scores = batch.batch["outcomes"] if has_outcomes else outcome_scores(batch.batch["token_level_scores"], mask)
    answered, is_accuracy = (mask != 0).any(1), metric in (None, ACCURACY)
    name = f"reward/{ACCURACY if is_accuracy else metric}"
    if metric == SCORE or (is_accuracy and name not in batch):
        return scores.double(), answered
    column = batch.non_tensor_batch[name] if name in batch else np.full(len(batch), None)
    values = torch.tensor([float(x) if _is_number(x) else np.nan for x in column], dtype=torch.float64)
    if is_accuracy:
        values = torch.where(values.isnan(), scores.double(), values)
    return values, answered & ~values.isnan()


def group_shares(batch: DataProto, metric: str | None) -> dict[str, Metric]:
    """groups/{kept,all_right,all_wrong,unjudged}: shares of the batch's groups, which sum to 1; see `GroupKinds`.

    Nothing for rows that are steps of episodes, whose groups are the scheduler's part.
    """
    if "traj_id" in batch or not len(batch):
        return {}
    groups = groups_of(batch, metric)
    counts = groups.kinds.count()
    return {f"groups/{kind}": Metric.mean(counts[kind], len(groups)) for kind in KINDS}


def names_entry(config: PPOConfig) -> bool:
    """Whether dynamic sampling looks at an entry of the dict that a reward function returns."""
    options = config.algorithm.filter_groups
    return options.enable and options.metric not in (None, SCORE, *MODEL_METRICS)


def check_entries(config: PPOConfig, sources: Sequence[str], results: Sequence[RewardResult]) -> None:
    """Raises UserError unless the rewards of some rows, scored before the run, have the entry that dynamic sampling
    looks at, and none that the penalty of long answers needs for itself. sources: the data_source of each row."""
    overlong = config.reward.overlong_buffer
    if overlong.enable and overlong.log:
        check_no_such_entry(OVERLONG, {f"reward/{name}" for x in results for name in x.extra}, OVERLONG_TAKEN)
    metric = config.algorithm.filter_groups.metric
    for source, result in zip(sources, results, strict=True):
        is_alone = metric == ACCURACY and not result.extra
        if names_entry(config) and not is_alone and not _is_number(result.extra.get(str(metric))):
            numbers = [name for name, value in sorted(result.extra.items()) if _is_number(value)]
            raise UserError(
                f"algorithm.filter_groups.metric={metric}: the reward of data_source={source!r} returns no such number "
                f"but {', '.join(numbers) or 'nothing besides the score'}. Name one of these that every source has, or "
                "score; or leave the metric out: then it is acc in rows that have one, else the score"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float | np.number | np.bool_)
