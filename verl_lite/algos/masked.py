"""Sums, means and scans over masked tokens, over runs of tokens and over groups of rows.

Shapes are (B, T) unless said otherwise; `mask` is not 0 where a value counts. A value under mask 0, NaN included,
reaches neither result nor gradient. Values of less than fp32, integers among them, are summed and returned as fp32.
Groups are dense numbers (B,) from `group_ids`; statistics of groups are in fp64 and weigh rows, so that a row without a
valid token can be left out.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

Count = int | float | Tensor
Labels = np.ndarray | Tensor | list[Any]
"""A label for each row (B,), of any hashable kind."""

# ---------------------------------------------------------------------------------------------------- arguments


def at_least_fp32(tensor: Tensor) -> Tensor:
    """The tensor as fp32, or as it is in fp64: bf16 cannot count past 256, and an integer has no quotient."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def check_shapes(name: str, **tensors: Tensor | None) -> None:
    """Raises ValueError naming the first argument that is None or shaped unlike the first one, or not (B, T)."""
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
    """Raises ValueError naming the first argument that is missing or is not one label for each of `rows` rows."""
    for argument, column in labels.items():
        if column is None:
            raise ValueError(f"{name}: {argument} is missing; (B,) labels, one for each row, are expected.")
        if len(column) != rows or (not isinstance(column, list) and column.ndim != 1):
            shape = [len(column)] if isinstance(column, list) else list(column.shape)
            raise ValueError(f"{name}: {argument} has shape {shape}, expected one label for each of {rows} rows.")


# ---------------------------------------------------------------------------------------------------- whole batch


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of values where the mask is not 0. Values elsewhere may be NaN: they reach neither result nor gradient."""
    kept = torch.where(mask.bool(), at_least_fp32(values), 0)
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean of values where the mask is not 0; 0 where nothing is left (denominator + 1e-8, as verl)."""
    count = mask.bool().sum() if axis is None else mask.bool().sum(dim=axis)
    return masked_sum(values, mask, axis) / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of values where the mask is not 0, with Bessel's correction unless `unbiased` is false.

    Raises ValueError if fewer than two values (one, if not unbiased) are left.
    """
    count = int(mask.bool().sum())
    if count < 1 + unbiased:
        raise ValueError(f"masked_var: the mask keeps {count} values; a variance needs at least {1 + unbiased}.")
    centred = at_least_fp32(values) - masked_mean(values, mask)
    return masked_sum(centred**2, mask) / (count - unbiased)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values scaled to variance 1 over the mask and, if `shift_mean`, moved to mean 0. Mask before further use.

    Raises ValueError if the mask keeps fewer than two values.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def masked_normalize(values: Tensor, mask: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Values of each row (along `dim`) moved to mean 0 and scaled to variance 1 over its mask; 0 under mask 0. (ROLL)

    The variance is the biased one, of at least `eps`. A row whose mask is all 0 stays 0.
    """
    is_valid = mask.bool()
    kept = torch.where(is_valid, at_least_fp32(values), 0)
    count = is_valid.sum(dim=dim, keepdim=True).clamp(min=1)
    centred = torch.where(is_valid, kept - kept.sum(dim=dim, keepdim=True) / count, 0)
    variance = centred.square().sum(dim=dim, keepdim=True) / count
    return centred * torch.rsqrt(variance.clamp(min=eps))


def compute_clip_fraction(values: Tensor, clip_max: float, clip_min: float) -> float:
    """Share of all values, padding too, that lie above `clip_max` or below `clip_min`; 0 of none. (ROLL)"""
    beyond = (values > clip_max) | (values < clip_min)
    return float(beyond.sum()) / max(1, values.numel())


def whiten_or_keep(values: Tensor, mask: Tensor) -> Tensor:
    """`masked_whiten`, then 0 under mask 0; values stay as they are where fewer than two are left (as ROLL).

    A step in which nearly every reward failed goes on; verl stops it with an error. The result has no gradient.
    """
    is_valid = mask.bool()
    kept = torch.where(is_valid, at_least_fp32(values.detach()), 0)
    count = int(is_valid.sum())
    if count > 1:
        kept.sub_(kept.sum(dtype=torch.float64) / count).masked_fill_(~is_valid, 0)
        variance = torch.linalg.vector_norm(kept, dtype=torch.float64) ** 2 / (count - 1)
        kept.mul_(torch.rsqrt(variance + 1e-8))
    return kept


# ---------------------------------------------------------------------------------------------------- along a row


def backward_scan(factors: Tensor, values: Tensor) -> Tensor:
    """x_t = values_t + factors_t x_(t+1), from the last column to the first, x = 0 after it. Not differentiable.

    values: (B, T); factors: (B, T), or () for one factor. Columns lie one after the other in memory while the scan
    runs: one multiply-add over all rows per step.
    """
    columns = at_least_fp32(values.detach()).t().clone(memory_format=torch.contiguous_format)
    steps = factors.to(columns.dtype)
    steps = steps.t().contiguous() if steps.dim() else steps.expand(len(columns))
    for t in range(len(columns) - 2, -1, -1):
        columns[t].addcmul_(steps[t], columns[t + 1])
    return columns.t().contiguous()


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float, *, count_gaps: bool = False) -> Tensor:
    """G_t = r_t + gamma G_next, 0 under mask 0, all (B, T). Rewards under mask 0 are not read.

    next is the next valid token: the tokens of an environment between two turns take no time, and G passes them
    unchanged. verl's reinforce_plus_plus sets G to 0 there instead, so that no reward reaches an earlier turn. With
    `count_gaps` each column is a step, discounted as any other (ROLL).
    """
    is_valid = mask.bool()
    kept = torch.where(is_valid, at_least_fp32(rewards), 0)
    if gamma == 1:
        return kept.flip(-1).cumsum(dim=-1).flip(-1).masked_fill_(~is_valid, 0)
    discount = kept.new_tensor(gamma)
    factors = discount if count_gaps else torch.where(is_valid, discount, kept.new_ones(()))
    return backward_scan(factors, kept).masked_fill_(~is_valid, 0)


def compute_segment_masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each run of consecutive valid tokens, at every token of the run; 0 elsewhere. Differentiable.

    values, mask: (B, T) -> (B, T). One assistant turn is one run: with log-ratios as values this is GSPO's
    length-normalised ratio per turn (ROLL's name and semantics).
    """
    is_valid, values = mask.bool(), at_least_fp32(values)
    starts = is_valid & ~torch.nn.functional.pad(is_valid, (1, 0))[:, :-1]
    runs = starts.cumsum(dim=-1)  # 0 before the first run; tokens between runs have number of the run before, value 0
    zeros = values.new_zeros(len(values), values.shape[-1] + 1)
    totals = zeros.scatter_add(1, runs, torch.where(is_valid, values, 0))
    counts = zeros.scatter_add(1, runs, is_valid.to(values.dtype))
    return torch.where(is_valid, (totals / counts.clamp(min=1)).gather(1, runs), 0)


# ---------------------------------------------------------------------------------------------------- groups of rows


def label_list(labels: Labels) -> list[Any]:
    """Labels as Python objects, equal where the labels are (two tensors of one number are not)."""
    if isinstance(labels, np.ndarray | Tensor):
        return labels.tolist()
    return [label.item() if isinstance(label, Tensor) else label for label in labels]


def group_ids(index: Labels, device: torch.device) -> tuple[Tensor, int]:
    """Dense group numbers (B,) int64 in 0..G-1 for group labels of any hashable kind (uids), and G."""
    labels = label_list(index)
    numbers: dict[Any, int] = {}
    ids = [numbers.setdefault(label, len(numbers)) for label in labels]
    return torch.tensor(ids, dtype=torch.int64, device=device), len(numbers)


def group_sum(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Sum of the rows of each group: (B, ...) -> (G, ...)."""
    return values.new_zeros(num_groups, *values.shape[1:]).index_add(0, groups, values)


def group_mean_std(scores: Tensor, groups: Tensor, num_groups: int, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation (Bessel) and row count of each group.

    scores, groups, weights: (B,); weight 0 leaves a row out, 1 counts it. Returns three (G,) tensors in fp64, by two
    passes: rewards that differ in their seventh digit keep their variance. A group of fewer than two rows has mean 0,
    std 1.
    """
    scores, weights = scores.double(), weights.double()
    counts = group_sum(weights, groups, num_groups)
    single = counts < 2
    means = group_sum(scores * weights, groups, num_groups) / counts.clamp(min=1)
    squares = group_sum((scores - means[groups]) ** 2 * weights, groups, num_groups)
    stds = (squares / (counts - 1).clamp(min=1)).sqrt()
    return means.masked_fill(single, 0.0), stds.masked_fill(single, 1.0), counts


def group_top_two(scores: Tensor, groups: Tensor, num_groups: int, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Best row, best score and second-best score of each group, by two sorts.

    scores, groups (B,), valid (B,) bool. Returns (rows (G,) int64, first (G,), second (G,)); -inf where a group has no
    valid row, or no second one. Of equal scores the earlier row is the best.
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
    """Mean and standard deviation of everything seen so far, merged batch by batch (Chan et al. 1979; ROLL, trlx).

    Attributes: mean 0, std 1, var 1 (biased) and count 0 before the first update.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.std = 1.0
        self.var = 1.0
        self.count = 0.0

    def update(self, xs: Tensor) -> tuple[float, float]:
        """Takes the values of a batch, of any shape, in; returns the batch's own (mean, unbiased std).

        A batch of one value has std 1, and so have all values together while they are one (ROLL: NaN). An empty batch
        changes nothing. Computed in fp64.
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
    """The one place where token losses become a scalar.

    With l the loss, m the mask, N = batch_num_tokens, S = global_batch_size, sums over the rows given here:
      token-mean                sum(l m) / N
      token-sum                 sum(l m)
      seq-mean-token-sum        sum over rows of sum_t(l m) / S
      seq-mean-token-mean       sum over rows of (sum_t(l m) / sum_t m) / S
      seq-mean-token-sum-norm   as seq-mean-token-sum, divided by loss_scale_factor (default: the width of the mask)
    times dp_size, which undoes a mean of gradients over data-parallel ranks; 1 where gradients are summed.

    loss_mat, loss_mask: (B, T). N: valid tokens, S: sequences with at least one, of the whole mini-batch on all ranks.
    With them, a part without a token gives 0. Left out, they are counted here, which is right only for a mini-batch
    given whole. Raises ValueError for that with dp_size > 1 or with a mask that keeps nothing (there is no mean), for
    shapes that differ, an unknown mode, and a loss_scale_factor that is not above 0.
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
