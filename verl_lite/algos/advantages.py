"""Advantage estimators of verl: from token rewards to (advantages, returns), both (B, T) and 0 under mask 0.

The functions have verl's names and arguments. Rows without a valid token (padding, a failed reward) are excluded from
all statistics and get 0. Group statistics are computed in fp64 with segment sums.

Outcome estimators read one score per response, the sum of its rewards (`outcome_scores`). All estimators ignore rewards
under mask 0, so the score of a response must be on a token of the policy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl_lite.algos.masked import (
    Labels,
    at_least_fp32,
    check_rows,
    check_shapes,
    discounted_returns,
    group_ids,
    group_mean_std,
    group_sum,
    group_top_two,
    whiten_or_keep,
)
from verl_lite.registry import Registry

Index = Labels
Pair = tuple[Tensor, Tensor]
F = TypeVar("F", bound=Callable[..., Pair])

ADV_ESTIMATOR_REGISTRY: Registry[Callable[..., Pair]] = Registry("advantage estimator")


def estimator(*names: str, **facts: Any) -> Callable[[F], F]:
    """Returns a decorator that registers an estimator without gradient. facts: see `core_algos.register_adv_est`."""

    def decorate(function: F) -> F:
        function = torch.no_grad()(function)
        for name in names:
            ADV_ESTIMATOR_REGISTRY.register(name, **facts)(function)
        return function

    return decorate


def outcome_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Returns the score of each response, (B,): the sum of the rewards of its valid tokens; 0 for a row without any."""
    return torch.where(response_mask.bool(), at_least_fp32(token_level_rewards), 0).sum(dim=-1)


@dataclass(frozen=True)
class Outcomes:
    """Scores (B,) fp64, valid rows (B,) bool, groups (B,) and group statistics, as used by the outcome estimators."""

    is_valid: Tensor  # (B, T) bool
    scores: Tensor
    valid: Tensor
    groups: Tensor
    num_groups: int
    means: Tensor  # (G,), 0 for a group of fewer than two
    stds: Tensor  # (G,), 1 for a group of fewer than two
    counts: Tensor  # (G,) number of valid rows

    def advantages(self, values: Tensor, like: Tensor) -> Pair:
        """Puts `values` (B,) on all valid tokens of their rows; the same tensor serves as advantages and returns."""
        spread_out = spread(values, self.is_valid, like)
        return spread_out, spread_out


def outcomes(name: str, token_level_rewards: Tensor, response_mask: Tensor, index: Index | None) -> Outcomes:
    """Computes scores and group statistics. Raises ValueError, naming the estimator `name`, if shapes do not match."""
    check_shapes(name, token_level_rewards=token_level_rewards, response_mask=response_mask)
    if index is None:
        raise ValueError(f"{name}: index is missing; (B,) the group of each row, its uid, is expected.")
    check_rows(name, len(token_level_rewards), index=index)
    is_valid = response_mask.bool()
    valid = is_valid.any(dim=-1)
    scores = outcome_scores(token_level_rewards, is_valid).double()
    groups, num_groups = group_ids(index, scores.device)
    return Outcomes(is_valid, scores, valid, groups, num_groups, *group_mean_std(scores, groups, num_groups, valid))


def spread(scores: Tensor, response_mask: Tensor, like: Tensor) -> Tensor:
    """Returns (B, T): the score of each row at its valid tokens, 0 elsewhere; fp64 if `like` is fp64, else fp32."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.where(response_mask.bool(), scores.to(dtype).unsqueeze(-1), 0)


def option(name: str, given: Any, config: Any, default: Any) -> Any:
    """Returns the argument `given` unless it is None, else config.<name> as in verl, else the default."""
    return getattr(config, name, default) if given is None else given


# ---------------------------------------------------------------------------------------------------- with a critic


@estimator("gae", rows="trajectory")
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor | None = None,
    response_mask: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    lambd: float | None = None,
    whiten: bool = True,
    **_: Any,
) -> Pair:
    """GAE: delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lam A_next (arXiv:1506.02438, eq. 16).

    "next" is the next valid token: tokens under mask 0 carry V and A through unchanged, so an environment's tokens
    between two turns are not steps. V and A are 0 after the last valid token. returns = A + V. Afterwards A is whitened
    over all valid tokens, unless `whiten` is false (as in ROLL) or there is only one token (verl raises).

    token_level_rewards, values, response_mask: (B, T). `lambd` is ROLL's name for `lam`. Without response_mask all
    tokens are valid, also as in ROLL. Raises ValueError if values are missing or shapes differ.
    """
    if response_mask is None:
        response_mask = torch.ones_like(token_level_rewards)
    check_shapes("gae", token_level_rewards=token_level_rewards, values=values, response_mask=response_mask)
    assert values is not None
    decay = gamma * (lam if lambd is None else lambd)
    is_valid, values = response_mask.bool(), at_least_fp32(values)
    # transposed to contiguous columns: each step of the scan is a few operations on contiguous (B,) vectors
    rewards_at, values_at, valid_at = (
        x.t().contiguous() for x in (token_level_rewards.to(values.dtype), values, is_valid)
    )
    advantages_at = torch.empty_like(values_at)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in range(len(values_at) - 1, -1, -1):
        step = torch.add(rewards_at[t], next_value, alpha=gamma).sub_(values_at[t]).add_(next_advantage, alpha=decay)
        next_advantage = torch.where(valid_at[t], step, next_advantage, out=advantages_at[t])
        next_value = torch.where(valid_at[t], values_at[t], next_value)
    advantages = torch.where(is_valid, advantages_at.t(), 0)
    returns = (advantages + values).masked_fill_(~is_valid, 0)
    return whiten_or_keep(advantages, is_valid) if whiten else advantages, returns


# ---------------------------------------------------------------------------------------------------- GRPO and kin


@estimator("grpo", "grpo_vectorized", groups=True)
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any | None = None,
    **_: Any,
) -> Pair:
    """GRPO: compares the score of each response with the other responses to the same prompt.

    A_i = (R_i - mean_g) / (std_g + epsilon), std with Bessel's correction (arXiv:2402.03300, section 4.1.2). With
    `norm_adv_by_std_in_grpo` false it is not divided (Dr.GRPO, arXiv:2503.20783). A group of one response has mean 0
    and std 1. Rows without a valid token are excluded from mean and std and get 0. `config` is not read.

    token_level_rewards, response_mask: (B, T). index: (B,) the group of each row. Returns (advantages, returns), the
    same (B, T) tensor twice, 0 under mask 0. Raises ValueError if the number of labels in index is not B.
    """
    rows = outcomes("grpo", token_level_rewards, response_mask, index)
    advantages = rows.scores - rows.means[rows.groups]
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (rows.stds[rows.groups] + epsilon)
    return rows.advantages(advantages, token_level_rewards)


@estimator("maxrl", groups=True)
def compute_maxrl_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    **_: Any,
) -> Pair:
    """MaxRL: A_i = (R_i - mean_g) / (mean_g + epsilon), the group's mean in place of GRPO's std (arXiv:2602.02710).

    For scores of 0 and 1, K of N answers correct: N/K - 1 for a correct answer and -1 for a wrong one, so that rarely
    solved prompts weigh most; with the loss -A log pi this is the gradient of the log of the success probability,
    truncated at order N - 1. A group without a success (mean_g <= 0) and a group of one response get 0, where the
    formula would divide by epsilon (authors' code: no exception).
    """
    rows = outcomes("maxrl", token_level_rewards, response_mask, index)
    means = rows.means[rows.groups]  # 0 for a group of one
    advantages = torch.where(means > 0, (rows.scores - means) / (means.clamp(min=0) + epsilon), 0)
    return rows.advantages(advantages, token_level_rewards)


@estimator("grpo_passk", groups=True)
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any | None = None,
    **_: Any,
) -> Pair:
    """Pass@k: rewards only the best response of a group, by its lead over the second best (arXiv:2503.19595).

    A = (R_best - R_second) / (std_g + epsilon) for the best response, 0 for the others; all are 0 if the best two tie.
    It is not divided if `norm_adv_by_std_in_grpo` (argument, else config, else true) is false. A group with only one
    valid row gets 0. Raises ValueError if a group has only one row.
    """
    rows = outcomes("grpo_passk", token_level_rewards, response_mask, index)
    sizes = torch.bincount(rows.groups, minlength=rows.num_groups)
    if bool((sizes < 2).any()):
        raise ValueError("grpo_passk: a group of one row has no second-best score; index needs at least two rows each.")
    best, first, second = group_top_two(rows.scores, rows.groups, rows.num_groups, rows.valid)
    lead = torch.where(rows.counts > 1, first - second, 0)
    if option("norm_adv_by_std_in_grpo", norm_adv_by_std_in_grpo, config, True):
        lead = lead / (rows.stds + epsilon)
    return rows.advantages(torch.zeros_like(rows.scores).index_copy(0, best, lead), token_level_rewards)


@estimator("gdpo", groups=True, raw_scores=True)
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any | None = None,
    non_tensor_batch: dict[str, np.ndarray] | None = None,
    **_: Any,
) -> Pair:
    """GDPO: normalises each reward separately within its group, then sums and whitens (arXiv:2601.05242).

    A = whiten(sum_k w_k GRPO_k) over all valid tokens. config.gdpo_reward_keys names the reward columns (B,) in
    `non_tensor_batch`; config.gdpo_reward_weights are the weights w_k (null: 1 each). token_level_rewards only provide
    shape and dtype. Raises ValueError if keys are missing, the number of weights differs from the number of keys, or a
    valid row has a reward that is not finite.
    """
    keys = getattr(config, "gdpo_reward_keys", None)
    weights = getattr(config, "gdpo_reward_weights", None)
    columns = non_tensor_batch or {}
    if not keys or any(key not in columns for key in keys):
        raise ValueError(f"gdpo: gdpo_reward_keys={keys}: columns of rewards are expected, of {sorted(columns)}.")
    if weights and len(weights) != len(keys):
        raise ValueError(f"gdpo: gdpo_reward_weights={list(weights)}: one for each of {list(keys)} is expected.")
    total = torch.zeros(len(token_level_rewards), dtype=torch.float64, device=token_level_rewards.device)
    rows = outcomes("gdpo", token_level_rewards, response_mask, index)
    check_rows("gdpo", len(total), **{key: columns[key] for key in keys})
    for key, weight in zip(keys, weights or [1.0] * len(keys), strict=True):
        scores = torch.as_tensor(np.asarray(columns[key], dtype=np.float64), device=total.device)
        unknown = int((rows.valid & ~torch.isfinite(scores)).sum())
        if unknown:
            raise ValueError(f"gdpo: reward {key!r} is no finite number in {unknown} rows; each answer needs one.")
        scores = torch.where(rows.valid, scores, 0)
        means, stds, _counts = group_mean_std(scores, rows.groups, rows.num_groups, rows.valid)
        advantage = scores - means[rows.groups]
        total += weight * (advantage / (stds[rows.groups] + epsilon) if norm_adv_by_std_in_grpo else advantage)
    advantages = whiten_or_keep(spread(total, rows.is_valid, token_level_rewards), rows.is_valid)
    return advantages, advantages


@estimator("rloo", groups=True)
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index | None = None, **_: Any
) -> Pair:
    """RLOO: A_i = R_i - mean of the group's other scores = n/(n-1) (R_i - mean_g) (arXiv:2402.14740).

    A group of one response has no baseline: A = R.
    """
    rows = outcomes("rloo", token_level_rewards, response_mask, index)
    return rows.advantages(_leave_one_out(rows), token_level_rewards)


@estimator("rloo_vectorized", groups=True)
def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index | None = None, **_: Any
) -> Pair:
    """RLOO as in verl's rloo_vectorized: a group of one response gets 0 instead of its score."""
    rows = outcomes("rloo_vectorized", token_level_rewards, response_mask, index)
    several = (rows.counts > 1)[rows.groups]
    return rows.advantages(torch.where(several, _leave_one_out(rows), 0), token_level_rewards)


def _leave_one_out(rows: Outcomes) -> Tensor:
    """Returns score minus mean of the group's other scores, (B,); in a group of one, the score itself."""
    scale = torch.where(rows.counts > 1, rows.counts / (rows.counts - 1).clamp(min=1), 1.0)
    return scale[rows.groups] * (rows.scores - rows.means[rows.groups])


@estimator("opo", groups=True)
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index | None = None, **_: Any
) -> Pair:
    """OPO: A = R - b_g with the length-weighted baseline b_g = sum(len R) / sum(len) (arXiv:2505.23585).

    len is the number of valid tokens. A group of one response has baseline 0.
    """
    rows = outcomes("opo", token_level_rewards, response_mask, index)
    lengths = rows.is_valid.sum(dim=-1).double()
    totals = group_sum(torch.stack([lengths * rows.scores, lengths], dim=-1), rows.groups, rows.num_groups)
    baselines = torch.where(rows.counts > 1, totals[:, 0] / totals[:, 1].clamp(min=1), 0)
    return rows.advantages(rows.scores - baselines[rows.groups], token_level_rewards)


@estimator("gpg", groups=True)
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index | None = None, f_norm: float = 1.0, **_: Any
) -> Pair:
    """GPG: A = alpha (R - mean_g) / f_norm with alpha = rows / rows of non-zero score (arXiv:2504.02546).

    alpha compensates for groups without a learning signal; only rows with a valid token are counted (verl: all rows).
    Use with the policy loss `gpg`.
    """
    rows = outcomes("gpg", token_level_rewards, response_mask, index)
    alpha = rows.valid.sum().double() / ((rows.scores != 0) & rows.valid).sum().clamp(min=1)
    advantages = alpha * (rows.scores - rows.means[rows.groups]) / f_norm
    return rows.advantages(advantages, token_level_rewards)


# ---------------------------------------------------------------------------------------------------- REINFORCE and kin


@estimator("reinforce_plus_plus")
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any | None = None, gamma: float | None = None, **_: Any
) -> Pair:
    """REINFORCE++: G_t = r_t + gamma G_next over valid tokens; A = G whitened over the batch (arXiv:2501.03262).

    gamma: argument, else config.gamma, else 1. Tokens under mask 0 carry G through unchanged, as in verl 0.9.1.
    """
    check_shapes("reinforce_plus_plus", token_level_rewards=token_level_rewards, response_mask=response_mask)
    returns = discounted_returns(token_level_rewards, response_mask, option("gamma", gamma, config, 1.0))
    return whiten_or_keep(returns, response_mask), returns


@estimator("reinforce_plus_plus_baseline")
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index | None = None, **_: Any
) -> Pair:
    """REINFORCE++ with the group mean as baseline: A = R - mean_g, whitened over all valid tokens of the batch."""
    rows = outcomes("reinforce_plus_plus_baseline", token_level_rewards, response_mask, index)
    centred = spread(rows.scores - rows.means[rows.groups], rows.is_valid, token_level_rewards)
    advantages = whiten_or_keep(centred, rows.is_valid)
    return advantages, advantages


@estimator("remax", raw_scores=True)
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor | None = None, response_mask: Tensor | None = None, **_: Any
) -> Pair:
    """ReMax: A_t = (sum of the rewards from t to the end) - score of the greedy response (arXiv:2310.10505).

    reward_baselines: (B,) scores of the greedy responses. Raises ValueError if they are missing or not B numbers.
    """
    check_shapes("remax", token_level_rewards=token_level_rewards, response_mask=response_mask)
    assert response_mask is not None
    if reward_baselines is None or reward_baselines.shape != token_level_rewards.shape[:1]:
        found = "missing" if reward_baselines is None else f"of shape {tuple(reward_baselines.shape)}"
        raise ValueError(f"remax: reward_baselines is {found}; (B,) scores of greedy answers are expected.")
    returns = discounted_returns(token_level_rewards, response_mask, 1.0)
    return returns - spread(reward_baselines, response_mask, token_level_rewards), returns


# ---------------------------------------------------------------------------------------------------- token baselines


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
    **_: Any,
) -> Pair:
    """Optimal token baseline: minimises the gradient variance for each prompt and time step (arXiv:2602.07078).

    Let pi be the probability of the sampled token and S the sum of squared probabilities over the vocabulary. The
    squared norm of the logit gradient is w_t = 1 - 2 pi + S (times rollout_is_weights^2). With W_t = w_1 + .. + w_t,
    B_t = sum_i(G W) / (sum_i W + epsilon) over the rows of the group that have a token at t, and A = G - B.
    `handle_zero_tail` omits the baseline where only the group's longest row has tokens: it would equal the row's own G.
    A group of one row has no baseline. old_log_probs, sum_pi_squared, rollout_is_weights: (B, T).
    Raises ValueError if an argument is missing or has another shape.
    """
    name = "optimal_token_baseline"
    _check_token_columns(name, token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    assert old_log_probs is not None and sum_pi_squared is not None
    rows = outcomes(name, token_level_rewards, response_mask, index)
    is_valid = rows.is_valid
    returns = discounted_returns(token_level_rewards, is_valid, 1.0)
    # exactly, w >= (1 - pi)^2: negative values are rounding errors, and a sum near 0 would make the baseline arbitrary
    weights = (1 - 2 * at_least_fp32(old_log_probs).exp() + at_least_fp32(sum_pi_squared)).clamp(min=0)
    if rollout_is_weights is not None:
        weights = weights * at_least_fp32(rollout_is_weights).square()
    energy = torch.where(is_valid, weights, 0).cumsum(dim=-1).masked_fill_(~is_valid, 0)
    totals = group_sum(energy, rows.groups, rows.num_groups)  # (G, T)
    baselines = group_sum(returns * energy, rows.groups, rows.num_groups) / (totals + epsilon)
    has_baseline = (rows.counts > 1)[rows.groups].unsqueeze(-1).expand_as(is_valid)
    if handle_zero_tail:
        positions = torch.arange(1, is_valid.shape[-1] + 1, device=is_valid.device)
        ends = (positions * is_valid).amax(dim=-1)  # (B,) number of columns up to the last valid token
        _best, first, second = group_top_two(ends, rows.groups, rows.num_groups, rows.valid)
        is_tail = (positions > second[rows.groups].unsqueeze(-1)) & (ends.double() == first[rows.groups]).unsqueeze(-1)
        has_baseline = has_baseline & ~is_tail
    advantages = returns - torch.where(has_baseline & is_valid, baselines[rows.groups], 0)
    return advantages, returns


@estimator("tir_optimal_token_baseline")
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    old_log_probs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    **options: Any,
) -> Pair:
    """`compute_optimal_token_baseline_advantage` for multi-turn responses: only the policy's tokens are time steps.

    The valid tokens of each row are gathered at its start, and the results are scattered back to their positions.
    """
    name = "tir_optimal_token_baseline"
    _check_token_columns(name, token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    assert old_log_probs is not None and sum_pi_squared is not None
    order = torch.argsort((response_mask == 0).to(torch.int8), dim=-1, stable=True)
    columns = (token_level_rewards, response_mask, old_log_probs, sum_pi_squared)
    rewards, mask, log_probs, squares = (column.gather(1, order) for column in columns)
    weights = None if rollout_is_weights is None else rollout_is_weights.gather(1, order)
    compact = compute_optimal_token_baseline_advantage(rewards, mask, index, log_probs, squares, weights, **options)
    advantages, returns = (torch.zeros_like(column).scatter(1, order, column) for column in compact)
    return advantages, returns


def _check_token_columns(
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor | None,
    sum_pi_squared: Tensor | None,
    rollout_is_weights: Tensor | None,
) -> None:
    check_shapes(name, token_level_rewards=token_level_rewards, response_mask=response_mask)
    check_shapes(name, response_mask=response_mask, old_log_probs=old_log_probs, sum_pi_squared=sum_pi_squared)
    if rollout_is_weights is not None:
        check_shapes(name, response_mask=response_mask, rollout_is_weights=rollout_is_weights)
