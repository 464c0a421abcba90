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


def denoise(
    x: torch.Tensor,
    sigmas: Sequence[float],
    steps: range,
    velocity: Velocity,
    condition: Latents,
    base_velocity: Velocity | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents after `steps`, and how far the velocities are from the base model's, (b,), averaged over the steps.

    x: (b, C, T, h, w) at sigmas[steps.start]. condition: puts the first frame in its place, after each step.
    base_velocity: asked without gradient; None = not asked, the divergence is 0.
    """
    kl = torch.zeros(len(x), device=x.device)
    for step in steps:
        sigma, v = sigmas[step], velocity(x, sigmas[step])
        if base_velocity is not None:
            with torch.no_grad():
                base = base_velocity(x, sigma)
            kl = kl + flow_kl(v, base, sigma)
        x = condition(euler_step(x, v, sigma, sigmas[step + 1]))
    return x, kl / max(1, len(steps))


def noise_of(seeds: Sequence[int], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Standard normal (b, *shape), fp32: each sample's depends on its own seed alone, on every device alike."""
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    return torch.stack(rows).to(device)
