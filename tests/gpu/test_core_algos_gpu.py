"""Estimators and losses on a CUDA device: the numbers of the CPU, and the contract of every entry."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verl_lite.algos.covariance_losses import TOKEN_SELECTIONS
from verl_lite.config import ActorConfig, PolicyLossConfig
from verl_lite.contracts import ROWS, WIDTH, estimator_batch, loss_batch
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, compute_value_loss, get_policy_loss_fn

pytestmark = pytest.mark.gpu
CONFIG = ActorConfig(policy_loss=PolicyLossConfig(dro_beta=0.5, kl_cov_ratio=0.2, clip_cov_lb=0.0))


def on_cuda(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in columns.items()}


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY))
def test_estimators_equal_the_cpu(name: str) -> None:
    columns = estimator_batch(groups_of_one=name != "grpo_passk")
    estimator = ADV_ESTIMATOR_REGISTRY[name]
    for found, expected in zip(estimator(**on_cuda(columns)), estimator(**columns), strict=True):
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(POLICY_LOSS_REGISTRY))
def test_losses_equal_the_cpu(name: str) -> None:
    chosen = {"selected": torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 3 == 0} if name in TOKEN_SELECTIONS else {}
    results = []
    for columns in (loss_batch() | chosen, on_cuda(loss_batch() | chosen)):
        names = ("old_log_prob", "log_prob", "advantages", "response_mask", "rollout_is_weights")
        old, new, advantages, mask, weights = (columns.pop(key) for key in names)
        new = new.requires_grad_()
        loss, _ = get_policy_loss_fn(name)(old, new, advantages, mask, "token-mean", CONFIG, weights, **columns)
        loss.backward()
        results.append((loss.detach().cpu(), new.grad.cpu()))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(TOKEN_SELECTIONS))
def test_tokens_are_chosen_on_the_device(name: str) -> None:
    columns = on_cuda(loss_batch())
    names = ("old_log_prob", "advantages", "response_mask")
    chosen = TOKEN_SELECTIONS[name](*(columns[key] for key in names), CONFIG)
    assert chosen.is_cuda and bool(chosen.any())


def test_the_value_loss_equals_the_cpu() -> None:
    columns = loss_batch()
    names = ("log_prob", "advantages", "old_log_prob", "response_mask")
    found, expected = (
        compute_value_loss(*(given[key] for key in names), 0.4)[0] for given in (on_cuda(columns), columns)
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-12)
