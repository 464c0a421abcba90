"""The rewards that need no face."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_lite.visual_rewards.colour import VERY_COLOURFUL, ColourfulnessReward, MatchColourReward, colourfulness


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


def test_one_red_half_by_hand() -> None:
    """Half red, half black: rg is 1 or 0 (mean 1/2, deviation 1/2), yb is 1/2 or 0 (mean and deviation 1/4)."""
    frame = torch.full((1, 3, 2, 2), -1.0)
    frame[:, 0, :, 0] = 1.0
    expected = 1.3 * (0.25 + 0.0625) ** 0.5 / VERY_COLOURFUL
    assert ColourfulnessReward().score(frame, None).value.item() == pytest.approx(expected, rel=1e-5)


def test_matching_colours_by_hand() -> None:
    """The same clip scores 1; one whose every channel is 0.25 brighter and as spread scores 0.75."""
    reward = MatchColourReward()
    clip = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.5
    reference = reward.prepare(clip)
    assert reward.score(clip * 2 - 1, reference).value.item() == pytest.approx(1.0, abs=1e-5)
    assert reward.score((clip + 0.25) * 2 - 1, reference).value.item() == pytest.approx(0.75, abs=1e-5)
