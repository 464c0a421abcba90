"""What the answers to one prompt say together: whether they differ, and if not, whether all are right or all wrong.

Pure functions of tensors. Where all answers are as good as each other, every estimator that compares them gives 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GroupKinds:
    """One kind for each group, as four (G,) bool tensors of which exactly one is true.

    kept: at least two answers that count, of different outcome. all_right, all_wrong: at least two, all of the same
    outcome, which is above 0 or not. unjudged: fewer than two answers count.
    """

    kept: torch.Tensor
    all_right: torch.Tensor
    all_wrong: torch.Tensor
    unjudged: torch.Tensor

    def count(self) -> dict[str, int]:
        """Groups of each kind."""
        return {name: int(getattr(self, name).sum()) for name in KINDS}


KINDS = ("kept", "all_right", "all_wrong", "unjudged")


def group_kinds(outcomes: torch.Tensor, counted: torch.Tensor, groups: torch.Tensor, num_groups: int) -> GroupKinds:
    """The kind of each group.

    outcomes: (B,) how good an answer is. counted: (B,) bool, answers that have an outcome. groups: (B,) int64 in
    0..num_groups-1. Outcomes are compared, not their standard deviation, which rounding can leave above 0.
    """
    scores = outcomes.double()
    lowest = scores.new_full((num_groups,), torch.inf).scatter_reduce(
        0, groups, scores.masked_fill(~counted, torch.inf), "amin"
    )
    highest = scores.new_full((num_groups,), -torch.inf).scatter_reduce(
        0, groups, scores.masked_fill(~counted, -torch.inf), "amax"
    )
    several = groups.new_zeros(num_groups).index_add(0, groups, counted.long()) > 1
    equal = several & (lowest == highest)
    return GroupKinds(
        kept=several & (lowest < highest),
        all_right=equal & (highest > 0),
        all_wrong=equal & (highest <= 0),
        unjudged=~several,
    )
