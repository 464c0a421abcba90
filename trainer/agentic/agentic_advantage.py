"""Computes one reward per row from the rewards of episodes. In agentic runs this precedes `trainer.ppo.advantage`.

GiGPO and step_reinforce are REINFORCE on rewards that are first computed over whole episodes. The registered estimators
of these names do both at once; in a run, the KL penalty is applied between the two, as in ROLL.
"""

import torch

from trainer.ppo.advantage import ScalarMetrics, column_of, response_scores
from trainer.ppo.step_metrics import summary
from verl_lite.algos.agentic_rewards import (
    GROUPINGS,
    Normalization,
    agentic_reward_norm,
    build_state_groups,
    compute_discounted_returns,
    compute_gigpo_rewards,
    normalization,
)
from verl_lite.algos.masked import Labels
from verl_lite.config import AgenticConfig, RewardNormalizationConfig
from verl_lite.protocol import DataProto

OF_EPISODES = frozenset({"gigpo", "step_reinforce"})
"""Estimators whose rewards are computed over episodes before they are assigned to tokens."""


@torch.no_grad()
def compute_response_level_rewards(
    data: DataProto, config: AgenticConfig, adv_estimator: str
) -> tuple[DataProto, ScalarMetrics]:
    """Writes response_level_rewards (B,): the score of each row, normalized according to reward_normalization.

    step_reinforce uses the discounted return of the row's step instead of its score. gigpo adds episode_reward_weight
    times the normalized score of the episode and step_reward_weight times the return of the step, which is normalized
    among the steps of the same task that start from the same state. If reward_normalization is unset, gigpo uses the
    paper's: mean and std within the task.

    Reads the columns of `reward_postprocess`; traj_id and step for both estimators, and state_hash and uid for gigpo;
    and the columns of the grouping: uid (traj_group_id), uid and state_hash (state_group_id), or tags. Rows without a
    valid token are ignored.

    Returns:
        The batch; and for gigpo the mean, max and min of critic/episode_rewards_norm and critic/step_rewards_norm over
        rows with a valid token.

    Raises:
        ValueError: for an unknown option or a missing column.
    """
    stage = f"compute_response_level_rewards with adv_estimator={adv_estimator}"
    scores, valid = response_scores(data, stage)
    grouping, episode_norm = _normalization(config.reward_normalization, is_gigpo=adv_estimator == "gigpo")
    groups = _labels(data, grouping, stage)

    metrics: ScalarMetrics = {}
    if adv_estimator == "gigpo":
        # steps are compared within their start state, whatever the episodes are compared with; a type that is off stays
        # off
        mean_type = episode_norm.norm_mean_type and "group"
        std_type = episode_norm.norm_std_type and "group"
        step_norm = Normalization(mean_type, std_type, episode_norm.bounds)
        by_episode, by_step = compute_gigpo_rewards(
            scores,
            valid,
            index=column_of(data, "uid", stage),
            traj_id=column_of(data, "traj_id", stage),
            step=column_of(data, "step", stage),
            state_hash=column_of(data, "state_hash", stage),
            step_reward_gamma=config.step_reward_gamma,
            episode_norm=episode_norm,
            step_norm=step_norm,
            episode_groups=groups,
        )
        rewards = config.episode_reward_weight * by_episode + config.step_reward_weight * by_step
        metrics |= summary("critic/episode_rewards_norm", by_episode[valid])
        metrics |= summary("critic/step_rewards_norm", by_step[valid])
    else:
        if adv_estimator == "step_reinforce":
            trajectories = column_of(data, "traj_id", stage)
            steps = column_of(data, "step", stage)
            scores = compute_discounted_returns(scores, trajectories, steps, config.step_reward_gamma, valid)
        rewards = agentic_reward_norm(scores, episode_norm, valid=valid, groups=groups)

    result = data.select()
    result.batch["response_level_rewards"] = rewards
    return result, metrics


def _normalization(options: RewardNormalizationConfig, *, is_gigpo: bool) -> tuple[str, Normalization]:
    """Returns the grouping and the normalization, with null options replaced by the defaults of the estimator."""
    mean_type = options.norm_mean_type
    std_type = options.norm_std_type
    grouping = options.grouping
    if grouping is None:
        grouping = "traj_group_id" if is_gigpo else "batch"
    method = options.method
    if method is None:
        method = "identity"
        # the normalization of the paper, if the user sets none
        if is_gigpo and mean_type is None and std_type is None:
            method = "mean_std"
    return grouping, normalization(method, mean_type, std_type, is_grouped=grouping != "batch")


def _labels(data: DataProto, grouping: str, stage: str) -> Labels | None:
    """Returns the group of each row; None means that all rows form one group."""
    if grouping not in GROUPINGS:
        raise ValueError(f"{stage}: grouping={grouping!r}: expected one of {', '.join(GROUPINGS)}.")
    if grouping == "batch":
        return None
    if grouping == "tags":
        return column_of(data, "tags", stage)
    tasks = column_of(data, "uid", stage)
    if grouping == "traj_group_id":
        return tasks
    states = column_of(data, "state_hash", stage)
    return build_state_groups(tasks, states)
