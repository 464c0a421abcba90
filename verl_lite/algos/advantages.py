"""Advantage estimators of verl: from token rewards to (advantages, returns), both (B, T) and 0 under mask 0.

The functions have verl's names and arguments. Most of them take:

    token_level_rewards, response_mask   (B, T)
    index                                (B,) the group of each row, its uid
    config                               the options of `algorithm`, see `EstimatorConfig`

Rows without a valid token (padding, a failed reward) are excluded from all statistics and get 0. Group statistics are
computed in fp64 with segment sums.

Outcome estimators read one score per response, the sum of its rewards (`outcome_scores`), and return the same tensor as
advantages and as returns. All estimators ignore rewards under mask 0, so the score of a response must be on a token of
the policy. They raise ValueError, naming the argument, if one is missing or has another shape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

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
    masked_sum,
    whiten_or_keep,
)
from verl_lite.registry import Registry

Index = Labels
Pair = tuple[Tensor, Tensor]
F = TypeVar("F", bound=Callable[..., Pair])

ADV_ESTIMATOR_REGISTRY: Registry[Callable[..., Pair]] = Registry("advantage estimator")


class EstimatorConfig(Protocol):
    """The options that estimators read from `config`, as in `AlgorithmConfig`. An option that the object does not have
    counts as its default, because verl's configs have only some of them."""

    @property
    def gamma(self) -> float: ...
    @property
    def norm_adv_by_std_in_grpo(self) -> bool: ...
    @property
    def gdpo_reward_keys(self) -> Sequence[str] | None: ...
    @property
    def gdpo_reward_weights(self) -> Sequence[float] | None: ...


def estimator(*names: str, **facts: object) -> Callable[[F], F]:
    """Returns a decorator that registers an estimator without gradient. facts: see `core_algos.register_adv_est`."""

    def decorate(function: F) -> F:
        # advantages are constants of the loss, so the values and log-probs that they read get no gradient
        function = torch.no_grad()(function)
        for name in names:
            ADV_ESTIMATOR_REGISTRY.register(name, **facts)(function)
        return function

    return decorate


def discount_of(gamma: float | None, config: EstimatorConfig | None) -> float:
    """Returns the discount factor: the argument `gamma`, else config.gamma as in verl, else 1."""
    if gamma is not None:
        return gamma
    return getattr(config, "gamma", 1.0)


def outcome_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Returns the score of each response, (B,): the sum of the rewards of its valid tokens; 0 for a row without any."""
    return masked_sum(token_level_rewards, response_mask, axis=-1)


@dataclass(frozen=True)
class Outcomes:
    """The scores of a batch of responses, and the statistics of their groups, as the outcome estimators read them.

    Attributes:
        is_valid: (B, T) bool, the valid tokens.
        has_token: (B,) bool, the rows with a valid token. Only these are in the statistics.
        scores: (B,) fp64.
        groups: (B,) number of the row's group, from 0.
        num_groups: number of groups.
        means: (B,) mean score of the row's group; 0 for a group of fewer than two.
        stds: (B,) standard deviation (n - 1) of the row's group; 1 for a group of fewer than two.
        counts: (B,) number of rows with a valid token in the row's group.
        dtype: type of the result, fp64 for rewards in fp64, else fp32.
    """

    is_valid: Tensor
    has_token: Tensor
    scores: Tensor
    groups: Tensor
    num_groups: int
    means: Tensor
    stds: Tensor
    counts: Tensor
    dtype: torch.dtype

    def group_sum(self, values: Tensor) -> Tensor:
        """Returns the sum of the rows of each group: (B, ...) -> (G, ...)."""
        return group_sum(values, self.groups, self.num_groups)

    def on_tokens(self, values: Tensor) -> Tensor:
        """Puts values (B,) on the valid tokens of their rows: (B, T), 0 elsewhere."""
        return spread(values, self.is_valid, self.dtype)

    def advantages(self, values: Tensor) -> Pair:
        """Puts values (B,) on the valid tokens of their rows, as advantages and as returns."""
        advantages = self.on_tokens(values)
        return advantages, advantages


def outcomes(name: str, token_level_rewards: Tensor, response_mask: Tensor, index: Index | None) -> Outcomes:
    """Computes scores and group statistics. Raises ValueError, naming the estimator `name`, if shapes do not match."""
    check_shapes(name, token_level_rewards=token_level_rewards, response_mask=response_mask)
    if index is None:
        raise ValueError(f"{name}: index is missing; (B,) the group of each row, its uid, is expected.")
    check_rows(name, len(token_level_rewards), index=index)

    is_valid = response_mask.bool()
    has_token = is_valid.any(dim=-1)
    token_scores = outcome_scores(token_level_rewards, is_valid)
    scores = token_scores.double()
    groups, num_groups = group_ids(index, scores.device)
    means, stds, counts = group_mean_std(scores, groups, num_groups, has_token)
    return Outcomes(
        is_valid=is_valid,
        has_token=has_token,
        scores=scores,
        groups=groups,
        num_groups=num_groups,
        means=means[groups],
        stds=stds[groups],
        counts=counts[groups],
        dtype=token_scores.dtype,
    )


def spread(values: Tensor, is_valid: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns (B, T): the value of each row, (B,), at its valid tokens, and 0 elsewhere."""
    return torch.where(is_valid, values.to(dtype).unsqueeze(-1), 0)


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
    **_: object,
) -> Pair:
    """GAE: delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lam A_next (arXiv:1506.02438, eq. 16).

    "next" is the next valid token: tokens under mask 0 carry V and A through unchanged, so an environment's tokens
    between two turns are not steps. V and A are 0 after the last valid token. returns = A + V.

    Args:
        values: (B, T) the critic's V.
        response_mask: None = all tokens are valid, as in ROLL.
        lambd: ROLL's name for `lam`.
        whiten: whether A is whitened over all valid tokens afterwards (ROLL: false). A single valid token is not
            whitened (verl raises an error).
    """
    if response_mask is None:
        response_mask = torch.ones_like(token_level_rewards)
    check_shapes("gae", token_level_rewards=token_level_rewards, values=values, response_mask=response_mask)
    assert values is not None
    if lambd is not None:
        lam = lambd
    decay = gamma * lam
    is_valid = response_mask.bool()
    values = at_least_fp32(values)

    # transposed to contiguous columns: each step of the scan is a few operations on contiguous (B,) vectors
    rewards_at = token_level_rewards.to(values.dtype).t().contiguous()
    values_at = values.t().contiguous()
    valid_at = is_valid.t().contiguous()
    advantages_at = torch.empty_like(values_at)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = next_value
    for t in reversed(range(len(values_at))):
        # add with alpha multiplies and adds in one pass
        delta = torch.add(rewards_at[t], next_value, alpha=gamma).sub_(values_at[t])
        advantage = delta.add_(next_advantage, alpha=decay)
        next_advantage = torch.where(valid_at[t], advantage, next_advantage, out=advantages_at[t])
        next_value = torch.where(valid_at[t], values_at[t], next_value)

    advantages = torch.where(is_valid, advantages_at.t(), 0)
    # before the whitening: returns are on the scale of the rewards, which the critic predicts
    returns = torch.where(is_valid, advantages + values, 0)
    if whiten:
        advantages = whiten_or_keep(advantages, is_valid)
    return advantages, returns


# ---------------------------------------------------------------------------------------------------- GRPO and kin


@estimator("grpo", "grpo_vectorized", groups=True)
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: EstimatorConfig | None = None,
    **_: object,
) -> Pair:
    """GRPO: compares the score of each response with the other responses to the same prompt.

    A_i = (R_i - mean_g) / (std_g + epsilon), std with Bessel's correction (arXiv:2402.03300, section 4.1.2). A group of
    one response has mean 0 and std 1. `config` is not read.

    Args:
        norm_adv_by_std_in_grpo: False: A_i = R_i - mean_g (Dr.GRPO, arXiv:2503.20783).
    """
    rows = outcomes("grpo", token_level_rewards, response_mask, index)
    advantages = rows.scores - rows.means
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (rows.stds + epsilon)
    return rows.advantages(advantages)


@estimator("maxrl", groups=True)
def compute_maxrl_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    **_: object,
) -> Pair:
    """MaxRL: A_i = (R_i - mean_g) / (mean_g + epsilon), the group's mean in place of GRPO's std (arXiv:2602.02710).

    For scores of 0 and 1, K of N answers correct: N/K - 1 for a correct answer and -1 for a wrong one, so that rarely
    solved prompts weigh most; with the loss -A log pi this is the gradient of the log of the success probability,
    truncated at order N - 1. A group without a success (mean_g <= 0) and a group of one response get 0, where the
    formula would divide by epsilon (authors' code: no exception).
    """
    rows = outcomes("maxrl", token_level_rewards, response_mask, index)
    divisors = rows.means.clamp(min=0) + epsilon
    relative_scores = (rows.scores - rows.means) / divisors
    # false for a group of one, whose mean is 0
    has_success = rows.means > 0
    advantages = torch.where(has_success, relative_scores, 0)
    return rows.advantages(advantages)


@estimator("grpo_passk", groups=True)
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: EstimatorConfig | None = None,
    **_: object,
) -> Pair:
    """Pass@k: rewards only the best response of a group, by its lead over the second best (arXiv:2503.19595).

    A = (R_best - R_second) / (std_g + epsilon) for the best response, 0 for the others; all are 0 if the best two tie.
    A group with only one valid row gets 0.

    Args:
        norm_adv_by_std_in_grpo: whether the lead is divided by the std; None = the option of `config`, else True.

    Raises:
        ValueError: a group has only one row.
    """
    rows = outcomes("grpo_passk", token_level_rewards, response_mask, index)
    # padding and failed rewards do not make a group too small: all rows count here, valid or not
    sizes = torch.bincount(rows.groups, minlength=rows.num_groups)
    if bool((sizes < 2).any()):
        raise ValueError("grpo_passk: a group of one row has no second-best score; index needs at least two rows each.")
    if norm_adv_by_std_in_grpo is None:
        norm_adv_by_std_in_grpo = getattr(config, "norm_adv_by_std_in_grpo", True)

    best_rows, best_scores, second_scores = group_top_two(rows.scores, rows.groups, rows.num_groups, rows.has_token)
    # with a single valid row the second-best score is -inf, and the lead infinite
    has_second = rows.counts[best_rows] > 1
    leads = torch.where(has_second, best_scores - second_scores, 0)
    if norm_adv_by_std_in_grpo:
        leads = leads / (rows.stds[best_rows] + epsilon)
    zeros = torch.zeros_like(rows.scores)
    advantages = zeros.index_copy(0, best_rows, leads)
    return rows.advantages(advantages)


@estimator("gdpo", groups=True, raw_scores=True)
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: EstimatorConfig | None = None,
    non_tensor_batch: Mapping[str, np.ndarray] | None = None,
    **_: object,
) -> Pair:
    """GDPO: normalises each reward separately within its group, then sums and whitens (arXiv:2601.05242).

    A = whiten(sum_k w_k GRPO_k) over all valid tokens. token_level_rewards only provide shape and dtype.

    Args:
        norm_adv_by_std_in_grpo: as for `compute_grpo_outcome_advantage`, for each reward.
        config: gdpo_reward_keys are the names of the rewards; gdpo_reward_weights are the weights w_k, null = 1 each.
        non_tensor_batch: the rewards by name, (B,) each.

    Raises:
        ValueError: keys are missing, the number of weights differs from the number of keys, or a valid row has a reward
            that is not finite.
    """
    keys: Sequence[str] | None = getattr(config, "gdpo_reward_keys", None)
    weights: Sequence[float] | None = getattr(config, "gdpo_reward_weights", None)
    columns = non_tensor_batch or {}
    if not keys or not columns.keys() >= set(keys):
        raise ValueError(f"gdpo: gdpo_reward_keys={keys}: columns of rewards are expected, of {sorted(columns)}.")
    if not weights:
        weights = [1.0] * len(keys)
    if len(weights) != len(keys):
        raise ValueError(f"gdpo: gdpo_reward_weights={list(weights)}: one for each of {list(keys)} is expected.")
    rows = outcomes("gdpo", token_level_rewards, response_mask, index)
    for key in keys:
        check_rows("gdpo", len(rows.scores), **{key: columns[key]})

    total = torch.zeros_like(rows.scores)
    for key, weight in zip(keys, weights, strict=True):
        # a column of object dtype holds Python numbers, which torch does not convert
        column = np.asarray(columns[key], dtype=np.float64)
        scores = torch.as_tensor(column, device=total.device)
        # one NaN would reach the whole group through its mean, and all rows through the whitening
        is_unknown = rows.has_token & ~torch.isfinite(scores)
        num_unknown = int(is_unknown.sum())
        if num_unknown:
            raise ValueError(f"gdpo: reward {key!r} is no finite number in {num_unknown} rows; each answer needs one.")

        scores = torch.where(rows.has_token, scores, 0)
        means, stds, _counts = group_mean_std(scores, rows.groups, rows.num_groups, rows.has_token)
        advantages = scores - means[rows.groups]
        if norm_adv_by_std_in_grpo:
            advantages = advantages / (stds[rows.groups] + epsilon)
        total += weight * advantages

    whitened = whiten_or_keep(rows.on_tokens(total), rows.is_valid)
    return whitened, whitened


@estimator("rloo", groups=True)
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index | None = None, **_: object
) -> Pair:
    """RLOO: A_i = R_i - mean of the group's other scores = n/(n-1) (R_i - mean_g) (arXiv:2402.14740).

    A group of one response has no baseline: A = R.
    """
    rows = outcomes("rloo", token_level_rewards, response_mask, index)
    return rows.advantages(_leave_one_out(rows))


@estimator("rloo_vectorized", groups=True)
def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index | None = None, **_: object
) -> Pair:
    """RLOO as in verl's rloo_vectorized: a group of one response gets 0 instead of its score."""
    rows = outcomes("rloo_vectorized", token_level_rewards, response_mask, index)
    has_others = rows.counts > 1
    advantages = torch.where(has_others, _leave_one_out(rows), 0)
    return rows.advantages(advantages)


def _leave_one_out(rows: Outcomes) -> Tensor:
    """Returns score minus mean of the group's other scores, (B,); in a group of one, the score itself."""
    # R_i - (n mean_g - R_i) / (n - 1) = n / (n - 1) (R_i - mean_g)
    num_others = (rows.counts - 1).clamp(min=1)
    scale = rows.counts / num_others
    # a group of one has mean_g = 0 and no others
    scale = torch.where(rows.counts > 1, scale, 1.0)
    return scale * (rows.scores - rows.means)


@estimator("opo", groups=True)
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index | None = None, **_: object
) -> Pair:
    """OPO: A = R - b_g with the length-weighted baseline b_g = sum(len R) / sum(len) (arXiv:2505.23585).

    len is the number of valid tokens. A group of one response has baseline 0.
    """
    rows = outcomes("opo", token_level_rewards, response_mask, index)
    lengths = rows.is_valid.sum(dim=-1).double()
    weighted_scores = rows.group_sum(lengths * rows.scores)
    # at least 1: in a group without a token both sums are 0, and 0 / 0 is NaN
    total_lengths = rows.group_sum(lengths).clamp(min=1)
    weighted_means = weighted_scores / total_lengths

    has_others = rows.counts > 1
    baselines = torch.where(has_others, weighted_means[rows.groups], 0)
    return rows.advantages(rows.scores - baselines)


@estimator("gpg", groups=True)
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index | None = None, f_norm: float = 1.0, **_: object
) -> Pair:
    """GPG: A = alpha (R - mean_g) / f_norm with alpha = rows / rows of non-zero score (arXiv:2504.02546).

    alpha compensates for groups without a learning signal; only rows with a valid token are counted (verl: all rows).
    Use with the policy loss `gpg`.
    """
    rows = outcomes("gpg", token_level_rewards, response_mask, index)
    is_nonzero = (rows.scores != 0) & rows.has_token
    # padding and failed rewards do not change alpha
    num_rows = rows.has_token.sum().double()
    # at least 1: in a batch of zeros the advantages are 0, and alpha is arbitrary
    num_nonzero = is_nonzero.sum().clamp(min=1)
    alpha = num_rows / num_nonzero
    advantages = alpha * (rows.scores - rows.means) / f_norm
    return rows.advantages(advantages)


# ---------------------------------------------------------------------------------------------------- REINFORCE and kin


@estimator("reinforce_plus_plus")
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: EstimatorConfig | None = None,
    gamma: float | None = None,
    **_: object,
) -> Pair:
    """REINFORCE++: G_t = r_t + gamma G_next over valid tokens; A = G whitened over the batch (arXiv:2501.03262).

    gamma: argument, else config.gamma, else 1. Tokens under mask 0 carry G through unchanged, as in verl 0.9.1.
    """
    check_shapes("reinforce_plus_plus", token_level_rewards=token_level_rewards, response_mask=response_mask)
    returns = discounted_returns(token_level_rewards, response_mask, discount_of(gamma, config))
    return whiten_or_keep(returns, response_mask), returns


@estimator("reinforce_plus_plus_baseline")
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index | None = None, **_: object
) -> Pair:
    """REINFORCE++ with the group mean as baseline: A = R - mean_g, whitened over all valid tokens of the batch."""
    rows = outcomes("reinforce_plus_plus_baseline", token_level_rewards, response_mask, index)
    centred = rows.on_tokens(rows.scores - rows.means)
    advantages = whiten_or_keep(centred, rows.is_valid)
    return advantages, advantages


@estimator("remax", raw_scores=True)
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor | None = None,
    response_mask: Tensor | None = None,
    **_: object,
) -> Pair:
    """ReMax: A_t = (sum of the rewards from t to the end) - score of the greedy response (arXiv:2310.10505).

    reward_baselines: (B,) scores of the greedy responses.
    """
    check_shapes("remax", token_level_rewards=token_level_rewards, response_mask=response_mask)
    assert response_mask is not None
    problem = ""
    if reward_baselines is None:
        problem = "missing"
    elif reward_baselines.shape != token_level_rewards.shape[:1]:
        problem = f"of shape {tuple(reward_baselines.shape)}"
    if problem:
        raise ValueError(f"remax: reward_baselines is {problem}; (B,) scores of greedy answers are expected.")
    assert reward_baselines is not None
    returns = discounted_returns(token_level_rewards, response_mask, 1.0)
    baselines = spread(reward_baselines, response_mask.bool(), returns.dtype)
    return returns - baselines, returns
