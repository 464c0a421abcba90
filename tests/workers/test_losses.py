"""The actor's loss with every policy loss that a configuration may name, on and off policy."""

from __future__ import annotations

import math

import pytest
import torch

from verl_lite.config import ActorConfig, PolicyLossConfig
from verl_lite.core_algos import POLICY_LOSS_REGISTRY
from verl_lite.covariance_losses import TOKEN_SELECTIONS
from verl_lite.protocol import DataProto
from workers.losses import actor_loss


@pytest.mark.parametrize("ratio_type", ["token", "segment"])
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("name", sorted(set(POLICY_LOSS_REGISTRY) - set(TOKEN_SELECTIONS)))
def test_the_loss_of_half_a_mini_batch(name: str, on_policy: bool, ratio_type: str) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = (-torch.randn(3, 4, generator=generator).abs() - 0.5).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    columns = {"response_mask": mask, "advantages": torch.randn(3, 4, generator=generator)}
    if not on_policy:
        columns["old_log_probs"] = log_probs.detach() + 0.05 * torch.randn(3, 4, generator=generator)
    data = DataProto.from_dict(tensors=columns, meta_info={"num_tokens": 8, "num_sequences": 4})
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, dro_beta=0.1), ratio_type=ratio_type)
    loss, metrics = actor_loss(data, {"log_probs": log_probs}, config)
    loss.backward()
    assert log_probs.grad is not None and bool(torch.isfinite(log_probs.grad).all())
    assert log_probs.grad[mask != 0].abs().max() > 0 and not log_probs.grad[mask == 0].any()
    assert all(math.isfinite(metric.value) for metric in metrics.values())
    assert metrics["pg_loss"].total == pytest.approx(loss.item()) and metrics["pg_loss"].count == 0.5
    assert metrics["ppo_kl"].count == 4
    if on_policy:
        assert metrics["ppo_kl"].value == pytest.approx(0.0, abs=1e-7)
