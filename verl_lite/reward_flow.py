"""The loss of reward flow: a differentiable score of the generated frames, against a divergence from the base model."""

from __future__ import annotations

import torch


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

    face_score: what the frames are worth, with gradient. kl_loss: `flow_match.flow_kl`, averaged over the steps with
    gradient. baseline and std: mean and deviation of the scores of the model before training; they move the loss, and
    std and coef together are the reward's weight. The constants are ROLL's (WanTrainingModule, commit 60044b8b), which
    rounds face_score to bf16 first; here it stays as it is.
    """
    return -(face_score - baseline) / std * coef + kl_coef * kl_loss
