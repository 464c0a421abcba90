"""How far the rollout engine's probabilities are from the trainer's, on the tokens that were sampled.

The same weights should give the same probabilities in both; what is left is numerics (about 1e-6 in fp32, 1e-2 in
bf16). A larger difference is an error: a stale cache, missed weights, another temperature.
"""

from __future__ import annotations

import torch

from verl_lite.algos.masked import at_least_fp32
from verl_lite.algos.policy_losses import LOG_RATIO_BOUND, masked_log_ratio
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


@torch.no_grad()
def mismatch_metrics(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor | None, response_mask: torch.Tensor
) -> dict[str, Metric]:
    """rollout_corr/*: how far the trainer's policy is from the rollout's, under verl's names. All arguments (B, T).

    Without rollout_log_probs only training_ppl and training_log_ppl, as verl's `compute_offpolicy_metrics`.

    With x = log_probs - rollout_log_probs within +-20, n the tokens of a row:
      kl, k3_kl                        mean over tokens of -x, of e^x - 1 - x: estimates of KL(rollout || trainer)
      chi2_token, chi2_seq             mean of e^(2x) - 1 over tokens; of e^(2 sum x) - 1 over rows
      {training,rollout}_ppl, _log_ppl mean over rows of e^(-mean log-prob), of -mean log-prob
      log_ppl_diff{,_max,_min}, log_ppl_abs_diff, ppl_ratio   mean over rows of d = -sum x / n, extremes, |d|, e^d
    Rows without a valid token are in none of them (verl counts them as perplexity 1).
    """
    is_valid = response_mask != 0
    lengths = is_valid.sum(dim=-1)
    has_token, tokens = lengths > 0, int(lengths.sum())
    if not tokens:
        return {}
    if rollout_log_probs is None:
        totals = torch.where(is_valid, at_least_fp32(log_probs), 0).sum(dim=-1, dtype=torch.float64)[has_token]
        alone = -totals / lengths[has_token]
        return {
            "rollout_corr/training_ppl": Metric.mean(float(alone.exp().sum()), len(alone)),
            "rollout_corr/training_log_ppl": Metric.mean(float(alone.sum()), len(alone)),
        }
    log_ratio = masked_log_ratio(log_probs, rollout_log_probs, response_mask)
    totals = torch.stack(
        [
            torch.where(is_valid, at_least_fp32(values), 0).sum(dim=-1, dtype=torch.float64)[has_token]
            for values in (log_probs, rollout_log_probs, log_ratio)
        ]
    )
    training, rollout, change = -totals / lengths[has_token]  # (3, b): per token, of each row that has one
    summed = totals[2].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    by_token = {
        "kl": -log_ratio,
        "k3_kl": log_ratio.expm1() - log_ratio,
        "chi2_token": (2 * log_ratio).expm1(),
    }
    by_row = {
        "training_ppl": training.exp(),
        "training_log_ppl": training,
        "rollout_ppl": rollout.exp(),
        "rollout_log_ppl": rollout,
        "log_ppl_diff": change,
        "log_ppl_abs_diff": change.abs(),
        "ppl_ratio": change.exp(),
        "chi2_seq": (2 * summed).expm1(),
    }
    means = [values.sum(dtype=torch.float64) for values in (*by_token.values(), *by_row.values())]
    numbers = torch.stack([*means, change.max(), change.min()]).tolist()  # one transfer
    counts = [tokens] * len(by_token) + [totals.shape[1]] * len(by_row)
    metrics = {
        f"rollout_corr/{name}": Metric.mean(number, count)
        for name, number, count in zip((*by_token, *by_row), numbers, counts, strict=False)
    }
    metrics["rollout_corr/log_ppl_diff_max"] = Metric.max(numbers[-2])
    metrics["rollout_corr/log_ppl_diff_min"] = Metric.min(numbers[-1])
    return metrics
