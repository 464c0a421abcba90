"""The deterministic sampler of a flow-matching model (sigmas, experts, Euler steps, divergence from the base model) and
the loss of reward flow.

The model predicts v = dx / dsigma between noise (sigma = 1) and data (sigma = 0); its input is the timestep 1000 sigma.
All functions are pure; tensors are (b, ...). `verl_lite.diffusion.flow_sde` has the sampler with noise.
"""

import torch

TRAIN_TIMESTEPS = 1000  # timestep of sigma = 1


def flow_sigmas(num_inference_steps: int, shift: float) -> list[float]:
    """Returns N + 1 sigmas from 1 to 0: shift s / (1 + (shift - 1) s) with s = 1 - i / N.

    For N = 8 and shift 5 the timesteps are 1000, 972.22, 937.5, 892.86, 833.33, 750, 625, 416.67, 0. Schedulers of
    diffusers return the same for set_timesteps(sigmas=[1 - i / N ...]), but not for set_timesteps(N), which shifts end
    points that are already shifted.
    """
    sigmas = []
    for i in range(num_inference_steps + 1):
        s = 1 - i / num_inference_steps
        sigmas.append(shift * s / (1 + (shift - 1) * s))
    return sigmas


def high_noise_steps(sigmas: list[float], boundary_ratio: float | None) -> int:
    """Returns the number of first steps that the high-noise expert runs: steps with timestep >= 1000 boundary_ratio.

    Args:
        sigmas: decreasing, from `flow_sigmas`.
        boundary_ratio: None for a model with one expert; the result is then 0.
    """
    if boundary_ratio is None:
        return 0
    # compared as timesteps, as in diffusers' Wan pipeline
    boundary = boundary_ratio * TRAIN_TIMESTEPS
    # the last sigma is the end of the last step
    timesteps = [sigma * TRAIN_TIMESTEPS for sigma in sigmas[:-1]]
    return sum(timestep >= boundary for timestep in timesteps)


def euler_step(x: torch.Tensor, velocity: torch.Tensor, sigma: float, next_sigma: float) -> torch.Tensor:
    """Returns x at next_sigma, in the dtype of x (fp32, because rounding errors of the steps would accumulate)."""
    return x + (next_sigma - sigma) * velocity.to(x.dtype)


def flow_kl(velocity: torch.Tensor, base_velocity: torch.Tensor, sigma: float) -> torch.Tensor:
    """Returns mean((v - v0)^2 / (2 sigma^2)) per sample, (b,), in fp32 (fp64 for fp64); exactly 0 for equal velocities.

    This divergence is ROLL's: the KL of two Gaussians around the steps, up to the scale of the steps.
    """
    dtype = torch.promote_types(velocity.dtype, torch.float32)
    difference = velocity.to(dtype) - base_velocity.to(dtype)
    squares = difference.square().flatten(1)
    variance = sigma**2
    return squares.mean(1) / (2 * variance)


def reward_flow_loss(
    face_score: torch.Tensor,
    kl_loss: torch.Tensor,
    *,
    baseline: float = 0.54,
    std: float = 0.16,
    coef: float = 0.1,
    kl_coef: float = 1.0,
) -> torch.Tensor:
    """Returns -(face_score - baseline) / std * coef + kl_coef * kl_loss per sample, in the shape of the arguments.

    The defaults are ROLL's (WanTrainingModule, commit 60044b8b). ROLL rounds face_score to bf16 first; this function
    does not.

    Args:
        face_score: score of the frames, with gradient.
        kl_loss: `flow_kl`, averaged over the steps with gradient.
        baseline, std: mean and standard deviation of the initial model's scores. baseline only shifts the loss;
            coef / std is the weight of the reward.
    """
    return -(face_score - baseline) / std * coef + kl_coef * kl_loss
