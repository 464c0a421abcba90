"""Episode rewards before the advantage estimator: normalisation within a configurable group, and GiGPO's rewards.

Pure functions of scores (B,) and labels, following ROLL's agentic pipeline. `normalization` converts the options,
including ROLL's older `method` names, to types and bounds; `agentic_reward_norm` applies them. `compute_gigpo_rewards`
computes the two rewards whose weighted sum the estimator `gigpo` puts on the last token of a row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_lite.algos.masked import Labels, at_least_fp32, backward_scan, check_rows, group_ids, group_sum, label_list
from verl_lite.algos.reward_norm import normalise_scores

GROUPINGS = ("batch", "traj_group_id", "tags", "state_group_id")
"""Groups of rows that are normalised together: the whole batch; one task; one environment tag; the rows of one task
that start from the same state."""

METHODS = ("identity", "mean", "mean_std", "asym_clip")
"""ROLL's older names for normalisations."""

_ASYMMETRIC = (-1.0, 3.0)


@dataclass(frozen=True)
class Normalization:
    """How rewards are normalised. norm_mean_type, norm_std_type: as in `normalise_scores`; a "group" is the rows with
    equal labels. bounds: range to which results are clamped; None: not clamped."""

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
    """Returns the normalisation that the options select. `method` sets the types that are None: mean, or mean and std
    (mean_std, asym_clip), over the group, or over the batch if rows are not grouped. asym_clip also clamps results to
    [-1, 3], as ROLL's first version did. Raises ValueError for an unknown method."""
    if method not in METHODS:
        raise ValueError(f"reward normalisation: method={method!r}: expected one of {', '.join(METHODS)}.")
    own = "group" if is_grouped else "batch"
    mean = norm_mean_type or (None if method == "identity" else own)
    std = norm_std_type or (own if method in ("mean_std", "asym_clip") else None)
    return Normalization(mean, std, _ASYMMETRIC if method == "asym_clip" else None)


@torch.no_grad()
def agentic_reward_norm(
    scores: Tensor, how: Normalization, *, valid: Tensor | None = None, groups: Labels | None = None
) -> Tensor:
    """Returns the normalised scores (B,). valid: (B,) bool, None = all rows; invalid rows get 0. groups: (B,) labels,
    None = all rows are one group."""
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid
    labels = [0] * len(scores) if groups is None else groups
    result = normalise_scores(scores, valid, how.norm_mean_type, how.norm_std_type, groups=labels)
    return result if how.bounds is None else torch.where(valid, result.clamp(*how.bounds), 0)


@torch.no_grad()
def compute_discounted_returns(
    scores: Tensor, traj_id: Labels, step: Labels, gamma: float, valid: Tensor | None = None
) -> Tensor:
    """Returns the discounted return of each step, (B,): G = score + gamma (G of the episode's next step).

    Rows may be in any order. traj_id: (B,) episode of each row. step: (B,) numbers that order the steps of an episode.
    valid: (B,) bool, None = all rows; invalid rows get 0 and are not steps, so they add no discount.
    """
    check_rows("compute_discounted_returns", len(scores), traj_id=traj_id, step=step)
    scores = at_least_fp32(scores)
    if valid is not None:
        kept = valid.nonzero().squeeze(-1)
        columns = (label_list(traj_id), label_list(step))
        trajectories, steps = ([column[row] for row in kept.tolist()] for column in columns)
        part = compute_discounted_returns(scores[kept], trajectories, steps, gamma)
        return torch.zeros_like(scores).index_copy(0, kept, part)
    episodes, number = group_ids(traj_id, scores.device)
    numbers = torch.tensor(label_list(step), dtype=torch.float64, device=scores.device)
    by_step = torch.argsort(numbers, stable=True)
    order = by_step[torch.argsort(episodes[by_step], stable=True)]
    sizes = torch.bincount(episodes, minlength=number)
    places = torch.arange(len(scores), device=scores.device) - (sizes.cumsum(0) - sizes)[episodes[order]]
    table = torch.zeros(number, int(sizes.max()) if number else 0, dtype=scores.dtype, device=scores.device)
    table[episodes[order], places] = scores[order]
    returns = backward_scan(table.new_tensor(gamma), table)
    return torch.zeros_like(scores).index_copy(0, order, returns[episodes[order], places])


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
    """Computes GiGPO's two rewards of each step, both (B,) (arXiv:2505.10978): the score of its episode, normalised
    over the episodes of the task, and its return, normalised over the task's steps from the same state.

    scores: (B,) step scores. valid: (B,) bool, rows that are steps. index: (B,) task of each row. episode_groups: (B,)
    labels of the episodes that are compared with each other, None = `index`."""
    check_rows("gigpo", len(scores), index=index, traj_id=traj_id, step=step, state_hash=state_hash)
    trajectories, number = group_ids(traj_id, scores.device)
    scores = torch.where(valid, scores, 0)
    episodes = group_sum(scores, trajectories, number)[trajectories]
    groups = index if episode_groups is None else episode_groups
    returns = compute_discounted_returns(scores, traj_id, step, step_reward_gamma, valid)
    states = build_state_groups(index, state_hash)
    return (
        agentic_reward_norm(episodes, episode_norm, valid=valid, groups=groups),
        agentic_reward_norm(returns, step_norm, valid=valid, groups=states),
    )


def build_state_groups(traj_group_id: Labels, state_hash: Labels) -> list[tuple[Any, Any]]:
    """Returns a label for each row, (traj_group_id, state_hash), that groups equal states within one task.

    ROLL labels rows with the hash alone, which also groups equal states of different tasks.
    """
    return list(zip(label_list(traj_group_id), label_list(state_hash), strict=True))
