"""What the actor's update reports: parts of the loss, and how far the policy has moved from the one that sampled.

Each number travels as a part with its reduction (`Metric`), so that what a step reports does not depend on how the
batch was cut. All parts of one micro-batch go to the host in one transfer. Names are those of ROLL's agentic actor.
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
def policy_movement(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    aggregate: Aggregate,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """How far the policy is from the one that sampled: its ratio, and scalars aggregated as the loss is.

    The ratio pi / pi_old (b, R) is that of each token, or of its run of tokens with ratio_type=segment; 1 under mask 0.
      clipfrac   tokens where PPO's clip lowers the objective, whatever the loss makes of them
      approxkl   d^2 / 2, with d = log pi - log pi_old
      policykl   d
    """
    low, high = clip_range(config)
    ratio = importance_log_ratio(log_probs, old_log_probs, response_mask, config).exp()
    is_clipped = ratio.clamp(1 - low, 1 + high) * advantages < ratio * advantages
    difference = torch.where(response_mask != 0, log_probs - old_log_probs, 0)
    return ratio, {
        "clipfrac": aggregate(is_clipped.to(ratio.dtype)),
        "approxkl": aggregate(0.5 * difference.square()),
        "policykl": aggregate(difference),
    }


@torch.no_grad()
def loss_metrics(
    parts: dict[str, torch.Tensor],
    token_values: dict[str, torch.Tensor],
    ratio: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    num_tokens: int | None,
) -> dict[str, Metric]:
    """The metrics of one micro-batch; none at all if it has no valid token.

    parts: scalars whose sum over micro-batches and ranks is a mini-batch's value, reported as the mean over the
        mini-batches of a step. Each counts by its share of num_tokens (null = all tokens are here): 1 in a mini-batch.
    token_values: (b, R), reported as means over valid tokens.
    ratio: (b, R); reported as ratio_mean (over sequences, of each one's mean), ratio_max, ratio_min, and as the shares
        of tokens outside the clip range: ppo_ratio_high_clipfrac, ppo_ratio_low_clipfrac, ppo_ratio_clipfrac.
    """
    low, high = clip_range(config)
    is_high, is_low = ratio > 1 + high, ratio < 1 - low
    token_values = token_values | {
        "ppo_ratio_high_clipfrac": is_high,
        "ppo_ratio_low_clipfrac": is_low,
        "ppo_ratio_clipfrac": is_high | is_low,
    }
    is_valid = response_mask != 0
    lengths = is_valid.sum(dim=-1)
    scalars = {
        "tokens": lengths.sum(),
        "sequences": (lengths > 0).sum(),
        "ratio_mean": (masked_sum(ratio, response_mask, axis=-1) / lengths.clamp(min=1)).sum(),
        "ratio_max": torch.where(is_valid, ratio, -torch.inf).amax(),
        "ratio_min": torch.where(is_valid, ratio, torch.inf).amin(),
        **{name: masked_sum(values.to(ratio.dtype), response_mask) for name, values in token_values.items()},
        **parts,
    }
    host = torch.stack([value.double() for value in scalars.values()]).tolist()
    numbers = dict(zip(scalars, host, strict=True))
    tokens = numbers["tokens"]
    if not tokens:
        return {}
    share = tokens / max(1, tokens if num_tokens is None else num_tokens)
    return {
        "ratio_mean": Metric.mean(numbers["ratio_mean"], numbers["sequences"]),
        "ratio_max": Metric.max(numbers["ratio_max"]),
        "ratio_min": Metric.min(numbers["ratio_min"]),
        **{name: Metric.mean(numbers[name], tokens) for name in token_values},
        **{name: Metric.mean(numbers[name], share) for name in parts},
    }
