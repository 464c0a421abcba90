"""Outcomes of the groups in a scored batch, for dynamic sampling and its metrics.

The outcome of an answer is the metric `algorithm.filter_groups.metric`, by default the reward function's entry `acc`,
or without it the score before the length penalty.
"""

from dataclasses import dataclass

import numpy as np
import torch

from verl_lite.algos.advantages import outcome_scores
from verl_lite.algos.masked import group_ids, group_sum
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto

SCORE = "score"
ACCURACY = "acc"
KINDS = ("kept", "all_right", "all_wrong", "unjudged")
"""The kinds of groups; see `Groups`."""


@dataclass(frozen=True)
class Groups:
    """The groups of a batch, of which each has exactly one kind.

    The kinds are:
    - kept: at least two counted answers with different outcomes.
    - all_right, all_wrong: at least two counted answers with the same outcome, which is above 0 (right) or not (wrong).
    - unjudged: fewer than two counted answers.

    Attributes:
        of_row: (B,) group index of each row, in order of first appearance.
        kinds: For each kind in KINDS a bool tensor (G,), which is True for the groups of the kind.
    """

    of_row: torch.Tensor
    kinds: dict[str, torch.Tensor]


def groups_of(batch: DataProto, metric: str | None) -> Groups:
    """Returns the groups of a scored batch (rows with the same uid), classified by their outcomes.

    Reads uid, response_mask, token_level_scores, outcomes if present, and `reward/<metric>`. An answer does not count
    if its response_mask is empty (its reward failed, or it has no token) or if it lacks the metric. Outcomes are
    compared directly, because rounding can leave the standard deviation of equal outcomes above 0.

    Args:
        batch: scored rows.
        metric: "score", or an entry of the reward function's dict. None and "acc" use the entry `acc`, and the score in
            rows without it (in verl, a reward function's plain number is acc).
    """
    outcomes, counted = outcomes_of(batch, metric)
    of_row, num_groups = group_ids(batch.non_tensor_batch["uid"], outcomes.device)
    num_counted = group_sum(counted.long(), of_row, num_groups)
    lowest, highest = extremes_of_groups(outcomes[counted], of_row[counted], num_groups)

    has_several = num_counted > 1
    is_equal = has_several & (lowest == highest)
    kinds = {
        "kept": has_several & (lowest < highest),
        "all_right": is_equal & (highest > 0),
        "all_wrong": is_equal & (highest <= 0),
        "unjudged": ~has_several,
    }
    return Groups(of_row, kinds)


def extremes_of_groups(
    values: torch.Tensor, groups: torch.Tensor, num_groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the lowest and the highest value of each group (G,); inf and -inf for a group without values.

    values, groups: (B,) values and their group numbers.
    """
    infinity = values.new_full((num_groups,), torch.inf)
    lowest = infinity.scatter_reduce(0, groups, values, "amin")
    highest = (-infinity).scatter_reduce(0, groups, values, "amax")
    return lowest, highest


def outcomes_of(batch: DataProto, metric: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the (B,) fp64 outcomes and a (B,) bool mask of the answers that have an outcome; see `groups_of`."""
    mask = batch.batch["response_mask"]
    is_answered = (mask != 0).any(1)
    # `outcomes` are the scores before the length penalty, see `punish_overlong`; with the penalty, equal answers of
    # different lengths would count as different
    if "outcomes" in batch:
        scores = batch.batch["outcomes"].double()
    else:
        scores = outcome_scores(batch.batch["token_level_scores"], mask).double()

    is_accuracy = metric in (None, ACCURACY)
    column = f"reward/{ACCURACY if is_accuracy else metric}"
    # a reward function that returns a plain number has no acc
    lacks_accuracy = is_accuracy and column not in batch
    if metric == SCORE or lacks_accuracy:
        return scores, is_answered

    values = _entries_as_numbers(batch, column)
    # rewards of several data sources may return acc only in some
    if is_accuracy:
        values = torch.where(values.isnan(), scores, values)
    return values, is_answered & ~values.isnan()


def _entries_as_numbers(batch: DataProto, column: str) -> torch.Tensor:
    """Returns (B,) fp64 entries of a reward's result, NaN where an entry is missing or no number."""
    numbers = np.full(len(batch), np.nan)
    if column in batch:
        for row, entry in enumerate(batch.non_tensor_batch[column]):
            if isinstance(entry, bool | int | float | np.number | np.bool_):
                numbers[row] = float(entry)
    return torch.from_numpy(numbers)


def group_shares(batch: DataProto, metric: str | None) -> dict[str, Metric]:
    """Returns groups/{kept,all_right,all_wrong,unjudged}, shares of the batch's groups that sum to 1; see `Groups`.

    Returns no metrics if rows are steps of episodes; the scheduler computes the shares of their groups.
    """
    if "traj_id" in batch or not len(batch):
        return {}
    shares = {}
    groups = groups_of(batch, metric)
    for kind, is_kind in groups.kinds.items():
        count = int(is_kind.sum())
        shares[f"groups/{kind}"] = Metric.mean(count, len(is_kind))
    return shares
