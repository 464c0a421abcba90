"""Advantage estimators of ROLL: REINFORCE by tokens or by turns, and estimators for episodes of several steps.

A row is a whole episode whose runs of valid tokens are the turns (agentic_reinforce), or one step of an episode
(step_reinforce, gigpo: the rows with equal `traj_id` form the episode, ordered by `step`).

In all of them the discount factor is the argument `gamma`, else config.gamma, else 1.
"""

import torch
from torch import Tensor

from verl_lite.algos.advantages import EstimatorConfig, Index, Pair, discount_of, estimator, outcome_scores
from verl_lite.algos.agentic_rewards import (
    Normalization,
    agentic_reward_norm,
    compute_discounted_returns,
    compute_gigpo_rewards,
)
from verl_lite.algos.masked import (
    at_least_fp32,
    backward_scan,
    check_rows,
    check_shapes,
    discounted_returns,
    positions_of,
    row_ends,
)


def compute_reinforce_return(token_level_rewards: Tensor, gamma: float, lambd: float = 1.0) -> Pair:
    """Returns G_t = r_t + gamma G_(t+1) over all columns, twice. `lambd` (ROLL's signature) is not read."""
    rewards = at_least_fp32(token_level_rewards)
    returns = backward_scan(rewards.new_tensor(gamma), rewards)
    return returns, returns


@estimator("reinforce")
def compute_reinforce_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: EstimatorConfig | None = None,
    gamma: float | None = None,
    **_: object,
) -> Pair:
    """REINFORCE: A_t = G_t = r_t + gamma G_(t+1). Every column is a step, including an environment's tokens.

    Rewards under mask 0 are not read. There is no baseline and no whitening: the rewards should be normalised (ROLL's
    `reinforce` and, with normalised rewards, its `grpo`). Returns are 0 under mask 0; ROLL does not mask them.
    """
    check_shapes("reinforce", token_level_rewards=token_level_rewards, response_mask=response_mask)
    discount = discount_of(gamma, config)
    # as in ROLL, where the tokens of an environment discount the return, too
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
    # shifted by one column; no token is behind the last one
    with_border = torch.nn.functional.pad(is_valid, (0, 1))
    is_next_valid = with_border[:, 1:]
    # a turn ends where the next token is not the policy's
    is_end_of_turn = is_valid & ~is_next_valid

    rewards = at_least_fp32(token_level_rewards)
    turn_rewards = torch.where(is_end_of_turn, rewards, 0)
    discount = rewards.new_tensor(gamma)
    no_discount = rewards.new_ones(())
    # C changes at the last token of a turn and is carried to the turn's other tokens
    factors = torch.where(is_end_of_turn, discount, no_discount)
    carried = backward_scan(factors, turn_rewards)
    returns = torch.where(is_valid, carried, 0)
    return returns, returns


@estimator("agentic_reinforce", rows="trajectory")
def compute_agentic_reinforce_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: EstimatorConfig | None = None,
    gamma: float | None = None,
    **_: object,
) -> Pair:
    """REINFORCE by turns: see `compute_agentic_reinforce_return`."""
    return compute_agentic_reinforce_return(token_level_rewards, discount_of(gamma, config), 1.0, response_mask)


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
    config: EstimatorConfig | None = None,
    gamma: float | None = None,
    **_: object,
) -> Pair:
    """Step REINFORCE: R = norm(G) at the last token of each row, G = score + step_reward_gamma (G of the next step).

    Then applies REINFORCE along the tokens with `gamma` (ROLL).

    Args:
        index: (B,) task of each row; rows of a task form the group of the normalisation.
        traj_id, step: (B,) episode of each row, and its number within the episode.
        step_reward_gamma: discount factor from step to step.
        norm_mean_type, norm_std_type: see `normalise_scores`.

    Raises:
        ValueError: labels are missing.
    """
    name = "step_reinforce"
    check_shapes(name, token_level_rewards=token_level_rewards, response_mask=response_mask)
    check_rows(name, len(response_mask), index=index, traj_id=traj_id, step=step)
    assert traj_id is not None and step is not None
    has_token = response_mask.bool().any(dim=-1)
    scores = outcome_scores(token_level_rewards, response_mask)
    returns = compute_discounted_returns(scores, traj_id, step, step_reward_gamma, has_token)
    norm = Normalization(norm_mean_type, norm_std_type)
    rewards = agentic_reward_norm(returns, norm, valid=has_token, groups=index)

    token_rewards = at_last_token(rewards, response_mask)
    return compute_reinforce_advantage(token_rewards, response_mask, config, gamma)


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
    config: EstimatorConfig | None = None,
    gamma: float | None = None,
    **_: object,
) -> Pair:
    """GiGPO: R = episode_reward_weight E + step_reward_weight S at the last token of each row (arXiv:2505.10978).

    E is the score of the whole episode, normalised over the rows of its task. S is the discounted return of the step,
    normalised over the rows of the task that start from the same state. Then applies REINFORCE along the tokens with
    `gamma`.

    Args:
        index, traj_id, step, step_reward_gamma: as for `compute_step_reinforce_advantage`.
        state_hash: (B,) state from which each step starts.
        norm_mean_type, norm_std_type: see `normalise_scores`; they apply to both E and S.

    Raises:
        ValueError: labels are missing.
    """
    check_shapes("gigpo", token_level_rewards=token_level_rewards, response_mask=response_mask)
    check_rows("gigpo", len(response_mask), index=index, traj_id=traj_id, step=step, state_hash=state_hash)
    assert index is not None and traj_id is not None and step is not None and state_hash is not None
    has_token = response_mask.bool().any(dim=-1)
    scores = outcome_scores(token_level_rewards, response_mask)
    norm = Normalization(norm_mean_type, norm_std_type)
    episode_rewards, step_rewards = compute_gigpo_rewards(
        scores,
        has_token,
        index,
        traj_id,
        step,
        state_hash,
        step_reward_gamma=step_reward_gamma,
        episode_norm=norm,
        step_norm=norm,
    )
    rewards = episode_reward_weight * episode_rewards + step_reward_weight * step_rewards

    token_rewards = at_last_token(rewards, response_mask)
    return compute_reinforce_advantage(token_rewards, response_mask, config, gamma)


def at_last_token(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Returns (B, T) with the score of each row at its last valid token and 0 elsewhere. scores: (B,)."""
    # a row without a valid token ends at 0, which is no position
    ends = row_ends(response_mask.bool())
    is_last = positions_of(response_mask) == ends.unsqueeze(-1)
    return torch.where(is_last, scores.unsqueeze(-1), 0)
