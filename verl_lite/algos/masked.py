"""Sums, means and scans over masked tokens, over runs of tokens and over groups of rows.

Shapes are (B, T) unless stated otherwise; `mask` is nonzero at valid tokens. A value under mask 0, even NaN, affects
neither result nor gradient. Values below fp32, including integers, are summed and returned as fp32. Groups are dense
numbers (B,) from `group_ids`. Group statistics are in fp64 and take row weights, so that a row without a valid token
can be excluded.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

Count = int | float | Tensor
# exp(20) = 4.9e8: larger ratios carry no information and soon overflow
LOG_RATIO_BOUND = 20.0
Labels = np.ndarray | Tensor | Sequence[Hashable]
"""Labels (B,), one for each row, of any hashable type."""

# ---------------------------------------------------------------------------------------------------- arguments


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Converts to fp32 unless the tensor is fp64: bf16 cannot count past 256, and integers do not divide exactly."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def masked_values(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the values in at least fp32, in a new tensor that is 0 under mask 0, also where a value is NaN."""
    # not a product with the mask, because 0 * NaN is NaN, in the gradient too
    return torch.where(mask.bool(), at_least_fp32(values), 0)


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
        shape = list(column.shape) if isinstance(column, np.ndarray | Tensor) else [len(column)]
        if shape != [rows]:
            raise ValueError(f"{name}: {argument} has shape {shape}, expected one label for each of {rows} rows.")


# ---------------------------------------------------------------------------------------------------- whole batch


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Returns the sum of the values under a nonzero mask. Other values, even NaN, affect no result and no gradient."""
    valid_values = masked_values(values, mask)
    return valid_values.sum() if axis is None else valid_values.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Returns the mean of the values under a nonzero mask; 0 if there are none (denominator + 1e-8, as in verl)."""
    is_valid = mask.bool()
    count = is_valid.sum() if axis is None else is_valid.sum(dim=axis)
    return masked_sum(values, is_valid, axis) / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Returns the variance of the values under a nonzero mask, with Bessel's correction unless `unbiased` is false.

    Raises ValueError if the mask keeps fewer than two values (fewer than one without the correction).
    """
    count = int(mask.bool().sum())
    correction = 1 if unbiased else 0
    if count < 1 + correction:
        raise ValueError(f"masked_var: the mask keeps {count} values; a variance needs at least {1 + correction}.")
    centred = at_least_fp32(values) - masked_mean(values, mask)
    return masked_sum(centred**2, mask) / (count - correction)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scales values to variance 1 over the mask and, if `shift_mean`, shifts them to mean 0.

    The result is not masked. Raises ValueError if the mask keeps fewer than two values.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return whitened


def masked_normalize(values: Tensor, mask: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Shifts each row (along `dim`) to mean 0 and scales it to variance 1 over its mask; 0 under mask 0. (ROLL)

    Uses the biased variance, clamped to at least `eps`. A row whose mask is all 0 becomes 0.
    """
    is_valid = mask.bool()
    valid_values = masked_values(values, is_valid)
    count = is_valid.sum(dim=dim, keepdim=True).clamp(min=1)
    mean = valid_values.sum(dim=dim, keepdim=True) / count
    centred = torch.where(is_valid, valid_values - mean, 0)
    variance = centred.square().sum(dim=dim, keepdim=True) / count
    return centred * torch.rsqrt(variance.clamp(min=eps))


def compute_clip_fraction(values: Tensor, clip_max: float, clip_min: float) -> float:
    """Returns the fraction of entries outside [clip_min, clip_max]; 0 for no entries. Counts padding, as ROLL does."""
    is_outside = (values > clip_max) | (values < clip_min)
    return float(is_outside.sum()) / max(1, values.numel())


def whiten_or_keep(values: Tensor, mask: Tensor) -> Tensor:
    """Whitens values like `masked_whiten` and masks them; fewer than two valid values stay unchanged (as in ROLL).

    A step in which nearly all rewards failed can thus continue; verl raises an error. The result has no gradient.
    """
    is_valid = mask.bool()
    valid_values = masked_values(values.detach(), is_valid)
    count = int(is_valid.sum())
    if count < 2:
        return valid_values

    mean = valid_values.sum(dtype=torch.float64) / count
    centred = valid_values.sub_(mean).masked_fill_(~is_valid, 0)
    # the norm sums in fp64 without a copy of all values in fp64
    variance = torch.linalg.vector_norm(centred, dtype=torch.float64) ** 2 / (count - 1)
    return centred.mul_(torch.rsqrt(variance + 1e-8))


# ---------------------------------------------------------------------------------------------------- log-ratios


def bounded_log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Returns log_prob - old_log_prob clamped to +-20, for log-probs that are already masked."""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def masked_log_ratio(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Returns log_prob - old_log_prob clamped to +-20, and 0 under mask 0, where NaN thus has no gradient."""
    return bounded_log_ratio(masked_values(log_prob, response_mask), masked_values(old_log_prob, response_mask))


# ---------------------------------------------------------------------------------------------------- along a row


def backward_scan(factors: Tensor, values: Tensor) -> Tensor:
    """Computes x_t = values_t + factors_t x_(t+1) from the last column (where x_(t+1) = 0) to the first.

    values: (B, T). factors: (B, T), or () for a common factor. Not differentiable. The scan runs over contiguous
    columns, with one multiply-add over all rows per step.
    """
    # always a copy, because the scan writes into it
    columns = at_least_fp32(values.detach()).t().clone(memory_format=torch.contiguous_format)
    factors_at = factors.to(columns.dtype)
    if factors_at.dim() == 0:
        factors_at = factors_at.expand(len(columns))
    else:
        factors_at = factors_at.t().contiguous()
    # the last column is its own result
    for t in reversed(range(len(columns) - 1)):
        columns[t].addcmul_(factors_at[t], columns[t + 1])
    return columns.t().contiguous()


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float, *, count_gaps: bool = False) -> Tensor:
    """Computes returns G_t = r_t + gamma G_next, (B, T), 0 under mask 0. Rewards under mask 0 are not read.

    "next" is the next valid token: an environment's tokens between two turns carry G through undiscounted, as in verl
    0.9.1. With `count_gaps` every column is a discounted step (ROLL).
    """
    is_valid = mask.bool()
    valid_rewards = masked_values(rewards, is_valid)
    if gamma == 1:
        # gaps make no difference without a discount, and a sum is faster than a scan
        returns = valid_rewards.flip(-1).cumsum(dim=-1).flip(-1)
        return torch.where(is_valid, returns, 0)

    factors = valid_rewards.new_tensor(gamma)
    if not count_gaps:
        factors = torch.where(is_valid, factors, valid_rewards.new_ones(()))
    return torch.where(is_valid, backward_scan(factors, valid_rewards), 0)


def row_ends(is_valid: Tensor) -> Tensor:
    """Returns the number of columns up to the last valid token of each row, (B,); 0 for a row without any."""
    positions = torch.arange(1, is_valid.shape[-1] + 1, device=is_valid.device)
    return (positions * is_valid).amax(dim=-1)


def run_starts(is_valid: Tensor) -> Tensor:
    """Returns (B, T) bool: the first token of each run of consecutive valid tokens."""
    is_previous_valid = torch.nn.functional.pad(is_valid, (1, 0))[:, :-1]
    return is_valid & ~is_previous_valid


def compute_segment_masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns, at every token of each run of consecutive valid tokens, the mean over that run; 0 elsewhere.

    values, mask: (B, T) -> (B, T), differentiable. An assistant turn is one run, so for log-ratios the result is GSPO's
    length-normalised log-ratio per turn (ROLL's name and semantics).
    """
    is_valid = mask.bool()
    # number of the run, 0 before the first one; tokens between two runs add 0 to the preceding one
    runs = run_starts(is_valid).cumsum(dim=-1)
    valid_values = masked_values(values, is_valid)
    zeros = valid_values.new_zeros(len(values), values.shape[-1] + 1)
    totals = zeros.scatter_add(1, runs, valid_values)
    counts = zeros.scatter_add(1, runs, is_valid.to(valid_values.dtype))
    means = totals / counts.clamp(min=1)
    return torch.where(is_valid, means.gather(1, runs), 0)


# ---------------------------------------------------------------------------------------------------- groups of rows


def label_list(labels: Labels) -> list[Hashable]:
    """Converts labels to Python objects, so that equal labels compare and hash equal (tensors do not)."""
    if isinstance(labels, np.ndarray | Tensor):
        return labels.tolist()
    return [label.item() if isinstance(label, Tensor) else label for label in labels]


def group_ids(index: Labels, device: torch.device) -> tuple[Tensor, int]:
    """Returns dense group numbers (B,) int64 in 0..G-1 for labels of any hashable type (such as uids), and G."""
    # numbered in the order in which the labels first occur
    numbers: dict[Hashable, int] = {}
    groups = []
    for label in label_list(index):
        groups.append(numbers.setdefault(label, len(numbers)))
    return torch.tensor(groups, dtype=torch.int64, device=device), len(numbers)


def group_sum(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Returns the sum of the rows of each group: (B, ...) -> (G, ...)."""
    return values.new_zeros(num_groups, *values.shape[1:]).index_add(0, groups, values)


def group_mean_std(scores: Tensor, groups: Tensor, num_groups: int, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, standard deviation (Bessel) and row count of each group as three (G,) tensors in fp64.

    scores, groups, weights: (B,); weight 1 includes a row, 0 excludes it. A group of fewer than two rows has mean 0 and
    std 1.
    """
    scores = scores.double()
    weights = weights.double()
    counts = group_sum(weights, groups, num_groups)
    means = group_sum(scores * weights, groups, num_groups) / counts.clamp(min=1)
    # not the difference of two mean squares, which cancels for scores that differ in the seventh digit
    squared_distances = (scores - means[groups]) ** 2
    variances = group_sum(squared_distances * weights, groups, num_groups) / (counts - 1).clamp(min=1)

    is_comparable = counts >= 2
    means = torch.where(is_comparable, means, 0)
    stds = torch.where(is_comparable, variances.sqrt(), 1)
    return means, stds, counts


def order_within_groups(keys: Tensor, groups: Tensor, *, descending: bool = False) -> Tensor:
    """Returns the rows in the order of their groups, and of their keys within a group: (B,) int64.

    keys, groups: (B,). Rows of a group with equal keys keep their order.
    """
    # two stable sorts, because torch sorts by one key
    by_key = torch.argsort(keys, descending=descending, stable=True)
    return by_key[torch.argsort(groups[by_key], stable=True)]


def group_top_two(scores: Tensor, groups: Tensor, num_groups: int, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the best row (G,) int64, its score (G,) and the second-best score (G,) of each group.

    scores, groups: (B,); valid: (B,) bool. A score is -inf if the group has no valid row, or no second valid row. The
    earlier of two rows with equal scores is the best.
    """
    valid_scores = torch.where(valid, scores.double(), -math.inf)
    order = order_within_groups(valid_scores, groups, descending=True)
    sizes = torch.bincount(groups, minlength=num_groups)
    starts = sizes.cumsum(0) - sizes
    best_rows = order[starts]
    # the last group may have one row only, and no row follows it
    next_rows = order[(starts + 1).clamp(max=len(order) - 1)]
    second_scores = torch.where(sizes > 1, valid_scores[next_rows], -math.inf)
    return best_rows, valid_scores[best_rows], second_scores


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
        batch_count = values.numel()
        if batch_count == 0:
            return self.mean, self.std
        batch_mean = float(values.mean())
        batch_var = float(((values - batch_mean) ** 2).mean())
        batch_std = 1.0
        if batch_count > 1:
            batch_std = math.sqrt(batch_var * batch_count / (batch_count - 1))

        # sum of squared distances from the new mean: those of both parts, and of their means
        count = self.count + batch_count
        delta = batch_mean - self.mean
        squares = self.var * self.count + delta**2 * self.count * batch_count / count + batch_var * batch_count
        self.mean += delta * batch_count / count
        self.var = squares / count
        self.count = count
        self.std = math.sqrt(squares / (count - 1)) if count > 1 else 1.0
        return batch_mean, batch_std

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "std": self.std, "var": self.var, "count": self.count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean = state["mean"]
        self.std = state["std"]
        self.var = state["var"]
        self.count = state["count"]


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
    The result is multiplied by dp_size.

    Args:
        loss_mat, loss_mask: (B, T).
        dp_size: number of data-parallel ranks over which gradients are averaged, which this factor cancels; 1 if they
            are summed.
        batch_num_tokens: N, number of valid tokens of the whole mini-batch on all ranks. A part without tokens then has
            loss 0. None: counted from loss_mask, which is correct only for a whole mini-batch.
        global_batch_size: S, number of sequences with a valid token, likewise.

    Raises:
        ValueError: the shapes differ, the mode is unknown, loss_scale_factor is not above 0, or a count that the mode
            needs is None although dp_size is above 1 or the mask is all 0.
    """
    check_shapes("agg_loss", loss_mat=loss_mat, loss_mask=loss_mask)
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(f"Invalid loss_agg_mode: {loss_agg_mode!r}. Expected one of {', '.join(LOSS_AGG_MODES)}.")
    if loss_scale_factor is not None and loss_scale_factor <= 0:
        raise ValueError(f"agg_loss: loss_scale_factor={loss_scale_factor}: a number above 0 is expected, or None.")
    if loss_agg_mode == "token-sum":
        # the only mode without a denominator
        return masked_sum(loss_mat, loss_mask) * dp_size

    is_valid = loss_mask.bool()
    lengths = is_valid.sum(dim=-1, dtype=torch.int32)
    if loss_agg_mode == "token-mean":
        tokens = _denominator("batch_num_tokens", batch_num_tokens, lengths.sum(), dp_size, loss_agg_mode)
        return masked_sum(loss_mat, is_valid) / tokens * dp_size

    sequences = _denominator("global_batch_size", global_batch_size, (lengths > 0).sum(), dp_size, loss_agg_mode)
    row_losses = masked_sum(loss_mat, is_valid, axis=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        row_losses = row_losses / lengths.clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        row_losses = row_losses / (loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return row_losses.sum() / sequences * dp_size


def _denominator(name: str, whole_count: Count | None, own_count: Tensor, dp_size: int, mode: str) -> Count:
    """Returns the count over the whole mini-batch, at least 1, or `own_count` if the arguments are the mini-batch."""
    # at least 1: the loss of a mini-batch without a valid token is 0 and not NaN
    if isinstance(whole_count, Tensor):
        return whole_count.clamp(min=1)
    if whole_count is not None:
        return max(whole_count, 1)
    if dp_size > 1:
        raise ValueError(
            f"agg_loss: loss_agg_mode={mode!r} with dp_size={dp_size} needs {name}, counted over the whole "
            "mini-batch on all ranks before it is split; this rank's own count would weigh its tokens wrongly."
        )
    if not own_count:
        raise ValueError(
            f"agg_loss: loss_mask keeps no token and {name} is not given: loss_agg_mode={mode!r} is a mean over "
            f"nothing. For a part of a mini-batch give {name}, counted over the whole."
        )
    return own_count
