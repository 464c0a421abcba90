"""Episode rewards before the advantage estimator: normalisation within a configurable group, and GiGPO's rewards.

Pure functions of scores (B,) and labels, following ROLL's agentic pipeline. `normalization` converts the options,
including ROLL's older `method` names, to types and bounds; `agentic_reward_norm` applies them. `compute_gigpo_rewards`
computes the two rewards whose weighted sum the estimator `gigpo` puts on the last token of a row.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_lite.algos.masked import (
    Labels,
    at_least_fp32,
    backward_scan,
    check_rows,
    group_ids,
    group_sum,
    label_list,
    order_within_groups,
)
from verl_lite.algos.reward_norm import normalise_scores

GROUPINGS = ("batch", "traj_group_id", "tags", "state_group_id")
"""Groups of rows that are normalised together: the whole batch; one task; one environment tag; the rows of one task
that start from the same state."""

METHODS = ("identity", "mean", "mean_std", "asym_clip")
"""ROLL's older names for normalisations."""

_ASYMMETRIC_BOUNDS = (-1.0, 3.0)


@dataclass(frozen=True)
class Normalization:
    """How rewards are normalised.

    Attributes:
        norm_mean_type, norm_std_type: as in `normalise_scores`; a "group" is the rows with equal labels.
        bounds: range to which results are clamped; None = not clamped.
    """

    norm_mean_type: str | None = None
    norm_std_type: str | None = None
    bounds: tuple[float, float] | None = None


def normalization(
    method: str = "identity",
    norm_mean_type: str | None = None,
    norm_std_type: str | None = None,
    *,
    is_grouped: bool = True,
) -> Normalization:
    """Returns the normalisation that the options select.

    Args:
        method: sets the types that are None. identity: to None. mean: the mean type. mean_std, asym_clip: both types.
            asym_clip also clamps results to [-1, 3], as ROLL's first version did.
        norm_mean_type, norm_std_type: as in `normalise_scores`.
        is_grouped: whether `method` normalises over the group; else over the batch.

    Raises:
        ValueError: the method is unknown.
    """
    if method not in METHODS:
        raise ValueError(f"reward normalisation: method={method!r}: expected one of {', '.join(METHODS)}.")
    own_type = "group" if is_grouped else "batch"
    if method != "identity":
        norm_mean_type = norm_mean_type or own_type
    if method in ("mean_std", "asym_clip"):
        norm_std_type = norm_std_type or own_type
    bounds = None
    if method == "asym_clip":
        bounds = _ASYMMETRIC_BOUNDS
    # an empty text counts as null
    return Normalization(norm_mean_type or None, norm_std_type or None, bounds)


@torch.no_grad()
def agentic_reward_norm(
    scores: Tensor, how: Normalization, *, valid: Tensor | None = None, groups: Labels | None = None
) -> Tensor:
    """Returns the normalised scores, (B,).

    Args:
        scores: (B,).
        how: types and bounds.
        valid: (B,) bool; invalid rows get 0. None = all rows are valid.
        groups: (B,) labels; None = all rows are one group.
    """
    if valid is None:
        valid = torch.ones_like(scores, dtype=torch.bool)
    if groups is None:
        groups = [0] * len(scores)
    rewards = normalise_scores(scores, valid, how.norm_mean_type, how.norm_std_type, groups=groups)
    if how.bounds is None:
        return rewards
    # masked once more, because bounds that exclude 0 would move the rewards of invalid rows
    return torch.where(valid, rewards.clamp(*how.bounds), 0)


@torch.no_grad()
def compute_discounted_returns(
    scores: Tensor, traj_id: Labels, step: Labels, gamma: float, valid: Tensor | None = None
) -> Tensor:
    """Returns the discounted return of each step, (B,): G = score + gamma (G of the episode's next step).

    Args:
        scores: (B,), in any order of the rows.
        traj_id: (B,) episode of each row.
        step: (B,) numbers that order the steps of an episode.
        valid: (B,) bool; invalid rows get 0 and are not steps, so they add no discount. None = all rows are valid.
    """
    check_rows("compute_discounted_returns", len(scores), traj_id=traj_id, step=step)
    scores = at_least_fp32(scores)
    zeros = torch.zeros_like(scores)
    if valid is not None:
        valid_rows = valid.nonzero().squeeze(-1)
        valid_trajectories = _labels_of(traj_id, valid_rows)
        valid_steps = _labels_of(step, valid_rows)
        returns = compute_discounted_returns(scores[valid_rows], valid_trajectories, valid_steps, gamma)
        return zeros.index_copy(0, valid_rows, returns)

    episodes, num_episodes = group_ids(traj_id, scores.device)
    # fp64 holds any step number exactly
    step_numbers = torch.tensor(label_list(step), dtype=torch.float64, device=scores.device)
    order = order_within_groups(step_numbers, episodes)

    # a table with the steps of one episode in each row, so that one scan serves all episodes
    lengths = torch.bincount(episodes, minlength=num_episodes)
    first_positions = lengths.cumsum(0) - lengths
    table_rows = episodes[order]
    positions = torch.arange(len(scores), device=scores.device)
    table_columns = positions - first_positions[table_rows]
    width = 0
    if num_episodes:
        width = int(lengths.max())
    table = scores.new_zeros(num_episodes, width)
    table[table_rows, table_columns] = scores[order]

    # the table is 0 behind the end of an episode, which adds nothing to its last return
    discount = table.new_tensor(gamma)
    table_of_returns = backward_scan(discount, table)
    return zeros.index_copy(0, order, table_of_returns[table_rows, table_columns])


def _labels_of(labels: Labels, rows: Tensor) -> list[Hashable]:
    all_labels = label_list(labels)
    return [all_labels[row] for row in rows.tolist()]


@torch.no_grad()
def compute_gigpo_rewards(
    scores: Tensor,
    valid: Tensor,
    index: Labels,
    traj_id: Labels,
    step: Labels,
    state_hash: Labels,
    *,
    step_reward_gamma: float,
    episode_norm: Normalization,
    step_norm: Normalization,
    episode_groups: Labels | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes GiGPO's two rewards of each step, both (B,) (arXiv:2505.10978).

    Args:
        scores: (B,) score of each step.
        valid: (B,) bool, the rows that are steps.
        index, traj_id, step, state_hash: (B,) task, episode, number and initial state of each step.
        step_reward_gamma: discount factor from step to step.
        episode_norm, step_norm: normalisations of the two rewards.
        episode_groups: (B,) labels of the episodes that are compared with each other; None = `index`.

    Returns:
        The score of the step's episode, normalised over the episodes of the task; and the discounted return of the
        step, normalised over the task's steps from the same state.
    """
    check_rows("gigpo", len(scores), index=index, traj_id=traj_id, step=step, state_hash=state_hash)
    # the score of an episode is the sum over its steps
    scores = torch.where(valid, scores, 0)
    trajectories, num_trajectories = group_ids(traj_id, scores.device)
    score_of_episode = group_sum(scores, trajectories, num_trajectories)
    episode_scores = score_of_episode[trajectories]
    if episode_groups is None:
        episode_groups = index
    episode_rewards = agentic_reward_norm(episode_scores, episode_norm, valid=valid, groups=episode_groups)

    returns = compute_discounted_returns(scores, traj_id, step, step_reward_gamma, valid)
    # not by the state alone: the returns of different tasks are not comparable
    states = build_state_groups(index, state_hash)
    step_rewards = agentic_reward_norm(returns, step_norm, valid=valid, groups=states)
    return episode_rewards, step_rewards


def build_state_groups(traj_group_id: Labels, state_hash: Labels) -> list[tuple[Hashable, Hashable]]:
    """Returns a label for each row, (traj_group_id, state_hash), that groups equal states within one task.

    ROLL labels rows with the hash alone, which also groups equal states of different tasks.
    """
    tasks = label_list(traj_group_id)
    states = label_list(state_hash)
    return list(zip(tasks, states, strict=True))
