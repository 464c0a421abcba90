"""Outcomes of the groups in a scored batch, for dynamic sampling and its metrics.

The outcome of an answer is the metric `algorithm.filter_groups.metric`, by default the reward function's entry `acc`,
or without it the score before the length penalty.
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
    """The groups of a batch. of_row: (B,) group index of each row, in order of first appearance. kinds: for each kind
    in KINDS a bool tensor (G,); each group is of exactly one kind.

    kept: at least two counted answers, with different outcomes. all_right, all_wrong: at least two counted answers
    with the same outcome, which is above 0 (right) or not (wrong). unjudged: fewer than two counted answers.
    """

    of_row: torch.Tensor
    kinds: dict[str, torch.Tensor]


def groups_of(batch: DataProto, metric: str | None) -> Groups:
    """Returns the groups of a scored batch (rows with the same uid), classified by their outcomes.

    Reads uid, response_mask, token_level_scores, outcomes if present, and `reward/<metric>`. An answer does not count
    if its response_mask is empty (its reward failed, or it has no token) or if it lacks the metric. Outcomes are
    compared directly, because rounding can leave the standard deviation of equal outcomes above 0.

    Args:
        metric: "score", or an entry of the reward function's dict. None and "acc" use the entry `acc`, and the score in
            rows without it (in verl, a reward function's plain number is acc).
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
    """Returns the (B,) fp64 outcomes and a (B,) bool mask of the answers that have an outcome; see `groups_of`."""
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
    """Returns groups/{kept,all_right,all_wrong,unjudged}, shares of the batch's groups that sum to 1; see `Groups`.

    Returns no metrics if rows are steps of episodes; the scheduler computes the shares of their groups.
    """
    if "traj_id" in batch or not len(batch):
        return {}
    kinds = groups_of(batch, metric).kinds
    return {f"groups/{kind}": Metric.mean(int(mask.sum()), len(mask)) for kind, mask in kinds.items()}
