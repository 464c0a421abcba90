"""The actor's metrics by hand, and the ways to call its loss. With each policy loss: test_corrected_loss.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.verl_lite.naive_losses import naive_value_loss
from verl_lite.config import ActorConfig, CriticConfig, PolicyLossConfig, PPOConfig
from verl_lite.config.distillation import DistillationLossConfig
from verl_lite.core_algos import LOSS_AGG_MODES, agg_loss
from verl_lite.metrics import combine, values
from verl_lite.protocol import DataProto
from workers.losses import actor_loss, critic_loss, distillation_loss
from workers.roles.actor_rollout import ActorWorker

SEED_METRICS = (
    *("pg_loss", "kl_loss", "total_loss", "clipfrac", "approxkl", "policykl", "ratio_mean", "ratio_max", "ratio_min"),
    *("ppo_ratio_clipfrac", "ppo_ratio_high_clipfrac", "ppo_ratio_low_clipfrac"),
)
VERL_METRICS = ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "entropy_loss", "loss", "kl_coef")


def test_the_metrics_by_hand() -> None:
    """Log-ratios ln 2, 0 and, in the second row, ln 1/2; under mask 0 is a NaN."""
    log_2 = math.log(2.0)
    d = torch.tensor([[log_2, 0.0], [-log_2, math.nan]], dtype=torch.float64)
    columns = {
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "advantages": torch.tensor([[1.0, 1.0], [1.0, math.nan]], dtype=torch.float64),
        "old_log_probs": torch.full((2, 2), -3.0, dtype=torch.float64),
        "ref_log_prob": d - 3,
    }
    outputs = {"log_probs": d - 3, "entropys": torch.tensor([[0.5, 1.0], [0.0, math.nan]], dtype=torch.float64)}
    data = DataProto.from_dict(columns, meta_info={"num_tokens": 3, "num_sequences": 2})
    config = ActorConfig(use_kl_loss=True, kl_loss_coef=0.5, entropy_coeff=0.1, loss_agg_mode="seq-mean-token-mean")
    loss, metrics = actor_loss(data, outputs, config)
    found = values(metrics)
    # token losses -min(r A, clip(r) A): -1.2, -1, -0.5; rows (-1.1, -0.5)
    expected = {
        "pg_loss": -0.8,
        "kl_loss": 0.0,
        "entropy_loss": (0.75 + 0.0) / 2,
        "entropy": 0.5,
        "total_loss": -0.8 - 0.1 * 0.375,
        "loss": -0.8 - 0.1 * 0.375,
        "kl_coef": 0.5,
        "clipfrac": (1 / 2 + 0) / 2,
        "pg_clipfrac": 1 / 3,
        "pg_clipfrac_lower": 0.0,
        "approxkl": (0.5 * log_2**2 / 2 + 0.5 * log_2**2) / 2,
        "policykl": (log_2 / 2 - log_2) / 2,
        "ppo_kl": 0.0,
        "ratio_mean": (1.5 + 0.5) / 2,
        "ratio_max": 2.0,
        "ratio_min": 0.5,
        "ppo_ratio_high_clipfrac": 1 / 3,
        "ppo_ratio_low_clipfrac": 1 / 3,
        "ppo_ratio_clipfrac": 2 / 3,
    }
    assert found.keys() == expected.keys() == {*SEED_METRICS, *VERL_METRICS}
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12) and loss.item() == pytest.approx(expected["loss"])


def asymmetric_case() -> tuple[DataProto, dict[str, torch.Tensor], ActorConfig]:
    """Ratios 1.4 and 0.7 with the clip range from 1 - 0.4 to 1 + 0.1, while clip_ratio alone is 0.25 (with 0.2,
    the two errors would cancel in the sum)."""
    log_probs = torch.tensor([[1.4, 0.7]], dtype=torch.float64).log() - 2
    columns = {
        "response_mask": torch.tensor([[1, 1]]),
        "advantages": torch.tensor([[1.0, -1.0]], dtype=torch.float64),
        "old_log_probs": torch.full((1, 2), -2.0, dtype=torch.float64),
        "teacher_log_probs": torch.tensor([[-1.0, -3.0]], dtype=torch.float64),  # advantages 1 and -1
        "has_teacher": torch.tensor([True]),
    }
    config = ActorConfig(clip_ratio=0.25, clip_ratio_low=0.4, clip_ratio_high=0.1)
    return DataProto.from_dict(columns), {"log_probs": log_probs}, config


def test_the_clip_ranges_below_and_above_are_those_of_the_metrics() -> None:
    data, outputs, config = asymmetric_case()
    loss, metrics = actor_loss(data, outputs, config)
    found = values(metrics)
    assert loss.item() == pytest.approx((-1.1 + 0.7) / 2)  # the second ratio is inside of its range
    assert found["clipfrac"] == found["ppo_ratio_high_clipfrac"] == found["ppo_ratio_clipfrac"] == 0.5
    assert found["ppo_ratio_low_clipfrac"] == 0


def test_the_clip_ranges_below_and_above_are_those_of_distillation() -> None:
    data, outputs, config = asymmetric_case()
    loss, _ = distillation_loss(data, outputs, data.batch["old_log_probs"], config, DistillationLossConfig())
    assert loss.item() == pytest.approx((-1.1 + 0.7) / 2)


@pytest.mark.parametrize("ratio_type", ["token", "segment"])
def test_logits_and_outputs_give_the_same_loss_and_gradient(ratio_type: str) -> None:
    """A dense softmax by hand over the positions before each response token."""
    generator = torch.Generator().manual_seed(2)
    rows, prompt, width, vocab, temperature = 3, 4, 5, 7, 0.7
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 1, 1], [0, 0, 0, 0, 0]])
    ids = torch.randint(vocab, (rows, prompt + width), generator=generator)
    names = ("advantages", "old_log_probs", "ref_log_prob")
    columns = {name: torch.randn(rows, width, generator=generator, dtype=torch.float64) - 1 for name in names}
    data = DataProto.from_dict(
        tensors={**columns, "response_mask": mask, "input_ids": ids},
        meta_info={"num_tokens": 7, "num_sequences": 2, "temperature": temperature},
    )
    logits = torch.randn(rows, prompt + width, vocab, generator=generator, dtype=torch.float64).requires_grad_()
    log_probs, entropys = (torch.zeros(rows, width, dtype=torch.float64) for _ in range(2))
    for row in range(rows):
        for t in range(width):
            p = torch.softmax(logits[row, prompt + t - 1] / temperature, dim=-1)
            log_probs[row, t] = p[ids[row, prompt + t]].log()
            entropys[row, t] = -(p * p.log()).sum()
    actor = ActorConfig(ratio_type=ratio_type, use_kl_loss=True, kl_loss_coef=0.3, entropy_coeff=0.2)
    entry = ActorWorker(PPOConfig(actor=actor), total_training_steps=1, rewards=None)
    by_outputs, expected = entry.loss_func(data, {"log_probs": log_probs, "entropys": entropys})
    by_logits, metrics = entry.loss_func(data, logits)
    [expected_gradient] = torch.autograd.grad(by_outputs, logits)
    [gradient] = torch.autograd.grad(by_logits, logits)
    torch.testing.assert_close(by_logits, by_outputs, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)
    assert gradient[:2].abs().max() > 1e-3 and not gradient[2].any()
    assert {f"actor/{name}" for name in (*SEED_METRICS, *VERL_METRICS)} == metrics.keys()
    assert metrics == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match=r"output_tensor has shape \(3, 8, 7\), expected .* \(3, 9\)"):
        entry.loss_func(data, logits[:, :-1])


def verl_style(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A loss as verl's users register it: denominators from the config, metrics as numbers."""
    ratio = torch.exp(log_prob - old_log_prob)
    losses = -advantages * ratio.clamp(max=1 + config.clip_ratio)
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    share = ((ratio > 1 + config.clip_ratio) * response_mask).sum() / response_mask.sum()
    return loss, {"actor/pg_clipfrac": share.item()}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_loss_with_verls_signature_does_not_depend_on_the_cut_either(mode: str) -> None:
    generator = torch.Generator().manual_seed(3)
    names = ("log_probs", "old_log_probs", "advantages")
    columns = {name: torch.randn(4, 5, generator=generator, dtype=torch.float64) for name in names}
    columns["response_mask"] = (torch.arange(5) < torch.tensor([[5], [1], [3], [4]])).long()
    data = DataProto.from_dict(tensors=columns, meta_info={"num_tokens": 13, "num_sequences": 4})
    options = PolicyLossConfig(loss_mode=f"{__name__}:verl_style")
    config = ActorConfig(policy_loss=options, loss_agg_mode=mode, loss_scale_factor=None)
    whole, expected = actor_loss(data, {"log_probs": data.batch["log_probs"]}, config)
    parts = [actor_loss(part, {"log_probs": part.batch["log_probs"]}, config) for part in (data[:1], data[1:])]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), rel=1e-12)
    found = combine(metrics for _, metrics in parts)
    assert found["actor/pg_clipfrac"].value == pytest.approx(expected["actor/pg_clipfrac"].value)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_critics_loss_aggregates_as_the_critic_says_else_as_the_actor(mode: str) -> None:
    generator = torch.Generator().manual_seed(4)
    columns = {name: torch.randn(3, 4, generator=generator, dtype=torch.float64) for name in ("returns", "values")}
    columns["response_mask"] = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
    vpreds = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    data = DataProto.from_dict(tensors=columns, meta_info={"num_tokens": 7, "num_sequences": 3})
    expected = naive_value_loss(columns | {"vpreds": vpreds}, 0.5, mode)
    other = "token-sum" if mode == "token-mean" else "token-mean"
    for own, actors in ((mode, other), (None, mode)):
        critic, actor = CriticConfig(cliprange_value=0.5, loss_agg_mode=own), ActorConfig(loss_agg_mode=actors)
        assert critic_loss(data, {"values": vpreds}, critic, actor)[0].item() == pytest.approx(expected, rel=1e-12)
