"""Computes one reward per row from the rewards of episodes. In agentic runs this precedes `trainer.advantage`.

GiGPO and step_reinforce are REINFORCE on rewards that are first computed over whole episodes. `compute_advantage` with
one of their names does both at once; in a run, the KL penalty is applied between the two, as in ROLL.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trainer.advantage import ScalarMetrics, column_of, response_scores
from trainer.step_metrics import summary
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
    data: DataProto, pipeline_config: AgenticConfig | Any, adv_estimator: str | None = None
) -> tuple[DataProto, ScalarMetrics]:
    """Writes response_level_rewards (B,): the score of each row, normalized according to reward_normalization.

    step_reinforce uses the discounted return of the row's step instead of its score. gigpo adds episode_reward_weight
    times the normalized score of the episode and step_reward_weight times the return of the step, which is normalized
    among the steps of the same task that start from the same state. If reward_normalization is unset, gigpo uses the
    paper's: mean and std within the task.

    Reads the columns of `reward_postprocess`; traj_id and step for both estimators, and state_hash and uid for gigpo;
    and the columns of the grouping: uid (traj_group_id), uid and state_hash (state_group_id), or tags. Rows without a
    valid token are ignored.

    Args:
        pipeline_config: `config.agentic`, or any object with its attributes.
        adv_estimator: None uses the attribute of `pipeline_config`, as in ROLL.

    Returns:
        The batch; and for gigpo the mean, max and min of critic/episode_rewards_norm and critic/step_rewards_norm over
        rows with a valid token.

    Raises:
        ValueError: for an unknown option or a missing column.
    """
    chosen: str = getattr(pipeline_config, "adv_estimator", "") if adv_estimator is None else adv_estimator
    stage = f"compute_response_level_rewards with adv_estimator={chosen}"
    metrics: ScalarMetrics = {}
    data = data.select()
    scores, valid = response_scores(data, stage)
    options: RewardNormalizationConfig = pipeline_config.reward_normalization
    grouping, how = _normalization(options, is_gigpo=chosen == "gigpo")
    groups = _labels(data, grouping, stage)
    if chosen in OF_EPISODES:
        steps = (column_of(data, "traj_id", stage), column_of(data, "step", stage))
        gamma = float(pipeline_config.step_reward_gamma)
    if chosen == "gigpo":
        by_episode, by_step = compute_gigpo_rewards(
            scores,
            valid,
            column_of(data, "uid", stage),
            *steps,
            column_of(data, "state_hash", stage),
            step_reward_gamma=gamma,
            episode_norm=how,
            step_norm=Normalization(how.norm_mean_type and "group", how.norm_std_type and "group", how.bounds),
            episode_groups=groups,
        )
        rewards = pipeline_config.episode_reward_weight * by_episode + pipeline_config.step_reward_weight * by_step
        metrics |= summary("critic/episode_rewards_norm", by_episode[valid])
        metrics |= summary("critic/step_rewards_norm", by_step[valid])
    else:
        if chosen == "step_reinforce":
            scores = compute_discounted_returns(scores, *steps, gamma, valid)
        rewards = agentic_reward_norm(scores, how, valid=valid, groups=groups)
    data.batch["response_level_rewards"] = rewards
    return data, metrics


def get_score_normalize_fn(rn_cfg: RewardNormalizationConfig | Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the configured normalization, a function of the scores (B,) of one group. The name is ROLL's older
    one."""
    how = normalization(rn_cfg.method or "identity", rn_cfg.norm_mean_type, rn_cfg.norm_std_type)
    return partial(agentic_reward_norm, how=how)


def _normalization(options: RewardNormalizationConfig, *, is_gigpo: bool) -> tuple[str, Normalization]:
    """Returns the grouping and the normalization, with null options replaced by the defaults of the estimator."""
    grouping, method = options.grouping, options.method
    mean, std = options.norm_mean_type, options.norm_std_type
    if grouping is None:
        grouping = "traj_group_id" if is_gigpo else "batch"
    if method is None:
        method = "mean_std" if is_gigpo and mean is None and std is None else "identity"
    return grouping, normalization(method, mean, std, is_grouped=grouping != "batch")


def _labels(data: DataProto, grouping: str, stage: str) -> Labels | None:
    """Returns the group of each row; None means that all rows form one group."""
    if grouping not in GROUPINGS:
        raise ValueError(f"{stage}: grouping={grouping!r}: expected one of {', '.join(GROUPINGS)}.")
    if grouping == "batch":
        return None
    if grouping == "tags":
        return column_of(data, "tags", stage)
    tasks = column_of(data, "uid", stage)
    return tasks if grouping == "traj_group_id" else build_state_groups(tasks, column_of(data, "state_hash", stage))
