"""Sampling from noise to latents, with a gradient through its last steps.

The first steps run without gradient. The last ones are one differentiable function: the latents are not detached
between them, so that what an early step does to the later ones is part of the gradient. Beside each of these steps the
base model's velocity at the same latents, without gradient, gives the divergence from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from verl_lite.flow_match import euler_step, flow_kl

# (latents (b, C, T, h, w), sigma) -> velocity of the same shape
Velocity = Callable[[torch.Tensor, float], torch.Tensor]
Latents = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def denoise(
    x: torch.Tensor, sigmas: Sequence[float], steps: range, velocity: Velocity, condition: Latents
) -> torch.Tensor:
    """Latents after `steps`, without gradient.

    x: (b, C, T, h, w) at sigmas[steps.start]. condition: puts the first frame in its place, after each step.
    """
    for step in steps:
        x = condition(euler_step(x, velocity(x, sigmas[step]), sigmas[step], sigmas[step + 1]))
    return x


def denoise_with_gradient(
    x: torch.Tensor,
    sigmas: Sequence[float],
    steps: range,
    velocity: Velocity,
    base_velocity: Velocity | None,
    condition: Latents,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents after `steps`, and how far the velocities are from the base model's, (b,), averaged over the steps.

    base_velocity: asked without gradient; None = not asked, the divergence is 0. Arguments as of `denoise`.
    """
    kl = torch.zeros(len(x), device=x.device)
    for step in steps:
        sigma, now = sigmas[step], x
        v = velocity(now, sigma)
        if base_velocity is not None:
            with torch.no_grad():
                base = base_velocity(now, sigma)
            kl = kl + flow_kl(v, base, sigma)
        x = condition(euler_step(now, v, sigma, sigmas[step + 1]))
    return x, kl / max(1, len(steps))


def noise_of(seeds: Sequence[int], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Standard normal (b, *shape), fp32: each sample's depends on its own seed alone, on every device alike."""
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    return torch.stack(rows).to(device)
