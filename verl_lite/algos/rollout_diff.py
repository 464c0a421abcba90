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
    is_valid = response_mask.bool()
    difference = torch.where(is_valid, (log_probs.exp() - rollout_log_probs.exp()).abs(), 0).double()
    return {
        "training/rollout_probs_diff_mean": Metric.mean(difference.sum(), is_valid.sum()),
        "training/rollout_probs_diff_max": Metric.max(difference.amax(), is_valid.sum()),
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
    has_token, rows, tokens = lengths > 0, (lengths > 0).sum(), lengths.sum()

    def row_sums(values: torch.Tensor) -> torch.Tensor:
        return torch.where(is_valid, at_least_fp32(values), 0).sum(dim=-1, dtype=torch.float64)

    def mean_over_rows(values: torch.Tensor) -> Metric:
        return Metric.mean(torch.where(has_token, values, 0).sum(), rows)

    training = -row_sums(log_probs) / lengths.clamp(min=1)  # (b,): per token
    of_training = {"training_ppl": training.exp(), "training_log_ppl": training}
    if rollout_log_probs is None:
        return {f"rollout_corr/{name}": mean_over_rows(values) for name, values in of_training.items()}
    log_ratio = masked_log_ratio(log_probs, rollout_log_probs, response_mask)
    ratio_sums = row_sums(log_ratio)
    rollout, change = -row_sums(rollout_log_probs) / lengths.clamp(min=1), -ratio_sums / lengths.clamp(min=1)
    summed = ratio_sums.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    by_token = {"kl": -log_ratio, "k3_kl": log_ratio.expm1() - log_ratio, "chi2_token": (2 * log_ratio).expm1()}
    by_row = {
        **of_training,
        "rollout_ppl": rollout.exp(),
        "rollout_log_ppl": rollout,
        "log_ppl_diff": change,
        "log_ppl_abs_diff": change.abs(),
        "ppl_ratio": change.exp(),
        "chi2_seq": (2 * summed).expm1(),
    }
    metrics = {name: Metric.mean(values.sum(dtype=torch.float64), tokens) for name, values in by_token.items()}
    metrics |= {name: mean_over_rows(values) for name, values in by_row.items()}
    metrics["log_ppl_diff_max"] = Metric.max(torch.where(has_token, change, -torch.inf).amax(), rows)
    metrics["log_ppl_diff_min"] = Metric.min(torch.where(has_token, change, torch.inf).amin(), rows)
    return {f"rollout_corr/{name}": metric for name, metric in metrics.items()}
