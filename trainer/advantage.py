"""From scores to advantages, on the driver: the KL penalty in the reward, then the registered estimator."""

from __future__ import annotations

from typing import Any

import torch

from verl_lite.config import AlgorithmConfig
from verl_lite.core_algos import FixedKLController, apply_kl_penalty, get_adv_estimator_fn
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto


def token_rewards(batch: DataProto, config: AlgorithmConfig, controller: FixedKLController) -> DataProto:
    """token_level_rewards (B, R): the scores, less the KL penalty where `algorithm.use_kl_in_reward` asks for it.

    Reads token_level_scores and response_mask; with the penalty also old_log_probs and ref_log_prob. The coefficient of
    this step is the one before the controller adapts to this batch.
    """
    scores, mask = batch.batch["token_level_scores"], batch.batch["response_mask"]
    if not config.use_kl_in_reward:
        return DataProto.from_dict(tensors={"token_level_rewards": scores}, meta_info={"metrics": {}})
    coefficient = controller.value
    rewards, mean_kl = apply_kl_penalty(
        scores, batch.batch["old_log_probs"], batch.batch["ref_log_prob"], mask, coefficient, config.kl_penalty
    )
    controller.update(current_kl=mean_kl, n_steps=int((mask.sum(1) > 0).sum()))
    metrics = {
        "actor/reward_kl_penalty": Metric.last(mean_kl),
        "actor/reward_kl_penalty_coeff": Metric.last(coefficient),
    }
    return DataProto.from_dict(tensors={"token_level_rewards": rewards}, meta_info={"metrics": metrics})


def compute_advantage(batch: DataProto, config: AlgorithmConfig) -> DataProto:
    """advantages and returns (B, R) by `algorithm.adv_estimator`.

    Reads token_level_rewards, response_mask (B, R) and uid (B,), which tells the groups; with
    `algorithm.gdpo_reward_keys` also reward/<key> (B,), which the estimator finds as non_tensor_batch[key].
    """
    columns: dict[str, Any] = {}
    if config.gdpo_reward_keys:
        rewards = {name.removeprefix("reward/"): column for name, column in batch.non_tensor_batch.items()}
        columns["non_tensor_batch"] = rewards
    with torch.no_grad():
        advantages, returns = get_adv_estimator_fn(config.adv_estimator)(
            token_level_rewards=batch.batch["token_level_rewards"],
            response_mask=batch.batch["response_mask"],
            index=batch.non_tensor_batch["uid"],
            gamma=config.gamma,
            lam=config.lam,
            norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
            config=config,
            **columns,
        )
    return DataProto.from_dict(tensors={"advantages": advantages, "returns": returns})
