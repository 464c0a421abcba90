"""Kinds of groups, worked by hand, and against a loop over random groups."""

from __future__ import annotations

import torch

from verl_lite.algos.group_outcomes import KINDS, group_kinds


def kinds(outcomes: list[float], counted: list[int], groups: list[int], number: int) -> list[str]:
    found = group_kinds(torch.tensor(outcomes), torch.tensor(counted, dtype=torch.bool), torch.tensor(groups), number)
    columns = [getattr(found, kind).tolist() for kind in KINDS]
    assert all(sum(each) == 1 for each in zip(*columns, strict=True))  # one kind for each group
    return [KINDS[each.index(True)] for each in zip(*columns, strict=True)]


def test_an_answer_that_does_not_count_makes_no_difference() -> None:
    """Group 0 differs only by an answer whose reward failed, of whatever value."""
    for value in (0.0, float("nan"), float("inf")):
        assert kinds([1, 1, value], [1, 1, 0], [0, 0, 0], 1) == ["all_right"]


def test_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        outcomes = torch.randint(-1, 2, (24,), generator=generator).tolist()
        counted = torch.randint(0, 2, (24,), generator=generator).tolist()
        groups = torch.randint(0, 6, (24,), generator=generator).tolist()
        expected = []
        for group in range(6):
            own = [x for x, c, g in zip(outcomes, counted, groups, strict=True) if c and g == group]
            if len(own) < 2:
                expected.append("unjudged")
            elif len(set(own)) > 1:
                expected.append("kept")
            else:
                expected.append("all_right" if own[0] > 0 else "all_wrong")
        assert kinds(outcomes, counted, groups, 6) == expected
