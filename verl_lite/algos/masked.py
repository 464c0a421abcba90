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
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.float()


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
        if isinstance(column, np.ndarray | Tensor):
            # a matrix of `rows` rows has that length, too, and a scalar has none
            shape = list(column.shape)
        else:
            shape = [len(column)]
        if shape != [rows]:
            raise ValueError(f"{name}: {argument} has shape {shape}, expected one label for each of {rows} rows.")


# ---------------------------------------------------------------------------------------------------- whole batch


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Returns the sum of the values under a nonzero mask. Other values, even NaN, affect no result and no gradient."""
    valid_values = masked_values(values, mask)
    if axis is None:
        return valid_values.sum()
    return valid_values.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Returns the mean of the values under a nonzero mask; 0 if there are none (denominator + 1e-8, as in verl)."""
    is_valid = mask.bool()
    if axis is None:
        count = is_valid.sum()
    else:
        count = is_valid.sum(dim=axis)
    total = masked_sum(values, is_valid, axis)
    return total / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Returns the variance of the values under a nonzero mask, with Bessel's correction unless `unbiased` is false.

    Raises ValueError if the mask keeps fewer than two values (fewer than one without the correction).
    """
    count = int(mask.bool().sum())
    correction = 1 if unbiased else 0
    if count < 1 + correction:
        raise ValueError(f"masked_var: the mask keeps {count} values; a variance needs at least {1 + correction}.")
    mean = masked_mean(values, mask)
    centred = at_least_fp32(values) - mean
    sum_of_squares = masked_sum(centred**2, mask)
    return sum_of_squares / (count - correction)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scales values to variance 1 over the mask and, if `shift_mean`, shifts them to mean 0.

    The result is not masked. Raises ValueError if the mask keeps fewer than two values.
    """
    mean = masked_mean(values, mask)
    variance = masked_var(values, mask)
    # 1e-8, as in verl: equal values have variance 0
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return whitened


def masked_normalize(values: Tensor, mask: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Shifts each row (along `dim`) to mean 0 and scales it to variance 1 over its mask; 0 under mask 0. (ROLL)

    Uses the biased variance, clamped to at least `eps`. A row whose mask is all 0 becomes 0.
    """
    is_valid = mask.bool()
    count = is_valid.sum(dim=dim, keepdim=True).clamp(min=1)

    valid_values = masked_values(values, is_valid)
    total = valid_values.sum(dim=dim, keepdim=True)
    mean = total / count

    centred = torch.where(is_valid, valid_values - mean, 0)
    sum_of_squares = centred.square().sum(dim=dim, keepdim=True)
    variance = sum_of_squares / count
    bounded_variance = variance.clamp(min=eps)
    return centred * torch.rsqrt(bounded_variance)


def compute_clip_fraction(values: Tensor, clip_max: float, clip_min: float) -> float:
    """Returns the fraction of entries outside [clip_min, clip_max]; 0 for no entries. Counts padding, as ROLL does."""
    is_above = values > clip_max
    is_below = values < clip_min
    num_outside = float((is_above | is_below).sum())
    return num_outside / max(1, values.numel())


def whiten_or_keep(values: Tensor, mask: Tensor) -> Tensor:
    """Whitens values like `masked_whiten` and masks them; fewer than two valid values stay unchanged (as in ROLL).

    A step in which nearly all rewards failed can thus continue; verl raises an error. The result has no gradient.
    """
    is_valid = mask.bool()
    valid_values = masked_values(values.detach(), is_valid)
    count = int(is_valid.sum())
    if count < 2:
        return valid_values

    # in place, which does not change the argument, because `masked_values` returns a new tensor
    mean = valid_values.sum(dtype=torch.float64) / count
    centred = valid_values.sub_(mean).masked_fill_(~is_valid, 0)
    # the norm sums in fp64 without a copy of all values in fp64
    norm = torch.linalg.vector_norm(centred, dtype=torch.float64)
    variance = norm**2 / (count - 1)
    return centred.mul_(torch.rsqrt(variance + 1e-8))


# ---------------------------------------------------------------------------------------------------- log-ratios


def bounded_log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Returns log_prob - old_log_prob clamped to +-20, for log-probs that are already masked."""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def masked_log_ratio(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Returns log_prob - old_log_prob clamped to +-20, and 0 under mask 0, where NaN thus has no gradient."""
    valid_log_prob = masked_values(log_prob, response_mask)
    valid_old_log_prob = masked_values(old_log_prob, response_mask)
    return bounded_log_ratio(valid_log_prob, valid_old_log_prob)


# ---------------------------------------------------------------------------------------------------- along a row


def backward_scan(factors: Tensor, values: Tensor) -> Tensor:
    """Computes x_t = values_t + factors_t x_(t+1) from the last column (where x_(t+1) = 0) to the first.

    The scan runs over contiguous columns, with one multiply-add over all rows per step. It is not differentiable.

    Args:
        factors: (B, T), or () for a common factor.
        values: (B, T).

    Returns:
        x, (B, T).
    """
    constants = at_least_fp32(values.detach())
    # always a copy, because the scan writes into it
    columns = constants.t().clone(memory_format=torch.contiguous_format)

    factors_at = factors.to(columns.dtype)
    if factors_at.dim() == 0:
        factors_at = factors_at.expand(len(columns))
    else:
        factors_at = factors_at.t().contiguous()

    # the last column is its own result
    for t in reversed(range(len(columns) - 1)):
        next_column = columns[t + 1]
        columns[t].addcmul_(factors_at[t], next_column)
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
        from_last_to_first = valid_rewards.flip(-1)
        returns = from_last_to_first.cumsum(dim=-1).flip(-1)
        return torch.where(is_valid, returns, 0)

    factors = valid_rewards.new_tensor(gamma)
    if not count_gaps:
        # a token in a gap carries the return of the next valid token through unchanged
        no_discount = valid_rewards.new_ones(())
        factors = torch.where(is_valid, factors, no_discount)
    returns = backward_scan(factors, valid_rewards)
    return torch.where(is_valid, returns, 0)


def positions_of(mask: Tensor) -> Tensor:
    """Returns the positions of the columns, (T,), counted from 1, so that 0 can stand for no column."""
    width = mask.shape[-1]
    return torch.arange(1, width + 1, device=mask.device)


def row_ends(is_valid: Tensor) -> Tensor:
    """Returns the position of the last valid token of each row, (B,), counted from 1; 0 for a row without any."""
    valid_positions = positions_of(is_valid) * is_valid
    return valid_positions.amax(dim=-1)


def run_starts(is_valid: Tensor) -> Tensor:
    """Returns (B, T) bool: the first token of each run of consecutive valid tokens."""
    # shifted by one column; no token is in front of the first one
    with_border = torch.nn.functional.pad(is_valid, (1, 0))
    is_previous_valid = with_border[:, :-1]
    return is_valid & ~is_previous_valid


def compute_segment_masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns, at every token of each run of consecutive valid tokens, the mean over that run; 0 elsewhere.

    values, mask: (B, T) -> (B, T), differentiable. An assistant turn is one run, so for log-ratios the result is GSPO's
    length-normalised log-ratio per turn (ROLL's name and semantics).
    """
    is_valid = mask.bool()
    # number of the run of each token, 0 before the first run; tokens between two runs add 0 to the run before them
    runs = run_starts(is_valid).cumsum(dim=-1)
    valid_values = masked_values(values, is_valid)
    ones = is_valid.to(valid_values.dtype)

    # (B, T + 1): a column for each run that a row can have, and column 0
    batch_size, width = values.shape
    zeros = valid_values.new_zeros(batch_size, width + 1)
    totals = zeros.scatter_add(1, runs, valid_values)
    counts = zeros.scatter_add(1, runs, ones)
    means = totals / counts.clamp(min=1)

    mean_of_run = means.gather(1, runs)
    return torch.where(is_valid, mean_of_run, 0)


# ---------------------------------------------------------------------------------------------------- groups of rows


def label_list(labels: Labels) -> list[Hashable]:
    """Converts labels to Python objects, so that equal labels compare and hash equal (tensors do not)."""
    if isinstance(labels, np.ndarray | Tensor):
        return labels.tolist()
    objects: list[Hashable] = []
    for label in labels:
        if isinstance(label, Tensor):
            label = label.item()
        objects.append(label)
    return objects


def group_ids(index: Labels, device: torch.device) -> tuple[Tensor, int]:
    """Returns dense group numbers (B,) int64 in 0..G-1 for labels of any hashable type (such as uids), and G."""
    # numbered in the order in which the labels first occur
    numbers: dict[Hashable, int] = {}
    groups = []
    for label in label_list(index):
        number = numbers.setdefault(label, len(numbers))
        groups.append(number)
    group_of_row = torch.tensor(groups, dtype=torch.int64, device=device)
    return group_of_row, len(numbers)


def group_sum(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Returns the sum of the rows of each group: (B, ...) -> (G, ...)."""
    zeros = values.new_zeros(num_groups, *values.shape[1:])
    return zeros.index_add(0, groups, values)


def group_mean_std(scores: Tensor, groups: Tensor, num_groups: int, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, standard deviation (Bessel) and row count of each group as three (G,) tensors in fp64.

    scores, groups, weights: (B,); weight 1 includes a row, 0 excludes it. A group of fewer than two rows has mean 0 and
    std 1.
    """
    scores = scores.double()
    weights = weights.double()
    counts = group_sum(weights, groups, num_groups)
    totals = group_sum(scores * weights, groups, num_groups)
    means = totals / counts.clamp(min=1)

    # not the difference of two mean squares, which cancels for scores that differ in the seventh digit
    squared_distances = (scores - means[groups]) ** 2
    sums_of_squares = group_sum(squared_distances * weights, groups, num_groups)
    variances = sums_of_squares / (counts - 1).clamp(min=1)

    is_comparable = counts >= 2
    means = torch.where(is_comparable, means, 0)
    stds = torch.where(is_comparable, variances.sqrt(), 1)
    return means, stds, counts


def order_within_groups(keys: Tensor, groups: Tensor, *, descending: bool = False) -> Tensor:
    """Returns the rows in the order of their groups, and of their keys within a group: (B,) int64.

    keys, groups: (B,). Rows of a group with equal keys keep their order.
    """
    # two stable sorts, because torch sorts by one key: the second one keeps the order by key within a group
    rows_by_key = torch.argsort(keys, descending=descending, stable=True)
    groups_by_key = groups[rows_by_key]
    order = torch.argsort(groups_by_key, stable=True)
    return rows_by_key[order]


def group_top_two(scores: Tensor, groups: Tensor, num_groups: int, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the best row (G,) int64, its score (G,) and the second-best score (G,) of each group.

    scores, groups: (B,); valid: (B,) bool. A score is -inf if the group has no valid row, or no second valid row. The
    earlier of two rows with equal scores is the best.
    """
    valid_scores = torch.where(valid, scores.double(), -math.inf)
    rows = order_within_groups(valid_scores, groups, descending=True)
    sizes = torch.bincount(groups, minlength=num_groups)
    starts = sizes.cumsum(0) - sizes

    best_rows = rows[starts]
    best_scores = valid_scores[best_rows]
    # the row after the best one; no row follows a last group of one row
    next_positions = (starts + 1).clamp(max=len(rows) - 1)
    next_scores = valid_scores[rows[next_positions]]
    second_scores = torch.where(sizes > 1, next_scores, -math.inf)
    return best_rows, best_scores, second_scores


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
        squared_distances = (values - batch_mean) ** 2
        batch_var = float(squared_distances.mean())
        batch_std = 1.0
        if batch_count > 1:
            batch_std = math.sqrt(batch_var * batch_count / (batch_count - 1))

        # sum of squared distances from the common mean: within both parts, and between their means
        count = self.count + batch_count
        delta = batch_mean - self.mean
        between_means = delta**2 * self.count * batch_count / count
        sum_of_squares = self.var * self.count + between_means + batch_var * batch_count
        self.mean += delta * batch_count / count
        self.var = sum_of_squares / count
        self.count = count
        self.std = 1.0
        if count > 1:
            self.std = math.sqrt(sum_of_squares / (count - 1))
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
        num_tokens = _denominator("batch_num_tokens", batch_num_tokens, lengths.sum(), dp_size, loss_agg_mode)
        return masked_sum(loss_mat, is_valid) / num_tokens * dp_size

    own_sequences = (lengths > 0).sum()
    num_sequences = _denominator("global_batch_size", global_batch_size, own_sequences, dp_size, loss_agg_mode)
    row_losses = masked_sum(loss_mat, is_valid, axis=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        row_losses = row_losses / lengths.clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        divisor: float = loss_mask.shape[-1]
        if loss_scale_factor is not None:
            divisor = loss_scale_factor
        row_losses = row_losses / divisor
    return row_losses.sum() / num_sequences * dp_size


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
