"""How far the rollout engine's probabilities are from the trainer's, on the tokens that were sampled.

The same weights should give the same probabilities in both; what is left is numerics (about 1e-6 in fp32, 1e-2 in
bf16). A larger difference is an error: a stale cache, missed weights, another temperature.
"""

from __future__ import annotations

import torch

from verl_lite.metrics import Metric


def rollout_probs_diff(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, Metric]:
    """training/rollout_probs_diff_{mean,max}: |exp(trainer) - exp(rollout)| over valid tokens.

    All arguments (B, R). The trainer's log-probs are those before the update.
    """
    mask = response_mask.bool()
    difference = (log_probs.exp() - rollout_log_probs.exp()).abs()[mask].double()
    if difference.numel() == 0:
        return {}
    return {
        "training/rollout_probs_diff_mean": Metric.mean(float(difference.sum()), difference.numel()),
        "training/rollout_probs_diff_max": Metric.max(float(difference.max())),
    }
