"""Rollout correction: importance weights, rejection and metrics for the mismatch of rollout engine and trainer.

The rollout engine samples from pi_rollout; the trainer computes gradients for pi_trainer. The two policies differ even
with the same weights, because kernels, dtypes or quantisation differ, or the rollout's weights are stale. With
x = log pi_trainer - log pi_rollout of a sampled token, `correct_rollout` returns importance weights such as e^x, which
multiply the loss, and a response_mask without the tokens or responses whose x is out of bounds.
ROLLOUT_CORRECTION.md explains which option to choose.

The implementation covers the options of verl and ROLL, which `config.rollout_correction` parses. Tensors are (B, T).
Values under mask 0 have no effect; a row without a valid token has no weight and is in no metric. Weights and rejection
depend only on a token, its segment (run of valid tokens) or its row, so they do not depend on how a batch is split.
Only batch_normalize and the rejection level `batch` read the whole batch.
"""

import torch
from torch import Tensor

from verl_lite.algos.masked import (
    LOG_RATIO_BOUND,
    check_shapes,
    compute_segment_masked_mean,
    masked_log_ratio,
    masked_values,
    run_starts,
)
from verl_lite.config.rollout_correction import (
    WEIGHT_LEVELS,
    Correction,
    CorrectionOptions,
    Rejection,
    Weighting,
    correction_of,
)
from verl_lite.metrics import Metric

Metrics = dict[str, Metric]
ROLL_LEVELS = {level: name for name, level in WEIGHT_LEVELS.items()}


@torch.no_grad()
def correct_rollout(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, options: Correction | CorrectionOptions
) -> tuple[Tensor | None, Tensor, Metrics]:
    """Computes importance weights, rejects tokens, and measures the mismatch of trainer and rollout engine.

    If both log-probs are equal, all weights are 1 and no token is rejected.

    Args:
        old_log_probs: (B, T) log-probs by the trainer.
        rollout_log_probs: (B, T) log-probs by the rollout engine.
        response_mask: (B, T) mask of the valid tokens.
        options: a `Correction`, or an object with the attributes of `algorithm.rollout_correction`.

    Returns:
        - weights (B, T) without gradient, 0 under mask 0; None if the options set no weighting. batch_normalize divides
          them by their mean over all tokens (segments, responses) before rejection, which requires the whole batch.
        - response_mask without the rejected tokens.
        - metrics: verl's rollout_corr/*, and ROLL's actor/train_infer_* and actor/is_weight_clipfrac. Means are over
          valid tokens, or over rows with a valid token. Standard deviations and metrics derived from them are
          `Metric.last`, which is correct only for a whole batch.

    Raises:
        ValueError: shapes differ, or an option is malformed.
    """
    check_shapes(
        "correct_rollout",
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        response_mask=response_mask,
    )
    correction = options if isinstance(options, Correction) else correction_of(options)
    is_valid = response_mask != 0
    log_ratio = masked_log_ratio(old_log_probs, rollout_log_probs, response_mask)
    # both probabilities of a masked token are exp(0), so their difference is 0
    trainer_probs = masked_values(old_log_probs, is_valid).exp()
    rollout_probs = masked_values(rollout_log_probs, is_valid).exp()
    difference = trainer_probs - rollout_probs

    metrics = mismatch_metrics(old_log_probs, rollout_log_probs, response_mask)
    metrics |= _train_infer_metrics(log_ratio, difference, is_valid)
    weights = None
    if correction.weighting is not None:
        weights, weight_metrics = _importance_weights(log_ratio, is_valid, correction.weighting)
        metrics |= weight_metrics

    measures = {
        "ratio": log_ratio,
        "diff": difference,
        "k1": -log_ratio,
        "k2": 0.5 * log_ratio.square(),
        "k3": _k3(log_ratio),
    }
    is_kept = is_valid
    for rejection in correction.rejections:
        # each criterion is measured on all valid tokens, not only on those that earlier criteria keep
        statistic = _over(measures[rejection.measure], is_valid, rejection.level)
        passes = _passes(statistic, is_valid, rejection)
        metrics |= _rejection_metrics(statistic, passes, is_valid, rejection)
        is_kept = is_kept & passes

    if correction.rejections:
        metrics |= _masked_fractions("rollout_corr/rollout_rs", is_kept, is_valid)
        metrics["actor/train_infer_final_mask_mean"] = _mean(is_kept, is_valid)
    kept_mask = torch.where(is_kept, response_mask, torch.zeros_like(response_mask))
    return weights, kept_mask, metrics


def _passes(statistic: Tensor, is_valid: Tensor, rejection: Rejection) -> Tensor:
    """Returns (B, T) bool: the tokens that a criterion does not reject."""
    if rejection.level == "batch":
        return _smallest_with_mean(statistic, is_valid, rejection.upper)
    return _is_within(statistic, rejection.lower, rejection.upper)


def _is_within(values: Tensor, lower: float, upper: float) -> Tensor:
    return (values >= lower) & (values <= upper)


def _importance_weights(log_ratio: Tensor, is_valid: Tensor, weighting: Weighting) -> tuple[Tensor, Metrics]:
    """Returns the weights (B, T), 0 at invalid tokens, and their metrics."""
    # bounded once more, because a sum over a row has no bound
    exponent = _over(log_ratio, is_valid, weighting.level).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    raw = torch.where(is_valid, exponent.exp(), 0)
    if weighting.lower is None:
        weights = raw.clamp(max=weighting.upper)
    else:
        is_in_bounds = _is_within(raw, weighting.lower, weighting.upper)
        weights = torch.where(is_in_bounds, raw, 0)
    metrics = _weight_metrics(weights, raw, is_valid, weighting)
    if not weighting.batch_normalize:
        return weights, metrics

    shares = _unit_shares(is_valid, weighting.level)
    factor = _mean(weights, shares).value
    # the mean is NaN if no token is valid, and 0 if all weights are out of bounds
    if not factor > 1e-8:
        factor = 1.0
    metrics["rollout_corr/rollout_is_batch_norm_factor"] = Metric.last(factor)
    return weights / factor, metrics


def keep_rewards(rewards: Tensor, response_mask: Tensor, kept_mask: Tensor) -> Tensor:
    """Moves rewards (B, T) of rejected tokens to the last kept token before them, if there is one.

    Estimators such as gae and reinforce_plus_plus read only rewards under mask 1, and the score of a response is on its
    last token, which may be rejected. The reward-to-go (discount 1) of each kept token does not change.

    Args:
        rewards: (B, T).
        response_mask: (B, T) mask before rejection.
        kept_mask: (B, T) mask after rejection.
    """
    width = rewards.shape[-1]
    positions = torch.arange(width, device=rewards.device).expand_as(rewards)
    is_kept = kept_mask != 0
    # -1 before the first kept token
    kept_positions = torch.where(is_kept, positions, -1)
    last_kept = kept_positions.cummax(dim=-1).values

    is_rejected = (response_mask != 0) & ~is_kept
    is_moved = is_rejected & (last_kept >= 0)
    new_positions = torch.where(is_moved, last_kept, positions)
    # a sum, because rewards of several rejected tokens can move to one position
    return torch.zeros_like(rewards).scatter_add(-1, new_positions, rewards)


# --------------------------------------------------------------------------------------------- aggregation by level


def _over(values: Tensor, is_valid: Tensor, level: str) -> Tensor:
    """Aggregates values (B, T) by `level`: the token itself, or the mean, sum or maximum of its segment or row.

    Args:
        values: (B, T), 0 at invalid tokens.
        is_valid: (B, T) bool.
        level: token, segment, seq_mean, seq_sum, seq_max or batch.

    Returns:
        (B, T): at each valid token the aggregate of its token, segment or row; 0 elsewhere.
    """
    match level:
        case "token" | "batch":
            # the criterion `batch` compares the tokens of all rows, see `_smallest_with_mean`
            return values
        case "segment":
            return compute_segment_masked_mean(values, is_valid)
        case "seq_max":
            rows = torch.where(is_valid, values, -torch.inf).amax(dim=-1, keepdim=True)
        case "seq_sum":
            rows = values.sum(dim=-1, keepdim=True)
        case _:  # seq_mean
            lengths = is_valid.sum(dim=-1, keepdim=True)
            rows = values.sum(dim=-1, keepdim=True) / lengths.clamp(min=1)
    return torch.where(is_valid, rows, 0)


def _smallest_with_mean(values: Tensor, is_valid: Tensor, bound: float) -> Tensor:
    """Returns (B, T) bool: the largest set of valid tokens with the smallest values whose mean is at most `bound`."""
    ascending, order = values[is_valid].double().sort()
    num_valid = len(ascending)
    counts = torch.arange(1, num_valid + 1, device=values.device)
    means = ascending.cumsum(0) / counts

    # the means of the smallest values are ascending, too
    num_passing = int((means <= bound).sum())
    passes = torch.zeros_like(order, dtype=torch.bool)
    smallest = order[:num_passing]
    passes[smallest] = True
    return torch.zeros_like(is_valid).masked_scatter(is_valid, passes)


def _unit_shares(is_valid: Tensor, level: str) -> Tensor:
    """Returns weights of the tokens (B, T) with which a mean counts each token, segment or row, by `level`, once."""
    if level in ("token", "batch"):
        return is_valid
    if level == "segment":
        # the mean of a segment with a single 1 is 1 / its length
        first_tokens = run_starts(is_valid).double()
        return compute_segment_masked_mean(first_tokens, is_valid)
    lengths = is_valid.sum(dim=-1, keepdim=True)
    # a row without a valid token divides by 0 here, and has no share
    return torch.where(is_valid, 1 / lengths.double(), 0)


# ---------------------------------------------------------------------------------------------------- metrics


def rollout_probs_diff(log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, Metric]:
    """Returns training/rollout_probs_diff_{mean,max}: |exp(trainer) - exp(rollout)| over valid tokens.

    All arguments are (B, R). log_probs: the trainer's log-probs before the update.
    """
    is_valid = response_mask.bool()
    num_tokens = is_valid.sum()
    distance = (log_probs.exp() - rollout_log_probs.exp()).abs()
    # masked tokens are 0, which is never above the maximum of distances
    distance = torch.where(is_valid, distance, 0).double()
    return {
        "training/rollout_probs_diff_mean": Metric.mean(distance.sum(), num_tokens),
        "training/rollout_probs_diff_max": Metric.max(distance.amax(), num_tokens),
    }


@torch.no_grad()
def mismatch_metrics(log_probs: Tensor, rollout_log_probs: Tensor | None, response_mask: Tensor) -> dict[str, Metric]:
    """Returns verl's metrics rollout_corr/* of the distance between the trainer's and the rollout's policy.

    All arguments are (B, T). Without rollout_log_probs, returns only training_ppl and training_log_ppl, as verl's
    `compute_offpolicy_metrics` does.

    With x = log_probs - rollout_log_probs within +-20, n the tokens of a row:
      kl, k3_kl                        mean over tokens of -x, of e^x - 1 - x: estimates of KL(rollout || trainer)
      chi2_token, chi2_seq             mean of e^(2x) - 1 over tokens; of e^(2 sum x) - 1 over rows
      {training,rollout}_ppl, _log_ppl mean over rows of e^(-mean log-prob), of -mean log-prob
      log_ppl_diff{,_max,_min}, log_ppl_abs_diff, ppl_ratio   mean over rows of d = -sum x / n, extremes, |d|, e^d
    Rows without a valid token are excluded (verl counts them as perplexity 1).
    """
    is_valid = response_mask != 0
    lengths = is_valid.sum(dim=-1)
    num_tokens = lengths.sum()
    has_token = lengths > 0
    num_rows = has_token.sum()

    training_log_ppl = _log_perplexities(log_probs, is_valid)
    by_row = {"training_ppl": training_log_ppl.exp(), "training_log_ppl": training_log_ppl}
    by_token: dict[str, Tensor] = {}
    extremes: dict[str, Metric] = {}
    if rollout_log_probs is not None:
        log_ratio = masked_log_ratio(log_probs, rollout_log_probs, response_mask)
        by_token["kl"] = -log_ratio
        by_token["k3_kl"] = _k3(log_ratio)
        by_token["chi2_token"] = (2 * log_ratio).expm1()

        by_row |= _row_mismatch(log_ratio, rollout_log_probs, is_valid)
        log_ppl_diff = by_row["log_ppl_diff"]
        # rows without a token are neither the largest nor the smallest
        largest = torch.where(has_token, log_ppl_diff, -torch.inf).amax()
        smallest = torch.where(has_token, log_ppl_diff, torch.inf).amin()
        extremes["rollout_corr/log_ppl_diff_max"] = Metric.max(largest, num_rows)
        extremes["rollout_corr/log_ppl_diff_min"] = Metric.min(smallest, num_rows)

    metrics = {}
    for name, values in by_token.items():
        total = values.sum(dtype=torch.float64)
        metrics[f"rollout_corr/{name}"] = Metric.mean(total, num_tokens)
    for name, values in by_row.items():
        total = torch.where(has_token, values, 0).sum()
        metrics[f"rollout_corr/{name}"] = Metric.mean(total, num_rows)
    return metrics | extremes


def _row_mismatch(log_ratio: Tensor, rollout_log_probs: Tensor, is_valid: Tensor) -> dict[str, Tensor]:
    """Returns the values of each row, (B,), whose means are the metrics of these names."""
    rollout_log_ppl = _log_perplexities(rollout_log_probs, is_valid)
    # the sum is bounded as the ratio of a token is
    ratio_sums = _row_sums(log_ratio, is_valid)
    bounded_sums = ratio_sums.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    log_ppl_diff = _log_perplexities(log_ratio, is_valid)
    return {
        "rollout_ppl": rollout_log_ppl.exp(),
        "rollout_log_ppl": rollout_log_ppl,
        "log_ppl_diff": log_ppl_diff,
        "log_ppl_abs_diff": log_ppl_diff.abs(),
        "ppl_ratio": log_ppl_diff.exp(),
        "chi2_seq": (2 * bounded_sums).expm1(),
    }


def _log_perplexities(log_probs: Tensor, is_valid: Tensor) -> Tensor:
    """Returns minus the mean of each row, in fp64: (B,); 0 for a row without a valid token."""
    lengths = is_valid.sum(dim=-1).clamp(min=1)
    return -_row_sums(log_probs, is_valid) / lengths


def _k3(log_ratio: Tensor) -> Tensor:
    """Returns Schulman's estimate e^x - 1 - x of KL(rollout || trainer) at each token."""
    return log_ratio.expm1() - log_ratio


def _mean(values: Tensor, shares: Tensor) -> Metric:
    """Returns the mean over tokens, weighted by `shares`, which are 0 at invalid tokens."""
    total = (values * shares).sum(dtype=torch.float64)
    count = shares.sum(dtype=torch.float64)
    return Metric.mean(float(total), float(count))


def _row_sums(values: Tensor, is_valid: Tensor) -> Tensor:
    """Returns the sum over the valid tokens of each row, in fp64: (B,)."""
    return masked_values(values, is_valid).sum(dim=-1, dtype=torch.float64)


def _row_means(values: Tensor, is_valid: Tensor) -> Tensor:
    """Returns the mean of each row with a valid token, in fp64: (number of such rows,)."""
    lengths = is_valid.sum(dim=-1)
    has_token = lengths > 0
    totals = _row_sums(values, is_valid)
    return totals[has_token] / lengths[has_token]


def _share(chosen: Tensor) -> Metric:
    """Returns the share of True values in `chosen`, (rows,) bool."""
    return Metric.mean(float(chosen.sum()), len(chosen))


def _weight_metrics(weights: Tensor, raw: Tensor, is_valid: Tensor, weighting: Weighting) -> Metrics:
    """Returns verl's metrics rollout_corr/rollout_is_* of the weights before batch normalisation.

    Means, standard deviations and extremes are of the weights after they were bounded. The fractions count weights
    above `upper` and below `lower` (default 1 / upper) before that. If a row has a single weight, the maximum and
    minimum over tokens are also of the weights before, as in verl 0.9.1 (rollout_corr_helper.py, lines 704 to 738).
    """
    if not is_valid.any():
        return {}
    prefix = "rollout_corr/rollout_is"
    upper = weighting.upper
    lower = weighting.lower
    if lower is None:
        lower = 1 / upper
    extremes = weights
    if weighting.level in ("seq_mean", "seq_sum"):
        # verl takes the extremes of one weight per row before it bounds them
        extremes = raw
    metrics = _distribution(prefix, weights, extremes, is_valid, bounds=(0.0, upper), ideal=1.0)
    metrics |= _fractions(prefix, "_ratio", raw, is_valid, weighting.level, (lower, upper))
    is_above = raw > upper
    metrics["actor/is_weight_clipfrac"] = _mean(is_above, is_valid)

    # the effective share of the tokens, (sum w)^2 / (n sum w^2): 1 if all weights are equal
    mean = _mean(weights, is_valid).value
    mean_square = _mean(weights.square(), is_valid).value
    effective_size = 0.0
    if mean_square:
        effective_size = mean * mean / mean_square
    metrics[f"{prefix}_eff_sample_size"] = Metric.last(effective_size)
    if weighting.lower is not None:
        is_out_of_bounds = (raw < lower) | is_above
        metrics[f"{prefix}_oob_ratio"] = _mean(is_out_of_bounds, is_valid)
    return metrics


def _rejection_metrics(statistic: Tensor, passes: Tensor, is_valid: Tensor, rejection: Rejection) -> Metrics:
    """Returns verl's metrics rollout_corr/rollout_rs_<option>_*, in the statistic's unit (log for k1 and ratio)."""
    if not is_valid.any():
        return {}
    prefix = f"rollout_corr/rollout_rs_{rejection.name}"
    bounds = (rejection.lower, rejection.upper)
    metrics = _distribution(prefix, statistic, statistic, is_valid, bounds, ideal=0.0)
    metrics |= _fractions(prefix, "", statistic, is_valid, rejection.level, bounds)
    if rejection.measure in ("ratio", "diff"):
        name = f"actor/train_infer_{ROLL_LEVELS[rejection.level]}_{rejection.measure}_mask_mean"
        metrics[name] = _mean(passes, is_valid)
    return metrics | _masked_fractions(prefix, passes, is_valid)


def _distribution(
    prefix: str, values: Tensor, extremes: Tensor, is_valid: Tensor, bounds: tuple[float, float], ideal: float
) -> Metrics:
    """Returns mean, standard deviation and extremes over tokens, and the same of the rows' means.

    The standard deviation over tokens is that of the values clamped to `bounds`. Maximum and minimum over tokens are
    taken from `extremes`.
    """
    bounded_values = values[is_valid].double().clamp(*bounds)
    token_std = bounded_values.std(correction=0)
    valid_extremes = extremes[is_valid]

    by_row = _row_means(values, is_valid)
    num_rows = len(by_row)
    row_deviations = (by_row - ideal).abs()
    row_std = 0.0
    if num_rows > 1:
        row_std = float(by_row.std())
    return {
        f"{prefix}_mean": _mean(values, is_valid),
        f"{prefix}_std": Metric.last(float(token_std)),
        f"{prefix}_max": Metric.max(float(valid_extremes.max())),
        f"{prefix}_min": Metric.min(float(valid_extremes.min())),
        f"{prefix}_seq_mean": Metric.mean(float(by_row.sum()), num_rows),
        f"{prefix}_seq_std": Metric.last(row_std),
        f"{prefix}_seq_max": Metric.max(float(by_row.max())),
        f"{prefix}_seq_min": Metric.min(float(by_row.min())),
        f"{prefix}_seq_max_deviation": Metric.max(float(row_deviations.max())),
    }


def _fractions(
    prefix: str, infix: str, values: Tensor, is_valid: Tensor, level: str, bounds: tuple[float, float]
) -> Metrics:
    """Returns the shares of values above and below the bounds, per unit of `level`, and of the rows' means."""
    lower, upper = bounds
    shares = _unit_shares(is_valid, level)
    by_row = _row_means(values, is_valid)
    return {
        f"{prefix}{infix}_fraction_high": _mean(values > upper, shares),
        f"{prefix}{infix}_fraction_low": _mean(values < lower, shares),
        f"{prefix}_seq_fraction_high": _share(by_row > upper),
        f"{prefix}_seq_fraction_low": _share(by_row < lower),
    }


def _masked_fractions(prefix: str, is_kept: Tensor, is_valid: Tensor) -> Metrics:
    """Returns the share of rejected tokens, and of rows with a rejected token."""
    is_rejected = is_valid & ~is_kept
    has_token = is_valid.any(dim=-1)
    has_rejected_token = is_rejected.any(dim=-1)
    return {
        f"{prefix}_masked_fraction": _mean(is_rejected, is_valid),
        f"{prefix}_seq_masked_fraction": _share(has_rejected_token[has_token]),
    }


def _train_infer_metrics(log_ratio: Tensor, difference: Tensor, is_valid: Tensor) -> Metrics:
    """Returns ROLL's actor/train_infer_{ratio,diff}_{token,segment,geometric,sequence}_mean: means of row means."""
    lengths = is_valid.sum(dim=-1)
    # of the rows with a token, as `_row_means` returns them
    lengths = lengths[lengths > 0]
    mean_ratio = _row_means(log_ratio, is_valid)
    mean_diff = _row_means(difference, is_valid)
    segment_ratio = compute_segment_masked_mean(log_ratio, is_valid).exp()
    by_row = {
        "ratio_token": _row_means(log_ratio.exp(), is_valid),
        "ratio_segment": _row_means(segment_ratio, is_valid),
        "ratio_geometric": mean_ratio.exp(),
        "ratio_sequence": (mean_ratio * lengths).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(),
        "diff_token": mean_diff,
        # the token-weighted mean over a row's segments is the row's mean
        "diff_segment": mean_diff,
        "diff_geometric": mean_diff,
        "diff_sequence": mean_diff * lengths,
    }
    metrics = {}
    for name, row_means in by_row.items():
        metrics[f"actor/train_infer_{name}_mean"] = Metric.mean(float(row_means.sum()), len(row_means))
    return metrics
