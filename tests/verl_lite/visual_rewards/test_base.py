"""From a name in the configuration to a reward, the door for its scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.verl_lite.visual_rewards import rewards
from verl_lite.config.diffusion import FlowRewardConfig
from verl_lite.errors import UserError
from verl_lite.visual_rewards import VisualScore, build_visual_reward, score_frames

OWN = "tests.verl_lite.visual_rewards.rewards"

# ---------------------------------------------------------------------------------------------------- the registry


def test_a_reward_of_ones_own_by_its_path() -> None:
    reward = build_visual_reward(FlowRewardConfig(name=f"{OWN}:Redness", kwargs={"weight": 2.0}))
    assert isinstance(reward, rewards.Redness) and reward.weight == 2.0


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("cosine_identiti", {}, "did you mean cosine_identity"),
        (f"{OWN}:Missing", {}, "cannot be imported"),
        (f"{OWN}:Redness", {"wieght": 1.0}, "reward.kwargs=.*wieght"),
        ("cosine_identity", {}, "reward.kwargs=.*embedder"),
        (f"{OWN}:WithoutScore", {}, "without score"),
        (f"{OWN}:F.__name__", {}, "not a function or class"),
        ("cosine_identity", {"embedder": "no_path"}, "reward.kwargs.embedder='no_path'; expected FILE.onnx"),
        ("cosine_identity", {"embedder": f"{OWN}:Absent"}, "reward.kwargs.embedder: .*cannot be imported"),
        ("cosine_identity", {"embedder": "gone.onnx"}, "reward.kwargs.embedder='gone.onnx': no such file"),
    ],
)
def test_what_a_configuration_may_say_wrongly(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_visual_reward(FlowRewardConfig(name=name, kwargs=kwargs))


def test_weights_of_a_reward_are_frozen_and_in_evaluation() -> None:
    kwargs = {"embedder": {"name": "torch.nn:Linear", "in_features": 2, "out_features": 3}}
    reward = build_visual_reward(FlowRewardConfig(name="cosine_identity", kwargs=kwargs))
    assert isinstance(reward, torch.nn.Module) and len(list(reward.parameters())) == 2
    assert not reward.training and not any(parameter.requires_grad for parameter in reward.parameters())


# ------------------------------------------------------------------------------------------------------- the door


def test_a_reward_without_a_gradient_is_refused_where_one_is_needed() -> None:
    frames = torch.rand(3, 3, 8, 8, requires_grad=True)
    with pytest.raises(UserError, match="Detached.score is not differentiable.*flow_grpo"):
        score_frames(rewards.Detached(), frames, torch.tensor(0.5))
    assert score_frames(rewards.Detached(), frames.detach(), torch.tensor(0.5)).counted  # none is needed here


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (rewards.PerFrame, "expected a finite scalar"),
        (rewards.NotANumber, "expected a finite scalar"),
        (rewards.PlainNumber, "expected VisualScore"),
    ],
)
def test_a_score_that_cannot_be_learnt_from_is_refused(reward: type[rewards.Redness], told: str) -> None:
    with pytest.raises(UserError, match=told):
        score_frames(reward(), torch.rand(3, 3, 8, 8), torch.tensor(0.5))


def test_a_clip_that_does_not_count_is_worth_0_without_a_gradient() -> None:
    class NothingThere(rewards.Redness):
        def score(self, frames: torch.Tensor, reference: torch.Tensor) -> VisualScore:
            return VisualScore(frames.sum(), counted=False)

    score = score_frames(NothingThere(), torch.ones(2, 3, 4, 4, requires_grad=True), torch.tensor(0.0))
    assert not score.counted and score.value.item() == 0 and not score.value.requires_grad
