"""The noise-free sampler of a flow-matching model: its grid of sigmas, which expert works where, Euler steps, and how
far a velocity is from the base model's; and the loss of reward flow.

The model predicts v = dx / dsigma on the way from noise (sigma = 1) to data (sigma = 0); it is told the timestep
1000 sigma. Pure functions; tensors are (b, ...). `flow_sde` beside this file has the sampler with noise.
"""

import torch

TRAIN_TIMESTEPS = 1000  # what a model is told for sigma = 1


def flow_sigmas(num_inference_steps: int, shift: float) -> list[float]:
    """N + 1 sigmas from 1 to 0: shift s / (1 + (shift - 1) s) with s = 1 - i / N.

    For N = 8 and shift 5 the timesteps are 1000, 972.22, 937.5, 892.86, 833.33, 750, 625, 416.67, 0. A scheduler of
    diffusers gives these for set_timesteps(sigmas=[1 - i / N ...]); set_timesteps(N) is another grid, because it
    shifts ends that were shifted already.
    """
    places = [1 - i / num_inference_steps for i in range(num_inference_steps + 1)]
    return [shift * s / (1 + (shift - 1) * s) for s in places]


def high_noise_steps(sigmas: list[float], boundary_ratio: float | None) -> int:
    """How many of the first steps are the high-noise expert's: those with timestep >= 1000 boundary_ratio.

    sigmas: from `flow_sigmas`, falling. boundary_ratio: None = there is one expert, and none of the steps is.
    """
    if boundary_ratio is None:
        return 0
    boundary = boundary_ratio * TRAIN_TIMESTEPS
    return sum(sigma * TRAIN_TIMESTEPS >= boundary for sigma in sigmas[:-1])


def euler_step(x: torch.Tensor, velocity: torch.Tensor, sigma: float, next_sigma: float) -> torch.Tensor:
    """x at next_sigma, in the dtype of x (fp32: eight rounded steps would add up)."""
    return x + (next_sigma - sigma) * velocity.to(x.dtype)


def flow_kl(velocity: torch.Tensor, base_velocity: torch.Tensor, sigma: float) -> torch.Tensor:
    """mean((v - v0)^2 / (2 sigma^2)) of each sample, (b,), fp32 (fp64 for fp64): exactly 0 where both are equal.

    ROLL's reward flow: the divergence of two Gaussians around the steps, up to the steps' own scale.
    """
    dtype = torch.promote_types(velocity.dtype, torch.float32)
    difference = velocity.to(dtype) - base_velocity.to(dtype)
    return difference.square().flatten(1).mean(1) / (2 * sigma**2)


def reward_flow_loss(
    face_score: torch.Tensor,
    kl_loss: torch.Tensor,
    *,
    baseline: float = 0.54,
    std: float = 0.16,
    coef: float = 0.1,
    kl_coef: float = 1.0,
) -> torch.Tensor:
    """-(face_score - baseline) / std * coef + kl_coef * kl_loss, of each sample, in the shape of the arguments.

    face_score: what the frames are worth, with gradient. kl_loss: `flow_kl`, averaged over the steps with
    gradient. baseline and std: mean and deviation of the scores of the model before training; they move the loss, and
    std and coef together are the reward's weight. The constants are ROLL's (WanTrainingModule, commit 60044b8b), which
    rounds face_score to bf16 first; here it stays as it is.
    """
    return -(face_score - baseline) / std * coef + kl_coef * kl_loss
