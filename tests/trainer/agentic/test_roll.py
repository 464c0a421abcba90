"""ROLL's functions of rewards and advantages where they differ from the trainer's; their examples: `tests.seeds`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trainer.agentic.roll import (
    compute_advantage,
    compute_response_level_rewards,
    compute_token_reward,
    reward_postprocess,
)
from verl_lite.config import RewardNormalizationConfig
from verl_lite.protocol import DataProto, as_column


def batch(scores: list[float]) -> DataProto:
    """A prompt of one token and an answer of two, in ROLL's layout: the mask covers all three."""
    rows = len(scores)
    return DataProto.from_dict(
        tensors={
            "response_level_rewards": torch.tensor(scores),
            "response_mask": torch.tensor([[0, 1, 1]] * rows),
            "old_log_probs": torch.zeros(rows, 2),
        },
        non_tensors={"data_source": as_column(["maths"] * rows)},
    )


def test_running_statistics_follow_the_column_domain() -> None:
    data = batch([1.0, 3.0, 10.0, 30.0])
    data.non_tensor_batch["domain"] = as_column(["x", "y", "x", "y"])
    result, _ = reward_postprocess(data, SimpleNamespace(norm_mean_type="running"), {})
    assert result.batch["response_level_rewards"].tolist() == [-4.5, -13.5, 4.5, 13.5]
    assert result.non_tensor_batch["data_source"].tolist() == ["maths"] * 4, "the batch keeps its own columns"
    assert result.batch["response_mask"].shape == (4, 3)


def test_scores_of_rolls_reward_workers_are_kept_under_another_name() -> None:
    data = batch([2.0])
    data.batch["token_level_rewards"] = torch.tensor([[0.5, 0.5]])
    result, _ = compute_token_reward(data, SimpleNamespace())
    assert result.batch["token_level_rewards"].tolist() == [[0.0, 2.0]]
    assert result.batch["token_level_scores"].tolist() == [[0.5, 0.5]]
    assert "token_level_scores" not in data


def test_an_option_can_have_our_name() -> None:
    data = batch([2.0])
    data.batch["ref_log_probs"] = torch.zeros(1, 2)
    for switch in ("use_kl_in_reward", "add_token_level_kl"):
        with pytest.raises(ValueError, match="kl_ctrl is None"):
            compute_token_reward(data, SimpleNamespace(**{switch: True}))


def test_a_group_with_one_valid_score_has_no_advantage_and_gae_is_not_whitened() -> None:
    data = batch([0.0, 0.0])
    data.batch["token_level_rewards"] = torch.tensor([[0.0, 37.0], [0.0, 0.0]])
    data.batch["values"] = torch.zeros(2, 2)
    data.batch["response_mask"][1] = 0
    assert compute_advantage(data, 1.0, 1.0, "gae").batch["advantages"].tolist() == [[37.0, 37.0], [0.0, 0.0]]
    data.non_tensor_batch["uid"] = as_column(["a", "a"])
    result = compute_advantage(data, 1.0, 1.0, "grpo")
    assert not result.batch["advantages"].any() and "metrics" not in result.meta_info


def test_rewards_of_episodes_take_the_estimator_of_the_configuration() -> None:
    config = SimpleNamespace(
        adv_estimator="step_reinforce",
        reward_normalization=RewardNormalizationConfig(),
        step_reward_gamma=0.5,
        episode_reward_weight=1.0,
        step_reward_weight=1.0,
    )
    data = batch([1.0, 4.0])
    data.batch["response_mask"] = data.batch["response_mask"][:, 1:]
    data.batch["step"] = torch.tensor([0, 1])
    data.non_tensor_batch["traj_id"] = as_column(["t", "t"])
    result, _ = compute_response_level_rewards(data, config)  # type: ignore[arg-type]
    assert result.batch["response_level_rewards"].tolist() == [1.0 + 0.5 * 4.0, 4.0]
