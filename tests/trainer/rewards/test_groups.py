"""Kinds of groups, worked by hand, and against a loop over random groups."""

from __future__ import annotations

import numpy as np
import torch

from trainer.rewards.groups import KINDS, groups_of
from verl_lite.protocol import DataProto


def kinds(outcomes: list[float], counted: list[int], groups: list[int]) -> dict[int, str]:
    mask = torch.tensor(counted)[:, None]
    columns = {"outcomes": torch.tensor(outcomes, dtype=torch.float32), "response_mask": mask}
    found = groups_of(DataProto.from_dict(columns, {"uid": np.array(groups, dtype=object)}), "score")
    of_kind = torch.stack([found.kinds[kind] for kind in KINDS])
    assert (of_kind.sum(0) == 1).all()  # one kind for each group
    return dict(zip(groups, (KINDS[kind] for kind in of_kind.int().argmax(0)[found.of_row]), strict=True))


def test_an_answer_that_does_not_count_makes_no_difference() -> None:
    """The group differs only by an answer whose reward failed, of whatever value."""
    for value in (0.0, float("nan"), float("inf")):
        assert kinds([1, 1, value], [1, 1, 0], [0, 0, 0]) == {0: "all_right"}


def test_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        outcomes = torch.randint(-1, 2, (24,), generator=generator).tolist()
        counted = torch.randint(0, 2, (24,), generator=generator).tolist()
        groups = torch.randint(0, 6, (24,), generator=generator).tolist()
        expected = {}
        for group in set(groups):
            own = [x for x, c, g in zip(outcomes, counted, groups, strict=True) if c and g == group]
            if len(own) < 2:
                expected[group] = "unjudged"
            elif len(set(own)) > 1:
                expected[group] = "kept"
            else:
                expected[group] = "all_right" if own[0] > 0 else "all_wrong"
        assert kinds(outcomes, counted, groups) == expected
