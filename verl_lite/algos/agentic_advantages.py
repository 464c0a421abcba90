"""Advantage estimators of ROLL: REINFORCE by tokens or by turns, and estimators for episodes of several steps.

A row is a whole episode whose runs of valid tokens are the turns (agentic_reinforce), or one step of an episode
(step_reinforce, gigpo: the rows with equal `traj_id` form the episode, ordered by `step`).
"""

from typing import Any

import torch
from torch import Tensor

from verl_lite.algos.advantages import Index, Pair, estimator, option, outcome_scores
from verl_lite.algos.agentic_rewards import (
    Normalization,
    agentic_reward_norm,
    compute_discounted_returns,
    compute_gigpo_rewards,
)
from verl_lite.algos.masked import at_least_fp32, backward_scan, check_rows, check_shapes, discounted_returns


def compute_reinforce_return(token_level_rewards: Tensor, gamma: float, lambd: float = 1.0) -> Pair:
    """Returns G_t = r_t + gamma G_(t+1) over all columns, twice. `lambd` (ROLL's signature) is not read."""
    rewards = at_least_fp32(token_level_rewards)
    returns = backward_scan(rewards.new_tensor(gamma), rewards)
    return returns, returns


@estimator("reinforce")
def compute_reinforce_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any | None = None, gamma: float | None = None, **_: Any
) -> Pair:
    """REINFORCE: A_t = G_t = r_t + gamma G_(t+1). Every column is a step, including an environment's tokens.

    Rewards under mask 0 are not read. gamma: argument, else config.gamma, else 1. There is no baseline and no
    whitening: the rewards should be normalised (ROLL's `reinforce` and, with normalised rewards, its `grpo`). Returns
    are 0 under mask 0; ROLL does not mask them.
    """
    check_shapes("reinforce", token_level_rewards=token_level_rewards, response_mask=response_mask)
    discount = option("gamma", gamma, config, 1.0)
    returns = discounted_returns(token_level_rewards, response_mask, discount, count_gaps=True)
    return returns, returns


@torch.no_grad()
def compute_agentic_reinforce_return(token_level_rewards: Tensor, gamma: float, lambd: float, mask: Tensor) -> Pair:
    """REINFORCE by turns: all tokens of a turn get C = (reward at its last token) + gamma (C of the next turn).

    A turn is a run of valid tokens. As in ROLL, rewards on other tokens, such as a token-level KL penalty, are not
    read, nor is `lambd`. token_level_rewards, mask: (B, T).
    """
    check_shapes("agentic_reinforce", token_level_rewards=token_level_rewards, mask=mask)
    is_valid = mask.bool()
    is_end = is_valid & ~torch.nn.functional.pad(is_valid, (0, 1))[:, 1:]
    rewards = at_least_fp32(token_level_rewards)
    factors = torch.where(is_end, rewards.new_tensor(gamma), rewards.new_ones(()))
    returns = backward_scan(factors, torch.where(is_end, rewards, 0)).masked_fill_(~is_valid, 0)
    return returns, returns


@estimator("agentic_reinforce", rows="trajectory")
def compute_agentic_reinforce_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any | None = None, gamma: float | None = None, **_: Any
) -> Pair:
    """Computes `compute_agentic_reinforce_return`. gamma: argument, else config.gamma, else 1."""
    return compute_agentic_reinforce_return(
        token_level_rewards, option("gamma", gamma, config, 1.0), 1.0, response_mask
    )


@estimator("step_reinforce", rows="step", groups=False)
def compute_step_reinforce_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    traj_id: Index | None = None,
    step: Index | None = None,
    step_reward_gamma: float = 0.95,
    norm_mean_type: str | None = None,
    norm_std_type: str | None = None,
    config: Any | None = None,
    gamma: float | None = None,
    **_: Any,
) -> Pair:
    """Step REINFORCE: puts the normalised discounted return of each step on the last token of its row.

    Then applies REINFORCE along the tokens with `gamma`. index: (B,) groups (tasks) for the normalisation. traj_id,
    step: see `compute_discounted_returns`. Norm types: see `normalise_scores`. Raises ValueError if labels are missing.
    """
    name = "step_reinforce"
    check_shapes(name, token_level_rewards=token_level_rewards, response_mask=response_mask)
    check_rows(name, len(response_mask), index=index, traj_id=traj_id, step=step)
    valid = response_mask.bool().any(dim=-1)
    scores = outcome_scores(token_level_rewards, response_mask)
    labels: tuple[Any, Any] = (traj_id, step)
    returns = compute_discounted_returns(scores, *labels, step_reward_gamma, valid)
    how = Normalization(norm_mean_type, norm_std_type)
    rewards = agentic_reward_norm(returns, how, valid=valid, groups=index)
    return compute_reinforce_advantage(at_last_token(rewards, response_mask), response_mask, config, gamma)


@estimator("gigpo", rows="step", groups=True)
def compute_gigpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    traj_id: Index | None = None,
    step: Index | None = None,
    state_hash: Index | None = None,
    step_reward_gamma: float = 0.95,
    episode_reward_weight: float = 1.0,
    step_reward_weight: float = 1.0,
    norm_mean_type: str | None = "group",
    norm_std_type: str | None = "group",
    config: Any | None = None,
    gamma: float | None = None,
    **_: Any,
) -> Pair:
    """GiGPO: R = episode_reward_weight E + step_reward_weight S at the last token of each row (arXiv:2505.10978).

    E is the score of the whole episode, normalised over the rows of its task (index). S is the discounted return of
    the step, normalised over the rows of the task that start from the same state (state_hash). Then applies REINFORCE
    along the tokens with `gamma`. Raises ValueError if an argument is missing.
    """
    check_shapes("gigpo", token_level_rewards=token_level_rewards, response_mask=response_mask)
    valid = response_mask.bool().any(dim=-1)
    scores = outcome_scores(token_level_rewards, response_mask)
    how = Normalization(norm_mean_type, norm_std_type)
    labels: tuple[Any, ...] = (index, traj_id, step, state_hash)
    by_episode, by_step = compute_gigpo_rewards(
        scores, valid, *labels, step_reward_gamma=step_reward_gamma, episode_norm=how, step_norm=how
    )
    rewards = episode_reward_weight * by_episode + step_reward_weight * by_step
    return compute_reinforce_advantage(at_last_token(rewards, response_mask), response_mask, config, gamma)


def at_last_token(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Returns (B, T) with the score of each row at its last valid token and 0 elsewhere. scores: (B,)."""
    positions = torch.arange(1, response_mask.shape[-1] + 1, device=response_mask.device) * response_mask.bool()
    is_last = (positions == positions.amax(dim=-1, keepdim=True)) & response_mask.bool()
    return torch.where(is_last, scores.unsqueeze(-1), 0)
