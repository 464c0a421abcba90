"""How good the answers of a scored batch are, as dynamic sampling and its metrics look at it: without any shaping.

The outcome of an answer is what the reward function calls `acc`, or its score before the penalty for its length; or
what `algorithm.filter_groups.metric` names.
"""

from dataclasses import dataclass

import numpy as np
import torch

from verl_lite.algos.advantages import outcome_scores
from verl_lite.algos.masked import group_ids
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto

SCORE, ACCURACY = "score", "acc"
KINDS = ("kept", "all_right", "all_wrong", "unjudged")


@dataclass(frozen=True)
class Groups:
    """The groups of a batch. of_row: (B,) the number of each row's group, by first appearance. kinds: of each group,
    (G,) bool tensors by KINDS, of which exactly one is true.

    kept: at least two answers that count, of different outcome. all_right, all_wrong: at least two, all of the same
    outcome, which is above 0 or not. unjudged: fewer than two answers count.
    """

    of_row: torch.Tensor
    kinds: dict[str, torch.Tensor]


def groups_of(batch: DataProto, metric: str | None) -> Groups:
    """The groups of a scored batch, rows that share a uid, and whether their outcomes differ.

    Reads uid, response_mask, token_level_scores, outcomes where there, and `reward/<metric>`. metric: `score`, an
    entry of the reward function's dict, or None = `acc` in rows that have one, else the score, as for `acc` itself (in
    verl a number that is returned alone is acc). An answer does not count if its response_mask is empty (its reward
    failed, or it has no token) or if it has no such entry. Outcomes are compared, not their standard deviation, which
    rounding can leave above 0.
    """
    values, counted = outcomes_of(batch, metric)
    of_row, number = group_ids(batch.non_tensor_batch["uid"], values.device)
    lowest, highest = (
        values.new_full((number,), empty).scatter_reduce(0, of_row, values.masked_fill(~counted, empty), extreme)
        for empty, extreme in ((torch.inf, "amin"), (-torch.inf, "amax"))
    )
    several = of_row.new_zeros(number).index_add(0, of_row, counted.long()) > 1
    equal = several & (lowest == highest)
    kinds = (several & (lowest < highest), equal & (highest > 0), equal & (highest <= 0), ~several)
    return Groups(of_row, dict(zip(KINDS, kinds, strict=True)))


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
    numbers = (bool, int, float, np.number, np.bool_)
    values = torch.tensor([float(x) if isinstance(x, numbers) else np.nan for x in column], dtype=torch.float64)
    if is_accuracy:
        values = torch.where(values.isnan(), scores.double(), values)
    return values, answered & ~values.isnan()


def group_shares(batch: DataProto, metric: str | None) -> dict[str, Metric]:
    """groups/{kept,all_right,all_wrong,unjudged}: shares of the batch's groups, which sum to 1; see `Groups`.

    Nothing for rows that are steps of episodes, whose groups are the scheduler's part.
    """
    if "traj_id" in batch or not len(batch):
        return {}
    kinds = groups_of(batch, metric).kinds
    return {f"groups/{kind}": Metric.mean(int(is_so.sum()), len(is_so)) for kind, is_so in kinds.items()}
