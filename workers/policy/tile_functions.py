"""Statistics and gradient of one tile of logits: the functions of the output layer that `model.compile` compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from workers.policy.logit_transform import LogitTransform


def tile_statistics(
    logits: torch.Tensor,
    index: torch.Tensor,
    calculate_entropy: bool,
    calculate_sum_pi_squared: bool,
) -> torch.Tensor:
    """Computes statistics of softmax(logits) over the columns of a tile of logits (n, v).

    Args:
        logits: (n, v).
        index: (n, M) columns whose logits to return.
        calculate_entropy: whether to compute the mean of the logits.
        calculate_sum_pi_squared: whether to compute the sum of squared probabilities.

    Returns:
        (M + 1 to M + 3, n): the logits in the columns `index`, the logarithm of the normalizer, and with their options
        the mean of the logits and the sum of squared probabilities.
    """
    # minus the peak, so that exp does not overflow
    peak = logits.amax(dim=1)
    picked = logits.gather(1, index)
    scores = (logits - peak.unsqueeze(1)).exp_()
    total = scores.sum(dim=1)

    statistics = [peak + total.log()]
    sum_of_squares = None
    # before the entropy, which overwrites the scores
    if calculate_sum_pi_squared:
        sum_of_squares = scores.square().sum(dim=1) / total.square()
    if calculate_entropy:
        weighted_logits = scores.mul_(logits)
        statistics.append(weighted_logits.sum(dim=1) / total)
    if sum_of_squares is not None:
        statistics.append(sum_of_squares)
    return torch.cat([picked.t(), torch.stack(statistics)])


def tile_gradient(
    logits: torch.Tensor,
    normalizers: torch.Tensor,
    slope: torch.Tensor,
    offset: torch.Tensor | None,
    index: torch.Tensor,
    at_target: torch.Tensor,
    transform: LogitTransform,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Computes the gradient of a tile of logits before `transform`.

    The gradient of a transformed logit z_j is p_j (slope z_j + offset) + [j = index] at_target, where p_j is
    exp(z_j - normalizer); without an offset, p_j slope + [j = index] at_target.

    Args:
        logits: (n, v) transformed logits z.
        normalizers: (n,) logarithms of the sums of exp(z) over the vocabulary.
        slope: (n,).
        offset: (n,) or None.
        index: (n, M) columns of the targets.
        at_target: (n, M).
        transform: the transform of the logits.
        dtype: dtype of the result.
    """
    # in place: the gradient of a tile is the largest tensor of the backward pass
    gradient = (logits - normalizers.unsqueeze(1)).exp_()
    if offset is None:
        gradient.mul_(slope.unsqueeze(1))
    else:
        factor = torch.addcmul(offset.unsqueeze(1), slope.unsqueeze(1), logits)
        gradient.mul_(factor)
    # compiled, a comparison is fused with the rest, unlike a scatter
    if torch.compiler.is_compiling() and index.shape[1] == 1:
        is_target = torch.arange(logits.shape[1], device=logits.device) == index
        gradient = gradient + is_target * at_target
    else:
        gradient.scatter_add_(1, index, at_target)
    return transform.backward(gradient, logits).to(dtype)


TileFunctions = Mapping[str, Callable[..., torch.Tensor]]
"""`tile_statistics` and `tile_gradient` by name, or compiled forms of them."""

TILE_FUNCTIONS: TileFunctions = {"tile_statistics": tile_statistics, "tile_gradient": tile_gradient}
