"""From a name in the configuration to a reward, the door for its scores, and the contract over every registered one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.verl_lite.visual_rewards import rewards
from verl_lite.config.diffusion import FlowRewardConfig
from verl_lite.contracts import BrokenPromise
from verl_lite.errors import UserError
from verl_lite.visual_rewards import VISUAL_REWARDS, VisualScore, build_visual_reward, score_frames
from verl_lite.visual_rewards.base import ColourfulnessReward, colourfulness
from verl_lite.visual_rewards.contract import check_visual_reward, random_clip

OWN = "tests.verl_lite.visual_rewards.rewards"
ARGUMENTS: dict[str, dict[str, Any]] = {"cosine_identity": {"embedder": f"{OWN}:MeanColour"}}
WITHOUT_REFERENCE = {"colourfulness"}

# ---------------------------------------------------------------------------------------------------- the registry


@pytest.mark.parametrize("name", sorted(VISUAL_REWARDS))
def test_every_reward_keeps_its_promises(name: str) -> None:
    reward = build_visual_reward(FlowRewardConfig(name=name, kwargs=ARGUMENTS.get(name, {})))
    check_visual_reward(reward, depends_on_reference=name not in WITHOUT_REFERENCE)


def test_a_reward_of_ones_own_by_its_path_keeps_them_too() -> None:
    reward = build_visual_reward(FlowRewardConfig(name=f"{OWN}:Redness", kwargs={"weight": 2.0}))
    assert isinstance(reward, rewards.Redness) and reward.weight == 2.0
    check_visual_reward(reward)


@pytest.mark.parametrize(
    ("reward", "promise"),
    [
        (rewards.Detached, "not differentiable"),
        (rewards.Flat, "differentiable in the frames"),
        (rewards.PerFrame, "expected a finite scalar"),
        (rewards.Blind, "depends on the reference|score best"),
        (rewards.WrongRange, "score best"),
        (rewards.HalfPrecision, "fp32"),
        (rewards.NotANumber, "finite"),
        (rewards.PlainNumber, "expected VisualScore"),
    ],
)
def test_the_contract_catches_each_broken_promise(reward: type[rewards.Redness], promise: str) -> None:
    with pytest.raises(BrokenPromise, match=promise):
        check_visual_reward(reward())


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("cosine_identiti", {}, "did you mean cosine_identity"),
        (f"{OWN}:Missing", {}, "cannot be imported"),
        (f"{OWN}:Redness", {"wieght": 1.0}, "reward.kwargs=.*wieght"),
        ("cosine_identity", {}, "reward.kwargs=.*embedder"),
        (f"{OWN}:WithoutScore", {}, "without score"),
        (f"{OWN}:F.__name__", {}, "not a callable|not callable"),
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
    frames = (random_clip(1) * 2 - 1).requires_grad_()
    with pytest.raises(UserError, match="Detached.score is not differentiable.*flow_grpo"):
        score_frames(rewards.Detached(), frames, torch.tensor(0.5))
    assert score_frames(rewards.Detached(), frames.detach(), torch.tensor(0.5)).counted  # none is needed here


def test_a_clip_that_does_not_count_is_worth_0_without_a_gradient() -> None:
    class NothingThere(rewards.Redness):
        def score(self, frames: torch.Tensor, reference: torch.Tensor) -> VisualScore:
            return VisualScore(frames.sum(), counted=False)

    score = score_frames(NothingThere(), torch.ones(2, 3, 4, 4, requires_grad=True), torch.tensor(0.0))
    assert not score.counted and score.value.item() == 0 and not score.value.requires_grad


def test_colourfulness_is_the_papers_formula() -> None:
    """M3 in numpy, on pixels in [0, 255]."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 7)).astype(np.float64)
    expected = []
    for red, green, blue in pixels:
        rg, yb = red - green, 0.5 * (red + green) - blue
        spread, mean = np.hypot(rg.std(), yb.std()), np.hypot(rg.mean(), yb.mean())
        expected.append(spread + 0.3 * mean)
    found = colourfulness(torch.from_numpy(pixels / 255)) * 255
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_grey_is_0_and_has_a_finite_gradient() -> None:
    grey = torch.zeros(2, 3, 4, 4, requires_grad=True)
    value = ColourfulnessReward().score(grey, None).value
    assert value.item() == pytest.approx(0.0, abs=1e-4)
    (gradient,) = torch.autograd.grad(value, grey)
    assert bool(torch.isfinite(gradient).all())
