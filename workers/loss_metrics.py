"""What the actor's update reports: parts of the loss, and how far the policy has moved from the one that sampled.

Each number travels as a part with its reduction (`Metric`), so that what a step reports does not depend on how the
batch was cut. The parts stay on the device: see `verl_lite.metrics.to_host`. Names are those of ROLL's agentic actor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verl_lite.algos.policy_losses import clip_range, importance_log_ratio
from verl_lite.core_algos import masked_sum
from verl_lite.metrics import Metric

Aggregate = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def loss_metrics(
    parts: dict[str, torch.Tensor],
    token_values: dict[str, torch.Tensor],
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    num_tokens: int | None,
    aggregate: Aggregate,
) -> dict[str, Metric]:
    """The metrics of one micro-batch.

    parts: scalars whose sum over micro-batches and ranks is a mini-batch's value, reported as the mean over the
        mini-batches of a step. Each counts by its share of num_tokens (null = all tokens are here): 1 in a mini-batch.
    token_values: (b, R), reported as means over valid tokens.
    aggregate: as the loss is. How far the policy is from the one that sampled, as further parts:
      clipfrac   tokens where PPO's clip lowers the objective, whatever the loss makes of them
      approxkl   d^2 / 2, with d = log pi - log pi_old
      policykl   d
    The ratio pi / pi_old is that of each token, or of its run of tokens with ratio_type=segment: ratio_mean (over
    sequences, of each one's mean), ratio_max, ratio_min, and the shares of tokens outside the clip range:
    ppo_ratio_high_clipfrac, ppo_ratio_low_clipfrac, ppo_ratio_clipfrac.
    """
    low, high = clip_range(config)
    ratio = importance_log_ratio(log_probs, old_log_probs, response_mask, config).exp()
    is_clipped = ratio.clamp(1 - low, 1 + high) * advantages < ratio * advantages
    is_valid = response_mask != 0
    difference = torch.where(is_valid, log_probs - old_log_probs, 0)
    parts = parts | {
        "clipfrac": aggregate(is_clipped.to(ratio.dtype)),
        "approxkl": aggregate(0.5 * difference.square()),
        "policykl": aggregate(difference),
    }
    is_high, is_low = ratio > 1 + high, ratio < 1 - low
    token_values = token_values | {
        "ppo_ratio_high_clipfrac": is_high,
        "ppo_ratio_low_clipfrac": is_low,
        "ppo_ratio_clipfrac": is_high | is_low,
    }
    lengths = is_valid.sum(dim=-1)
    tokens = lengths.sum()
    share = tokens.double() / (tokens.clamp(min=1) if num_tokens is None else max(1, num_tokens))
    by_sequence = masked_sum(ratio, response_mask, axis=-1) / lengths.clamp(min=1)
    return {
        "ratio_mean": Metric.mean(by_sequence.sum(), (lengths > 0).sum()),
        "ratio_max": Metric.max(torch.where(is_valid, ratio, -torch.inf).amax(), tokens),
        "ratio_min": Metric.min(torch.where(is_valid, ratio, torch.inf).amin(), tokens),
        **{
            name: Metric.mean(masked_sum(values.to(ratio.dtype), response_mask), tokens)
            for name, values in token_values.items()
        },
        **{name: Metric.mean(value, share) for name, value in parts.items()},
    }
