"""The gradient does not depend on how a batch was cut: losses summed over planned parts equal the loss of the whole.

In fp64, for every policy loss and aggregation mode, over ranks, token budgets and micro-batch sizes. A loss that
normalises by what it is given must fail the same check, or the check would be worth nothing.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from verl_lite.algos.covariance_losses import TOKEN_SELECTIONS
from verl_lite.algos.policy_losses import RATIO_LOSSES
from verl_lite.config import ActorConfig, PolicyLossConfig
from verl_lite.core_algos import LOSS_AGG_MODES, POLICY_LOSS_REGISTRY, agg_loss, compute_value_loss, masked_mean
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import plan_batch

ROWS, WIDTH, FEATURES = 23, 9, 5
CONFIG = ActorConfig(clip_ratio_high=0.28, policy_loss=PolicyLossConfig(dro_beta=0.5, kl_cov_ratio=0.2))
CONFIG.policy_loss.clip_cov_ratio, CONFIG.policy_loss.clip_cov_lb = 0.2, 0.1
SPLITS = [
    {"world_size": 1, "micro_batch_size": 7},
    {"world_size": 1, "max_token_len": 25},
    {"world_size": 2, "max_token_len": 12, "balance": False},
    {"world_size": 4, "max_token_len": 30},
    {"world_size": 32, "max_token_len": 12},  # more ranks than rows
]


def ragged_batch() -> DataProto:
    """Random rows; some have no valid token, one has NaN there, one has a hole in its mask (a tool's answer)."""
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    mask[3] = mask[17] = 0
    mask[5, 0] = 0
    values = {
        name: torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        for name in ("old_log_probs", "advantages", "rollout_is_weights")
    }
    values["old_log_probs"] = -values["old_log_probs"].abs() - 2
    values["advantages"][17] = float("nan")
    features = torch.randn(ROWS, WIDTH, FEATURES, generator=generator, dtype=torch.float64)
    chosen = {
        f"selected_{name}": choose(values["old_log_probs"], values["advantages"], mask, CONFIG)
        for name, choose in TOKEN_SELECTIONS.items()
    }
    return DataProto.from_dict({**values, **chosen, "features": features, "response_mask": mask})


def gradient(data: DataProto, loss_fn, mode: str, num_tokens: int, num_sequences: int) -> torch.Tensor:
    """Of a small policy's weights, for one part of the batch."""
    torch.manual_seed(0)
    policy = nn.Linear(FEATURES, 1, dtype=torch.float64)
    log_prob = policy(data.batch["features"]).squeeze(-1) + data.batch["old_log_probs"]
    choosing = next((name for name in TOKEN_SELECTIONS if POLICY_LOSS_REGISTRY[name] is loss_fn), None)
    extras = {} if choosing is None else {"selected": data.batch[f"selected_{choosing}"]}
    loss, _ = loss_fn(
        data.batch["old_log_probs"],
        log_prob,
        data.batch["advantages"],
        data.batch["response_mask"],
        mode,
        CONFIG,
        data.batch["rollout_is_weights"].exp(),
        batch_num_tokens=num_tokens,
        global_batch_size=num_sequences,
        **extras,
    )
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def largest_difference(loss_fn, mode: str, split: dict) -> float:
    """Between the gradients of two optimizer steps on the whole mini-batch and summed over the planned parts."""
    data = ragged_batch()
    mask = data.batch["response_mask"]
    lengths = np.arange(ROWS) % 5 + mask.sum(1).numpy()  # prompts and responses
    planned_by = {"mini_batch_size": 15, "num_tokens": mask.sum(1).numpy(), "epochs": 1, "shuffle_seed": 4}
    plan = plan_batch(lengths, **planned_by, **split)
    applied = plan.apply(data)
    worst = 0.0
    for b, step in enumerate(plan.schedule[0]):
        rows = np.sort(plan.order[(plan.mini_batch[:, 0] == b) & ~plan.is_padding])
        kept = mask[rows]
        whole = gradient(data[rows], loss_fn, mode, int(kept.sum()), int((kept.sum(1) > 0).sum()))
        total = torch.zeros_like(whole)
        for part in applied.chunk(plan.world_size):
            for m in range(step.num_micro_batches):
                chosen = (part.batch["mini_batch"][:, 0] == b) & (part.batch["micro_batch"][:, 0] == m)
                total += gradient(part[chosen], loss_fn, mode, step.num_tokens, step.num_sequences)
        assert whole.abs().max() > 1e-3
        worst = max(worst, float((total - whole).abs().max()))
    return worst


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", sorted(POLICY_LOSS_REGISTRY))
def test_gradient_is_the_same_for_every_split(name, mode, split):
    assert largest_difference(POLICY_LOSS_REGISTRY[name], mode, split) < 1e-10


def by_segment(name: str):
    """The loss with one ratio per run of response tokens."""

    def loss_fn(old, new, advantages, mask, mode, config, weights=None, **counts):
        config = dataclasses.replace(config, ratio_type="segment")
        return POLICY_LOSS_REGISTRY[name](old, new, advantages, mask, mode, config, weights, **counts)

    return loss_fn


def value_loss(old, new, advantages, mask, mode, config, weights=None, **counts):
    return compute_value_loss(new, advantages, old, mask, 0.3, mode, **counts)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_fn", [*map(by_segment, sorted(RATIO_LOSSES)), value_loss])
def test_segment_ratios_and_the_value_loss_too(loss_fn, mode, split):
    assert largest_difference(loss_fn, mode, split) < 1e-10


def token_losses(old_log_prob, log_prob, advantages, response_mask):
    return torch.where(response_mask != 0, -advantages.nan_to_num() * (log_prob - old_log_prob).exp(), 0)


def local_token_mean_by_share_of_rows(
    old, new, advantages, mask, mode, config, weights=None, *, global_batch_size, **_
):
    """Wrong on purpose, and less visibly so: parts weigh by their sequences, whatever their lengths."""
    share = (mask != 0).any(-1).sum() / global_batch_size
    return masked_mean(token_losses(old, new, advantages, mask), mask) * share, {}


def forgets_the_denominators(old, new, advantages, mask, mode, config, weights=None, **_):
    """Wrong on purpose: leaves agg_loss to count by itself (which refuses parts without a token)."""
    losses = token_losses(old, new, advantages, mask)
    return (agg_loss(losses, mask, mode) if mask.any() else losses.sum()), {}


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("wrong", [local_token_mean_by_share_of_rows, forgets_the_denominators])
def test_a_loss_that_normalises_by_its_own_micro_batch_is_caught(wrong, split):
    assert largest_difference(wrong, "seq-mean-token-mean", split) > 1e-3
