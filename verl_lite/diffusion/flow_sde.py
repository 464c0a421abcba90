"""The stochastic sampler of a rectified flow, whose denoising steps are actions with a known probability.

A rectified flow moves x_t = (1 - t) x_0 + t x_1 from noise (t = 1, x_1 ~ N(0, I)) to data (t = 0) along
v(x, t) = E[x_1 - x_0 | x_t = x]; here t is sigma. The ODE dx = v dt is deterministic. Noise of any strength g(t) can be
added without changing the distribution at any t if the drift compensates for it (the Fokker-Planck equation; Song et
al. 2021, Score-based generative modeling through stochastic differential equations): backwards in time

    dx = [v - g^2 / 2 * score] dt + g dw,    score(x, t) = -E[x_1 | x_t = x] / t = -(x + (1 - t) v) / t,

since x_1 = x_t + (1 - t) (x_1 - x_0). With g(t) = a sqrt(t / (1 - t)) this is Flow-GRPO's sampler (Liu et al. 2025,
arXiv 2505.05470), a its noise level. One Euler-Maruyama step from t to t' < t is a Gaussian,

    mean = x + [v + g^2 / (2 t) * (x + (1 - t) v)] (t' - t),    std = g sqrt(t - t'),

so a path from noise to an image has a log-probability, which is all that policy gradients need: T steps take the role
of T tokens. The noise would be infinite at t = 1, so the first step uses 1 - t of its end, as in Flow-GRPO's code.

All functions are pure; tensors are (b, ...), with the latent dimensions after the first.
"""

import math

import torch


def step_std(sigma: float, sigma_next: float, noise_level: float) -> float:
    """Returns the standard deviation g(sigma) sqrt(sigma - sigma_next) of a step with 1 >= sigma > sigma_next >= 0."""
    return _diffusion(sigma, sigma_next, noise_level) * math.sqrt(sigma - sigma_next)


def step_mean(
    x: torch.Tensor, velocity: torch.Tensor, sigma: float, sigma_next: float, noise_level: float
) -> torch.Tensor:
    """Returns the mean of a step from x (b, ...); at noise level 0 the Euler step of the ODE.

    Args:
        x: (b, ...) latents at sigma.
        velocity: v(x, sigma).
        sigma: noise level before the step.
        sigma_next: noise level after the step.
        noise_level: the factor a of the noise.
    """
    expected_noise = x + (1 - sigma) * velocity  # E[x_1 | x]
    # the drift compensates for the noise that the step adds, so that the distribution at sigma_next stays the ODE's
    correction = _diffusion(sigma, sigma_next, noise_level) ** 2 / (2 * sigma)
    drift = velocity + correction * expected_noise
    return x + drift * (sigma_next - sigma)


def step_log_prob(x_next: torch.Tensor, mean: torch.Tensor, std: float) -> torch.Tensor:
    """Returns log N(x_next; mean, std^2 I), (b,), as the mean over the latent dimensions; differentiable in `mean`.

    Like Flow-GRPO's code, it averages over the dimensions instead of summing as in a density: a clip range then does
    not depend on the size of the latents, and ratios of thousands of dimensions do not overflow. GSPO likewise averages
    over the tokens of a response. The gradient is that of the sum divided by the number of dimensions. std must be
    above 0.
    """
    distance = (x_next - mean) / std
    squares = distance.square() / 2
    mean_of_squares = squares.flatten(1).mean(1)
    # the density of each dimension is exp(-squares) / (std sqrt(2 pi))
    log_sqrt_of_2_pi = math.log(2 * math.pi) / 2
    return -mean_of_squares - math.log(std) - log_sqrt_of_2_pi


def step_kl(mean: torch.Tensor, reference_mean: torch.Tensor, std: float) -> torch.Tensor:
    """Returns KL(N(mean, std^2 I) || N(reference_mean, std^2 I)), (b,): (mean - reference_mean)^2 / (2 std^2).

    Like `step_log_prob` it is the mean over the latent dimensions. The closed form holds because both have equal noise.
    """
    distance = (mean - reference_mean) / std
    squares = distance.square().flatten(1)
    return squares.mean(1) / 2


def _diffusion(sigma: float, sigma_next: float, noise_level: float) -> float:
    """Returns g(sigma) = noise_level sqrt(sigma / (1 - sigma)); at sigma = 1 the divisor is 1 - sigma_next."""
    divisor = 1 - sigma
    if math.isclose(sigma, 1.0):  # g would be infinite
        divisor = 1 - sigma_next
    return noise_level * math.sqrt(sigma / divisor)
