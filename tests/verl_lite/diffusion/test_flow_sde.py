"""The stochastic sampler has the ODE's marginals, and its steps are the Gaussians that torch knows."""

from __future__ import annotations

import math

import pytest
import torch

from verl_lite.diffusion.flow_sde import step_kl, step_log_prob, step_mean, step_std

MEAN, STD = 0.7, 0.4
"""Of the data. For Gaussian data every marginal and the velocity are known."""


def marginal(sigma: float) -> tuple[float, float]:
    """Mean and variance of (1 - sigma) x_0 + sigma x_1."""
    return (1 - sigma) * MEAN, ((1 - sigma) * STD) ** 2 + sigma**2


def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """E[x_1 - x_0 | x], the regression of x_1 - x_0 on x."""
    mean, variance = marginal(sigma)
    covariance = sigma - (1 - sigma) * STD**2
    return -MEAN + covariance / variance * (x - mean)


def run(start: float, stop: float, steps: int, noise_level: float, rows: int = 10_000) -> torch.Tensor:
    """Samples at `stop`, begun from the marginal at `start`."""
    generator = torch.Generator().manual_seed(0)
    mean, variance = marginal(start)
    x = mean + math.sqrt(variance) * torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    grid = torch.linspace(start, stop, steps + 1, dtype=torch.float64).tolist()
    for sigma, sigma_next in zip(grid, grid[1:], strict=False):
        noise = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
        x = step_mean(x, velocity(x, sigma), sigma, sigma_next, noise_level)
        x += step_std(sigma, sigma_next, noise_level) * noise
    return x


@pytest.mark.parametrize("noise_level", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("stop", [0.5, 0.1, 0.0])
def test_marginals_do_not_depend_on_the_noise(noise_level: float, stop: float) -> None:
    x = run(0.95, stop, steps=150, noise_level=noise_level)
    mean, variance = marginal(stop)
    assert float(x.mean()) == pytest.approx(mean, abs=0.02)
    assert float(x.std()) == pytest.approx(math.sqrt(variance), abs=0.02)


def test_the_path_is_random_where_there_is_noise() -> None:
    """Equal marginals are no proof by themselves: the ODE has them too, and keeps the order of its starts."""
    generator = torch.Generator().manual_seed(0)
    x = start = torch.randn(5_000, 1, generator=generator, dtype=torch.float64)
    grid = torch.linspace(1, 0, 101, dtype=torch.float64).tolist()
    for sigma, sigma_next in zip(grid, grid[1:], strict=False):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        x = step_mean(x, velocity(x, sigma), sigma, sigma_next, 1.0) + step_std(sigma, sigma_next, 1.0) * noise
    assert abs(float(torch.corrcoef(torch.stack([start, x]).squeeze(-1))[0, 1])) < 0.3


def test_a_step_by_hand() -> None:
    """g^2 = 0.25 * 0.8 / 0.2 = 1; E[x_1] = 1 + 0.2 * 0.5 = 1.1; drift = 0.5 + 1.1 / 1.6 = 1.1875."""
    mean = step_mean(torch.tensor([[1.0]]), torch.tensor([[0.5]]), 0.8, 0.6, 0.5)
    assert float(mean) == pytest.approx(1 - 0.2 * 1.1875)
    assert step_std(0.8, 0.6, 0.5) == pytest.approx(math.sqrt(0.2))
    assert step_std(1.0, 0.75, 0.5) == pytest.approx(0.5 * math.sqrt(0.25 / 0.25))  # 1 - sigma of the step's end


def test_log_prob_is_torchs_mean_over_dimensions_and_has_its_gradient() -> None:
    torch.manual_seed(0)
    mean, x_next = torch.randn(3, 2, 4, 4, requires_grad=True), torch.randn(3, 2, 4, 4)
    expected = torch.distributions.Normal(mean, 0.3).log_prob(x_next).mean((1, 2, 3))
    found = step_log_prob(x_next, mean, 0.3)
    torch.testing.assert_close(found, expected)
    weights = torch.tensor([1.0, -2.0, 0.5])
    [gradient] = torch.autograd.grad((weights * found).sum(), mean)
    [expected_gradient] = torch.autograd.grad((weights * expected).sum(), mean)
    torch.testing.assert_close(gradient, expected_gradient)


def test_kl_is_torchs() -> None:
    torch.manual_seed(0)
    mean, other, std = torch.randn(2, 6), torch.randn(2, 6), 0.8
    normal, reference = torch.distributions.Normal(mean, std), torch.distributions.Normal(other, std)
    torch.testing.assert_close(step_kl(mean, other, std), torch.distributions.kl_divergence(normal, reference).mean(1))
    assert not step_kl(mean, mean, std).any()
