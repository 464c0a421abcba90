"""The sampler's grid, experts, steps and divergence, by hand and against diffusers' scheduler."""

from __future__ import annotations

import pytest
import torch

from verl_lite.diffusion.flow_match import euler_step, flow_kl, flow_sigmas, high_noise_steps, reward_flow_loss

ROLL_TIMESTEPS = [1000, 972.2222222, 937.5, 892.8571429, 833.3333333, 750, 625, 416.6666667, 0]


def test_the_grid_is_rolls() -> None:
    assert [1000 * sigma for sigma in flow_sigmas(8, 5.0)] == pytest.approx(ROLL_TIMESTEPS, abs=1e-6)


@pytest.mark.parametrize(("steps", "shift"), [(8, 5.0), (4, 3.0), (1, 1.0), (50, 8.0)])
def test_the_grid_is_that_of_diffusers_scheduler_given_unshifted_sigmas(steps: int, shift: float) -> None:
    schedulers = pytest.importorskip("diffusers.schedulers.scheduling_flow_match_euler_discrete")
    scheduler = schedulers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
    assert flow_sigmas(steps, shift) == pytest.approx(scheduler.sigmas.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("boundary", "expected"), [(None, 0), (0.9, 3), (0.875, 4), (0.9375, 3), (0.0, 8), (1.0, 1), (1.1, 0)]
)
def test_the_high_noise_expert_has_the_steps_at_and_above_the_boundary(boundary: float | None, expected: int) -> None:
    # timesteps 1000, 972.2, 937.5, 892.9, 833.3, 750, 625, 416.7
    assert high_noise_steps(flow_sigmas(8, 5.0), boundary) == expected


def test_euler_steps_along_a_straight_path_end_at_the_data() -> None:
    data, noise = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 3.0]])
    sigmas, x = flow_sigmas(8, 5.0), noise
    for sigma, next_sigma in zip(sigmas[:-1], sigmas[1:], strict=True):
        x = euler_step(x, noise - data, sigma, next_sigma)
    assert torch.allclose(x, data, atol=1e-6)
    assert euler_step(x, (noise - data).bfloat16(), 0.5, 0.25).dtype == torch.float32


def test_flow_kl_by_hand() -> None:
    velocity = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[0.0, 0.0], [0.0, 0.0]]])
    base = torch.tensor([[[1.0, 0.0], [3.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    # the first sample: squares 0, 4, 0, 16, mean 5, over 2 * 0.25 = 0.5
    assert flow_kl(velocity, base, 0.5).tolist() == [10.0, 0.0]
    assert flow_kl(velocity.bfloat16(), base.bfloat16(), 0.5).dtype == torch.float32


def test_loss_by_hand() -> None:
    score, kl = torch.tensor([0.54, 0.70, 0.38, 0.0]), torch.tensor([0.0, 0.0, 0.25, 0.0])
    # one deviation is worth 0.1; at 0 the score is 3.375 deviations below the baseline
    assert reward_flow_loss(score, kl).tolist() == pytest.approx([0.0, -0.1, 0.35, 0.3375], abs=1e-6)
    changed = reward_flow_loss(torch.tensor(1.0), torch.tensor(2.0), baseline=0.5, std=0.25, coef=2.0, kl_coef=0.5)
    assert changed.item() == pytest.approx(-3.0)
