"""Advantage estimators of verl with a baseline for each token. The module `advantages` describes their arguments."""

import torch
from torch import Tensor

from verl_lite.algos.advantages import Index, Outcomes, Pair, estimator, outcomes
from verl_lite.algos.masked import (
    at_least_fp32,
    check_shapes,
    discounted_returns,
    group_top_two,
    positions_of,
    row_ends,
)


@estimator("optimal_token_baseline")
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    old_log_probs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **_: object,
) -> Pair:
    """Optimal token baseline: minimises the gradient variance for each prompt and time step (arXiv:2602.07078).

    Let pi be the probability of the sampled token and S the sum of squared probabilities over the vocabulary. The
    squared norm of the logit gradient is w_t = 1 - 2 pi + S (times rollout_is_weights^2). With W_t = w_1 + .. + w_t,
    B_t = sum_i(G W) / (sum_i W + epsilon) over the rows of the group that have a token at t, and A = G - B. A group of
    one row has no baseline.

    Args:
        old_log_probs: (B, T) log pi.
        sum_pi_squared: (B, T) S.
        rollout_is_weights: (B, T) importance weights; None = 1.
        handle_zero_tail: omit the baseline where only the group's longest row has tokens: there it would equal the
            row's own G.
    """
    name = "optimal_token_baseline"
    _check_token_columns(name, token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    assert old_log_probs is not None and sum_pi_squared is not None
    rows = outcomes(name, token_level_rewards, response_mask, index)
    is_valid = rows.is_valid
    returns = discounted_returns(token_level_rewards, is_valid, 1.0)

    probs = at_least_fp32(old_log_probs).exp()
    # exactly, w >= (1 - pi)^2: negative values are rounding errors, and a sum near 0 would make the baseline arbitrary
    weights = (1 - 2 * probs + at_least_fp32(sum_pi_squared)).clamp(min=0)
    if rollout_is_weights is not None:
        weights = weights * at_least_fp32(rollout_is_weights).square()
    cumulative_weights = torch.where(is_valid, weights, 0).cumsum(dim=-1)
    # rows that have no token at t, because it is masked or after their end, are in neither sum
    cumulative_weights = torch.where(is_valid, cumulative_weights, 0)

    # one baseline for each group and time step, (G, T)
    weighted_returns = rows.group_sum(returns * cumulative_weights)
    total_weights = rows.group_sum(cumulative_weights)
    baselines = weighted_returns / (total_weights + epsilon)

    has_baseline = is_valid & (rows.counts > 1).unsqueeze(-1)
    if handle_zero_tail:
        has_baseline = has_baseline & ~_is_beyond_second_longest(rows)
    baseline_of_token = torch.where(has_baseline, baselines[rows.groups], 0)
    return returns - baseline_of_token, returns


def _is_beyond_second_longest(rows: Outcomes) -> Tensor:
    """Returns (B, T) bool: the positions of a group's longest row after the end of its second-longest row.

    The length of a row is the number of columns up to its last valid token, masked ones included.
    """
    ends = row_ends(rows.is_valid)
    _, longest, second_longest = group_top_two(ends, rows.groups, rows.num_groups, rows.has_token)
    is_longest = ends == longest[rows.groups]
    second_end = second_longest[rows.groups]

    is_beyond_second = positions_of(rows.is_valid) > second_end.unsqueeze(-1)
    return is_beyond_second & is_longest.unsqueeze(-1)


@estimator("tir_optimal_token_baseline")
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    old_log_probs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **_: object,
) -> Pair:
    """Computes `compute_optimal_token_baseline_advantage` of multi-turn responses: only the policy's tokens are steps.

    The valid tokens of each row are gathered at its start, and the results are scattered back to their positions.
    """
    name = "tir_optimal_token_baseline"
    _check_token_columns(name, token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    assert old_log_probs is not None and sum_pi_squared is not None
    # valid tokens first; the stable sort keeps their order
    is_masked = (response_mask == 0).to(torch.int8)
    order = torch.argsort(is_masked, dim=-1, stable=True)

    weights = None
    if rollout_is_weights is not None:
        weights = rollout_is_weights.gather(1, order)
    advantages, returns = compute_optimal_token_baseline_advantage(
        token_level_rewards.gather(1, order),
        response_mask.gather(1, order),
        index,
        old_log_probs.gather(1, order),
        sum_pi_squared.gather(1, order),
        weights,
        handle_zero_tail,
        epsilon,
    )
    return _scattered(advantages, order), _scattered(returns, order)


def _scattered(values: Tensor, order: Tensor) -> Tensor:
    """Returns values (B, T) at the columns of each row that `order` (B, T) names."""
    return torch.zeros_like(values).scatter(1, order, values)


def _check_token_columns(
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor | None,
    sum_pi_squared: Tensor | None,
    rollout_is_weights: Tensor | None,
) -> None:
    """Raises ValueError if a column is missing or has another shape. Only the weights may be None."""
    check_shapes(name, token_level_rewards=token_level_rewards, response_mask=response_mask)
    check_shapes(name, response_mask=response_mask, old_log_probs=old_log_probs, sum_pi_squared=sum_pi_squared)
    if rollout_is_weights is not None:
        check_shapes(name, response_mask=response_mask, rollout_is_weights=rollout_is_weights)
