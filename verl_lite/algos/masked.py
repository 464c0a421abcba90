"""Sums, means and scans over masked tokens, over runs of tokens and over groups of rows.

Shapes are (B, T) unless stated otherwise; `mask` is nonzero at valid tokens. A value under mask 0, even NaN, affects
neither result nor gradient. Values below fp32, including integers, are summed and returned as fp32. Groups are dense
numbers (B,) from `group_ids`. Group statistics are in fp64 and take row weights, so that a row without a valid token
can be excluded.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

Count = int | float | Tensor
LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: larger ratios carry no information and soon overflow
Labels = np.ndarray | Tensor | list[Any]
"""Labels (B,), one for each row, of any hashable type."""

# ---------------------------------------------------------------------------------------------------- arguments


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Converts to fp32 unless the tensor is fp64: bf16 cannot count past 256, and integers do not divide exactly."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def check_shapes(name: str, **tensors: Tensor | None) -> None:
    """Raises ValueError, naming the argument, if a tensor is None, not (B, T), or shaped unlike the first tensor."""
    first: tuple[str, torch.Size] | None = None
    for argument, tensor in tensors.items():
        if tensor is None:
            raise ValueError(f"{name}: {argument} is missing; a (B, T) tensor is expected.")
        if first is None:
            first = (argument, tensor.shape)
        if tensor.dim() != 2 or tensor.shape != first[1]:
            raise ValueError(
                f"{name}: {argument} has shape {tuple(tensor.shape)}, expected (B, T) as {first[0]}, {tuple(first[1])}."
            )


def check_rows(name: str, rows: int, **labels: Labels | None) -> None:
    """Raises ValueError, naming the argument, if labels are None or not one label for each of `rows` rows."""
    for argument, column in labels.items():
        if column is None:
            raise ValueError(f"{name}: {argument} is missing; (B,) labels, one for each row, are expected.")
        if len(column) != rows or (not isinstance(column, list) and column.ndim != 1):
            shape = [len(column)] if isinstance(column, list) else list(column.shape)
            raise ValueError(f"{name}: {argument} has shape {shape}, expected one label for each of {rows} rows.")


# ---------------------------------------------------------------------------------------------------- whole batch


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Returns the sum of the values under a nonzero mask. Other values, even NaN, affect no result and no gradient."""
    kept = torch.where(mask.bool(), at_least_fp32(values), 0)
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Returns the mean of the values under a nonzero mask; 0 if there are none (denominator + 1e-8, as in verl)."""
    count = mask.bool().sum() if axis is None else mask.bool().sum(dim=axis)
    return masked_sum(values, mask, axis) / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Returns the variance of the values under a nonzero mask, with Bessel's correction unless `unbiased` is false.

    Raises ValueError if the mask keeps fewer than two values (fewer than one without the correction).
    """
    count = int(mask.bool().sum())
    if count < 1 + unbiased:
        raise ValueError(f"masked_var: the mask keeps {count} values; a variance needs at least {1 + unbiased}.")
    centred = at_least_fp32(values) - masked_mean(values, mask)
    return masked_sum(centred**2, mask) / (count - unbiased)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scales values to variance 1 over the mask and, if `shift_mean`, shifts them to mean 0.

    The result is not masked. Raises ValueError if the mask keeps fewer than two values.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def masked_normalize(values: Tensor, mask: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Shifts each row (along `dim`) to mean 0 and scales it to variance 1 over its mask; 0 under mask 0. (ROLL)

    Uses the biased variance, clamped to at least `eps`. A row whose mask is all 0 becomes 0.
    """
    is_valid = mask.bool()
    kept = torch.where(is_valid, at_least_fp32(values), 0)
    count = is_valid.sum(dim=dim, keepdim=True).clamp(min=1)
    centred = torch.where(is_valid, kept - kept.sum(dim=dim, keepdim=True) / count, 0)
    variance = centred.square().sum(dim=dim, keepdim=True) / count
    return centred * torch.rsqrt(variance.clamp(min=eps))


def compute_clip_fraction(values: Tensor, clip_max: float, clip_min: float) -> float:
    """Returns the share of values, padding included, above `clip_max` or below `clip_min`; 0 for no values. (ROLL)"""
    beyond = (values > clip_max) | (values < clip_min)
    return float(beyond.sum()) / max(1, values.numel())


def whiten_or_keep(values: Tensor, mask: Tensor) -> Tensor:
    """Whitens values like `masked_whiten` and masks them; fewer than two valid values stay unchanged (as in ROLL).

    A step in which nearly all rewards failed can thus continue; verl raises an error. The result has no gradient.
    """
    is_valid = mask.bool()
    kept = torch.where(is_valid, at_least_fp32(values.detach()), 0)
    count = int(is_valid.sum())
    if count > 1:
        kept.sub_(kept.sum(dtype=torch.float64) / count).masked_fill_(~is_valid, 0)
        variance = torch.linalg.vector_norm(kept, dtype=torch.float64) ** 2 / (count - 1)
        kept.mul_(torch.rsqrt(variance + 1e-8))
    return kept


# ---------------------------------------------------------------------------------------------------- log-ratios


def bounded_log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Returns log_prob - old_log_prob clamped to +-20, for log-probs that are already masked."""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def masked_log_ratio(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Returns log_prob - old_log_prob clamped to +-20, and 0 under mask 0, where NaN thus has no gradient."""
    difference = at_least_fp32(log_prob) - at_least_fp32(old_log_prob)
    log_ratio = torch.where(response_mask.bool(), difference, 0)
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


# ---------------------------------------------------------------------------------------------------- along a row


def backward_scan(factors: Tensor, values: Tensor) -> Tensor:
    """Computes x_t = values_t + factors_t x_(t+1) from the last column (where x_(t+1) = 0) to the first.

    values: (B, T). factors: (B, T), or () for a common factor. Not differentiable. The scan runs over contiguous
    columns, with one multiply-add over all rows per step.
    """
    columns = at_least_fp32(values.detach()).t().clone(memory_format=torch.contiguous_format)
    steps = factors.to(columns.dtype)
    steps = steps.t().contiguous() if steps.dim() else steps.expand(len(columns))
    for t in range(len(columns) - 2, -1, -1):
        columns[t].addcmul_(steps[t], columns[t + 1])
    return columns.t().contiguous()


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float, *, count_gaps: bool = False) -> Tensor:
    """Computes returns G_t = r_t + gamma G_next, (B, T), 0 under mask 0. Rewards under mask 0 are not read.

    "next" is the next valid token: an environment's tokens between two turns carry G through undiscounted, as in verl
    0.9.1. With `count_gaps` every column is a discounted step (ROLL).
    """
    is_valid = mask.bool()
    kept = torch.where(is_valid, at_least_fp32(rewards), 0)
    if gamma == 1:
        return kept.flip(-1).cumsum(dim=-1).flip(-1).masked_fill_(~is_valid, 0)
    discount = kept.new_tensor(gamma)
    factors = discount if count_gaps else torch.where(is_valid, discount, kept.new_ones(()))
    return backward_scan(factors, kept).masked_fill_(~is_valid, 0)


def compute_segment_masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns, at every token of each run of consecutive valid tokens, the mean over that run; 0 elsewhere.

    values, mask: (B, T) -> (B, T), differentiable. An assistant turn is one run, so for log-ratios the result is GSPO's
    length-normalised log-ratio per turn (ROLL's name and semantics).
    """
    is_valid, values = mask.bool(), at_least_fp32(values)
    starts = is_valid & ~torch.nn.functional.pad(is_valid, (1, 0))[:, :-1]
    runs = starts.cumsum(dim=-1)  # 0 before the first run; tokens between runs add 0 to the preceding run
    zeros = values.new_zeros(len(values), values.shape[-1] + 1)
    totals = zeros.scatter_add(1, runs, torch.where(is_valid, values, 0))
    counts = zeros.scatter_add(1, runs, is_valid.to(values.dtype))
    return torch.where(is_valid, (totals / counts.clamp(min=1)).gather(1, runs), 0)


# ---------------------------------------------------------------------------------------------------- groups of rows


def label_list(labels: Labels) -> list[Any]:
    """Converts labels to Python objects, so that equal labels compare and hash equal (tensors do not)."""
    if isinstance(labels, np.ndarray | Tensor):
        return labels.tolist()
    return [label.item() if isinstance(label, Tensor) else label for label in labels]


def group_ids(index: Labels, device: torch.device) -> tuple[Tensor, int]:
    """Returns dense group numbers (B,) int64 in 0..G-1 for labels of any hashable type (such as uids), and G."""
    labels = label_list(index)
    numbers: dict[Any, int] = {}
    ids = [numbers.setdefault(label, len(numbers)) for label in labels]
    return torch.tensor(ids, dtype=torch.int64, device=device), len(numbers)


def group_sum(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Returns the sum of the rows of each group: (B, ...) -> (G, ...)."""
    return values.new_zeros(num_groups, *values.shape[1:]).index_add(0, groups, values)


def group_mean_std(scores: Tensor, groups: Tensor, num_groups: int, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, standard deviation (Bessel) and row count of each group as three (G,) tensors in fp64.

    scores, groups, weights: (B,); weight 1 includes a row, 0 excludes it. The two-pass computation is exact enough for
    rewards that differ in the seventh digit. A group of fewer than two rows has mean 0 and std 1.
    """
    scores, weights = scores.double(), weights.double()
    counts = group_sum(weights, groups, num_groups)
    single = counts < 2
    means = group_sum(scores * weights, groups, num_groups) / counts.clamp(min=1)
    squares = group_sum((scores - means[groups]) ** 2 * weights, groups, num_groups)
    stds = (squares / (counts - 1).clamp(min=1)).sqrt()
    return means.masked_fill(single, 0.0), stds.masked_fill(single, 1.0), counts


def group_top_two(scores: Tensor, groups: Tensor, num_groups: int, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the best row (G,) int64, its score (G,) and the second-best score (G,) of each group, using two sorts.

    scores, groups: (B,); valid: (B,) bool. A score is -inf if the group has no valid row, or no second valid row. The
    earlier of two rows with equal scores is the best.
    """
    ranked = torch.where(valid, scores.double(), -math.inf)
    by_score = torch.argsort(ranked, descending=True, stable=True)
    order = by_score[torch.argsort(groups[by_score], stable=True)]
    counts = torch.bincount(groups, minlength=num_groups)
    starts = counts.cumsum(0) - counts
    first, following = order[starts], order[(starts + 1).clamp(max=len(order) - 1)]
    second = torch.where(counts > 1, ranked[following], -math.inf)
    return first, ranked[first], second


class RunningMoments:
    """Running mean and standard deviation over all batches, merged batch by batch (Chan et al. 1979; ROLL, trlx).

    Attributes before the first update: mean 0, std 1, var 1 (biased), count 0.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.std = 1.0
        self.var = 1.0
        self.count = 0.0

    def update(self, xs: Tensor) -> tuple[float, float]:
        """Adds the values of a batch, of any shape, and returns the batch's own (mean, unbiased std).

        The std of a single value is 1 (ROLL: NaN), both for the batch and for the running std. An empty batch changes
        nothing and returns the running mean and std. Computed in fp64.
        """
        values = xs.detach().double().flatten()
        number = values.numel()
        if number == 0:
            return self.mean, self.std
        batch_mean = float(values.mean())
        batch_var = float(((values - batch_mean) ** 2).mean())
        total = self.count + number
        delta = batch_mean - self.mean
        squares = self.var * self.count + delta**2 * self.count * number / total + batch_var * number
        self.mean += delta * number / total
        self.var, self.count = squares / total, total
        self.std = math.sqrt(squares / (total - 1)) if total > 1 else 1.0
        return batch_mean, math.sqrt(batch_var * number / (number - 1)) if number > 1 else 1.0

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "std": self.std, "var": self.var, "count": self.count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean, self.std, self.var, self.count = (state[name] for name in ("mean", "std", "var", "count"))


# ---------------------------------------------------------------------------------------------------- aggregation

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Aggregates token losses to a scalar, by one of the modes below.

    With loss l, mask m, N = batch_num_tokens, S = global_batch_size, and sums over the rows of the arguments:
      token-mean                sum(l m) / N
      token-sum                 sum(l m)
      seq-mean-token-sum        sum over rows of sum_t(l m) / S
      seq-mean-token-mean       sum over rows of (sum_t(l m) / sum_t m) / S
      seq-mean-token-sum-norm   as seq-mean-token-sum, divided by loss_scale_factor (default: the width of the mask)
    The result is multiplied by dp_size, which cancels a mean of gradients over data-parallel ranks; pass 1 if gradients
    are summed.

    loss_mat, loss_mask: (B, T). N and S count the valid tokens, and the sequences with at least one, of the whole
    mini-batch on all ranks; a part without tokens then has loss 0. If N or S is None, it is counted from loss_mask,
    which is correct only for a whole mini-batch; that raises ValueError if dp_size > 1 or the mask keeps nothing. Also
    raises ValueError for different shapes, an unknown mode, and a loss_scale_factor that is not above 0.
    """
    check_shapes("agg_loss", loss_mat=loss_mat, loss_mask=loss_mask)
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(f"Invalid loss_agg_mode: {loss_agg_mode!r}. Expected one of {', '.join(LOSS_AGG_MODES)}.")
    if loss_scale_factor is not None and loss_scale_factor <= 0:
        raise ValueError(f"agg_loss: loss_scale_factor={loss_scale_factor}: a number above 0 is expected, or None.")
    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, loss_mask) * dp_size
    is_valid = loss_mask.bool()
    lengths = is_valid.sum(dim=-1, dtype=torch.int32)
    if loss_agg_mode == "token-mean":
        tokens = _denominator("batch_num_tokens", batch_num_tokens, lengths.sum(), dp_size, loss_agg_mode)
        return masked_sum(loss_mat, is_valid) / tokens * dp_size
    sequences = _denominator("global_batch_size", global_batch_size, (lengths > 0).sum(), dp_size, loss_agg_mode)
    rows = masked_sum(loss_mat, is_valid, axis=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        rows = rows / lengths.clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        rows = rows / (loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return rows.sum() / sequences * dp_size


def _denominator(name: str, given: Count | None, counted: Tensor, dp_size: int, mode: str) -> Count:
    if given is None:
        if dp_size > 1:
            raise ValueError(
                f"agg_loss: loss_agg_mode={mode!r} with dp_size={dp_size} needs {name}, counted over the whole "
                "mini-batch on all ranks before it is split; this rank's own count would weigh its tokens wrongly."
            )
        if not counted:
            raise ValueError(
                f"agg_loss: loss_mask keeps no token and {name} is not given: loss_agg_mode={mode!r} is a mean over "
                f"nothing. For a part of a mini-batch give {name}, counted over the whole."
            )
        return counted
    return given.clamp(min=1) if isinstance(given, Tensor) else max(given, 1)
