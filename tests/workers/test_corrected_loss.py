"""The actor's loss with rollout correction: its gradient is that of the formula, whatever the cut, bypassed or not."""

from __future__ import annotations

import math

import pytest
import torch

from verl_lite.algos.covariance_losses import TOKEN_SELECTIONS
from verl_lite.config import ActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from verl_lite.core_algos import LOSS_AGG_MODES, POLICY_LOSS_REGISTRY
from verl_lite.metrics import Metric, combine, values
from verl_lite.protocol import DataProto
from workers.losses import actor_loss

ROWS, WIDTH = 6, 5
REINFORCE = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is="token")
REINFORCE.rollout_is_threshold, REINFORCE.rollout_rs, REINFORCE.rollout_rs_threshold = "1.2", "token_k2", "0.05"


def batch() -> tuple[torch.Tensor, DataProto]:
    """log-probs of now, and the columns of a mini-batch given whole, in fp64; rollout log-probs nearby; NaN outside."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(WIDTH) < torch.tensor([5, 3, 0, 1, 4, 5])[:, None]).long()
    mask[4, 1] = 0
    now = -torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64) - 0.1
    columns = {
        "response_mask": mask,
        "advantages": torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64),
        "old_log_probs": now + 0.3 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64),
        "rollout_is_weights": torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64) + 0.5,
    }
    for name in ("advantages", "old_log_probs", "rollout_is_weights"):
        columns[name][mask == 0] = math.nan
    counts = {"num_tokens": int(mask.sum()), "num_sequences": int(mask.any(1).sum())}
    return now, DataProto.from_dict(tensors=columns, meta_info=counts)


def gradient(
    now: torch.Tensor, data: DataProto, config: ActorConfig, correction: RolloutCorrectionConfig | None = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    log_probs = now.clone().requires_grad_()
    loss, metrics = actor_loss(data, {"log_probs": log_probs}, config, correction)
    loss.backward()
    assert log_probs.grad is not None
    return log_probs.grad, metrics


def without(data: DataProto, *columns: str) -> DataProto:
    assert data.batch is not None
    kept = {name: data.batch[name] for name in data.batch.keys() if name not in columns}
    return DataProto.from_dict(tensors=kept, meta_info=dict(data.meta_info))


def loop(data: DataProto, entry) -> torch.Tensor:
    """A gradient written out: entry(row, token) at each valid token, divided by their number."""
    assert data.batch is not None
    mask = data.batch["response_mask"]
    result = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for r in range(ROWS):
        for t in range(WIDTH):
            if mask[r, t]:
                result[r, t] = entry(r, t) / int(mask.sum())
    return result


def test_on_policy_weights_multiply_the_gradient_of_each_token() -> None:
    now, data = batch()
    found, _ = gradient(now, without(data, "old_log_probs"), ActorConfig())
    weights, advantages = data.batch["rollout_is_weights"], data.batch["advantages"]
    torch.testing.assert_close(found, loop(data, lambda r, t: -weights[r, t] * advantages[r, t]))


def test_bypass_reinforce_weighs_by_the_policy_of_now() -> None:
    """-A sg(min(pi / pi_rollout, 1.2)) grad log pi where x^2 / 2 <= 0.05; denominators of before rejection."""
    now, data = batch()
    data = without(data, "rollout_is_weights")
    x, advantages = now - data.batch["old_log_probs"], data.batch["advantages"]

    def entry(r: int, t: int) -> float:
        is_kept = x[r, t] ** 2 / 2 <= 0.05
        return -advantages[r, t] * min(math.exp(x[r, t]), 1.2) if is_kept else 0.0

    expected = loop(data, entry)
    found, metrics = gradient(now, data, ActorConfig(clip_ratio=1e-6), REINFORCE)
    torch.testing.assert_close(found, expected)
    kept = int((expected != 0).sum())
    assert 0 < kept < data.meta_info["num_tokens"]
    lost = values(metrics)["rollout_corr/rollout_rs_masked_fraction"]
    assert lost == pytest.approx(1 - kept / data.meta_info["num_tokens"])


def test_bypass_ppo_clip_is_the_configured_loss_against_the_rollout() -> None:
    now, data = batch()
    data = without(data, "rollout_is_weights")
    for name in ("vanilla", "gspo", "cispo"):
        config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name))
        plain, _ = gradient(now, data, config)
        bypassed, metrics = gradient(now, data, config, RolloutCorrectionConfig(bypass_mode=True))
        assert torch.equal(bypassed, plain) and plain.any()
        assert "rollout_corr/kl" in metrics and "training/rollout_probs_diff_max" in metrics
    on_policy, _ = gradient(now, without(data, "old_log_probs"), ActorConfig())
    assert not torch.allclose(gradient(now, data, ActorConfig())[0], on_policy), "the rollout's log-probs do count"


def test_bypass_ppo_clip_rejects_by_the_policy_of_now() -> None:
    now, data = batch()
    data = without(data, "rollout_is_weights")
    correction = RolloutCorrectionConfig(bypass_mode=True, rollout_rs="seq_mean_k3", rollout_rs_threshold="0.03")
    plain, _ = gradient(now, data, ActorConfig(clip_ratio=10))
    found, _ = gradient(now, data, ActorConfig(clip_ratio=10), correction)
    rejected = 0
    for r in range(ROWS):
        valid = data.batch["response_mask"][r].bool()
        x = (now[r] - data.batch["old_log_probs"][r])[valid]
        is_rejected = len(x) > 0 and float((x.exp() - 1 - x).mean()) > 0.03
        rejected += is_rejected
        assert torch.equal(found[r], torch.zeros(WIDTH) if is_rejected else plain[r])
    assert 0 < rejected < ROWS - 1


CORRECTIONS = [
    None,
    REINFORCE,
    RolloutCorrectionConfig(
        bypass_mode=True, loss_type="reinforce", rollout_is="sequence", rollout_is_threshold="0.5_2"
    ),
    RolloutCorrectionConfig(bypass_mode=True, rollout_rs="seq_max_k2,segment_ratio", rollout_rs_threshold="0.1,1.3"),
]


LOSSES = sorted(set(POLICY_LOSS_REGISTRY) - set(TOKEN_SELECTIONS))


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(
    ("name", "mode"), [(name, "token-mean") for name in LOSSES] + [("vanilla", mode) for mode in LOSS_AGG_MODES[1:]]
)
def test_neither_gradient_nor_metrics_depend_on_the_cut(
    name: str, correction: RolloutCorrectionConfig | None, mode: str
) -> None:
    now, data = batch()
    data = data if correction is None else without(data, "rollout_is_weights")
    config = ActorConfig(loss_agg_mode=mode, policy_loss=PolicyLossConfig(loss_mode=name, dro_beta=0.1))
    whole, metrics = gradient(now, data, config, correction)
    assert whole.any() and bool(torch.isfinite(whole).all())
    for cut in ([[0], [1, 2, 3], [4, 5]], [[5, 3, 2], [0, 1, 4]]):
        parts = [gradient(now[rows], data[torch.tensor(rows)], config, correction) for rows in cut]
        summed = torch.zeros_like(whole)
        for rows, (part, _) in zip(cut, parts, strict=True):
            summed[rows] = part
        torch.testing.assert_close(summed, whole, rtol=1e-10, atol=1e-12)
        merged = values(combine(part for _, part in parts))
        assert merged == pytest.approx(values(metrics), rel=1e-6, abs=1e-9)
