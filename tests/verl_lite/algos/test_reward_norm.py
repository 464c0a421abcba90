"""Normalisation of scores against plain loops over rows, for every pair of types; the degenerate sets by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from verl_lite.algos.reward_norm import NORM_TYPES, normalise_scores, update_running
from verl_lite.core_algos import RunningMoments

TYPES = (*NORM_TYPES, None)


@pytest.mark.parametrize(("mean_type", "std_type"), list(itertools.product(TYPES, TYPES)))
def test_every_pair_of_types_equals_a_loop(mean_type: str | None, std_type: str | None) -> None:
    random = np.random.default_rng(7)
    groups = [f"p{random.integers(5)}" for _ in range(24)]  # sizes differ, and members do not stand together
    domains = [f"d{int(group[1]) % 2}" for group in groups]
    valid = [bool(random.random() > 0.2) for _ in groups]
    scores = random.normal(size=24).tolist()
    running: dict[str, RunningMoments] = {}
    tensor, counted = torch.tensor(scores), torch.tensor(valid)
    update_running(running, tensor, counted, domains)
    got = normalise_scores(tensor, counted, mean_type, std_type, groups=groups, domains=domains, running=running)
    labels = {"batch": ["all"] * 24, "group": groups, "running": domains}

    def compared(kind: str, row: int) -> list[float]:
        return [scores[other] for other in range(24) if valid[other] and labels[kind][other] == labels[kind][row]]

    for row in range(24):
        expected = scores[row]
        if mean_type is not None:
            expected -= float(np.mean(compared(mean_type, row)))
        if std_type is not None:
            set_of_row = compared(std_type, row)
            expected = expected / (float(np.std(set_of_row, ddof=1)) + 1e-6) if len(set_of_row) > 1 else 0.0
        assert got[row].item() == pytest.approx(expected if valid[row] else 0.0, rel=1e-5, abs=1e-6), row


def test_running_moments_see_all_batches_of_their_own_domain() -> None:
    running: dict[str, RunningMoments] = {}
    first, second = [1.0, 5.0, 100.0, 3.0], [7.0, 300.0, 9.0]
    update_running(running, torch.tensor(first), torch.tensor([True, True, True, False]), ["a", "a", "b", "a"])
    update_running(running, torch.tensor(second), torch.ones(3, dtype=torch.bool), ["a", "b", "a"])
    seen_a, seen_b = [1.0, 5.0, 7.0, 9.0], [100.0, 300.0]  # the row that does not count is not among them
    assert (running["a"].mean, running["b"].mean) == pytest.approx((np.mean(seen_a), np.mean(seen_b)))
    assert running["a"].std == pytest.approx(np.std(seen_a, ddof=1))
    assert running["b"].std == pytest.approx(np.std(seen_b, ddof=1))


@pytest.mark.parametrize("mean_type", TYPES)
@pytest.mark.parametrize("std_type", NORM_TYPES)
@pytest.mark.parametrize("scores", [[2.0], [2.0, 2.0]])
def test_where_there_is_no_spread_nothing_is_learnt(scores: list[float], mean_type: str | None, std_type: str) -> None:
    valid = torch.ones(len(scores), dtype=torch.bool)
    labels, running = ["x"] * len(scores), {}
    update_running(running, torch.tensor(scores), valid, labels)
    got = normalise_scores(
        torch.tensor(scores), valid, mean_type, std_type, groups=labels, domains=labels, running=running
    )
    # of a single value so far the running std is 1 by definition, so that without a mean the value stays
    stays = (mean_type, std_type, len(scores)) == (None, "running", 1)
    assert got.tolist() == pytest.approx([2.0] if stays else [0.0] * len(scores), abs=1e-5)


def test_wrong_arguments_are_named() -> None:
    scores, valid = torch.tensor([1.0, 2.0]), torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="norm_mean_type='mean': expected one of batch, group, running, or null"):
        normalise_scores(scores, valid, "mean")
    with pytest.raises(ValueError, match="norm_std_type='group' needs groups, found None"):
        normalise_scores(scores, valid, None, "group")
    with pytest.raises(ValueError, match="norm_mean_type='running' needs running and domains"):
        normalise_scores(scores, valid, "running", domains=["a", "b"])
