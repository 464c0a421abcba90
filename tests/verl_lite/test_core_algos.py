"""Registries, sums over masks and aggregation."""

import math

import numpy as np
import pytest
import torch

from verl_lite import core_algos
from verl_lite.core_algos import (
    agg_loss,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    masked_mean,
    masked_sum,
    masked_whiten,
)


def test_an_unknown_estimator_or_loss_is_named():
    with pytest.raises(ValueError, match="Unknown advantage estimator: nothing_like_it"):
        get_adv_estimator_fn("nothing_like_it")
    with pytest.raises(ValueError, match="Unknown policy loss: vanila; did you mean vanilla"):
        get_policy_loss_fn("vanila")


def test_masked_functions_ignore_nan_under_mask_0():
    values = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.nan, math.inf]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_sum(values, mask) == 9.0
    assert masked_mean(values, mask).item() == pytest.approx(3.0)
    assert masked_mean(values, mask, axis=-1).tolist() == pytest.approx([2.0, 5.0])
    whitened = masked_whiten(values, mask)
    expected = (np.array([1.0, 3.0, 5.0]) - 3.0) / np.std([1.0, 3.0, 5.0], ddof=1)
    assert whitened[mask != 0].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    kept_mean = masked_whiten(values, mask, shift_mean=False)
    assert kept_mean[mask != 0].mean().item() == pytest.approx(3.0)
    masked_sum(values, mask).backward()
    assert torch.equal(values.grad, mask.float())


LOSSES = torch.tensor([[1.0, 2.0, 3.0, math.nan], [4.0, math.nan, math.nan, math.nan], [math.nan] * 4])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 10 / 4),
        ("token-sum", 10.0),
        ("seq-mean-token-sum", (6 + 4) / 2),
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum-norm", (6 + 4) / 2 / 4),
    ],
)
def test_agg_loss_by_hand(mode, expected):
    assert agg_loss(LOSSES, MASK, mode).item() == pytest.approx(expected)
    given = agg_loss(LOSSES, MASK, mode, dp_size=3, batch_num_tokens=4, global_batch_size=torch.tensor(2))
    assert given.item() == pytest.approx(3 * expected)


def test_agg_loss_scale_factor_and_explicit_denominators():
    norm = agg_loss(LOSSES, MASK, "seq-mean-token-sum-norm", global_batch_size=5, loss_scale_factor=10.0)
    assert norm.item() == pytest.approx(10 / 5 / 10)
    assert agg_loss(LOSSES, MASK, "token-mean", batch_num_tokens=100).item() == pytest.approx(0.1)


@pytest.mark.parametrize("mode", core_algos.LOSS_AGG_MODES)
def test_a_part_without_tokens_has_loss_0_and_gradient_0(mode):
    losses = torch.full((2, 3), math.nan, requires_grad=True)
    for whole in (0, 7):
        loss = agg_loss(losses, torch.zeros(2, 3), mode, batch_num_tokens=whole, global_batch_size=whole)
        loss.backward()
        assert loss.item() == 0.0 and torch.equal(losses.grad, torch.zeros(2, 3))


def test_agg_loss_names_what_is_wrong():
    with pytest.raises(ValueError, match=r"agg_loss: loss_mask has shape \(3, 3\), expected .* loss_mat, \(3, 4\)"):
        agg_loss(LOSSES, MASK[:, :3], "token-mean")
    with pytest.raises(ValueError, match=r"Invalid loss_agg_mode: 'mean'.*token-mean"):
        agg_loss(LOSSES, MASK, "mean")
    with pytest.raises(ValueError, match="loss_scale_factor=0"):
        agg_loss(LOSSES, MASK, "seq-mean-token-sum-norm", loss_scale_factor=0)
