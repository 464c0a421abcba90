"""Losses over pairs of a chosen and a rejected answer to the same prompt. Column 0 is the chosen answer."""

import torch.nn.functional as F
from torch import Tensor


def dpo_loss(logps: Tensor, ref_logps: Tensor, beta: float, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7), as TRL's `sigmoid` loss.

    With d = r(chosen) - r(rejected), the loss of a pair is -(1 - s) log sigmoid(d) - s log sigmoid(-d).

    Args:
        logps: (n, 2) log-probabilities of whole answers under the policy, summed over tokens.
        ref_logps: (n, 2) the same under the reference model, without gradient.
        beta: strength of the pull toward the reference; lower values allow larger distances.
        label_smoothing: s, the assumed share of pairs whose answers are swapped; above 0 this is conservative DPO
            (Mitchell 2023).

    Returns:
        (n,) losses, and (n, 2) implicit rewards r = beta * (logps - ref_logps), equation 5 without its constant.
    """
    rewards = beta * (logps - ref_logps)
    # logsigmoid is finite for any margin, unlike the logarithm of a sigmoid
    margins = rewards[:, 0] - rewards[:, 1]
    as_labelled = -F.logsigmoid(margins)
    as_swapped = -F.logsigmoid(-margins)
    losses = (1 - label_smoothing) * as_labelled + label_smoothing * as_swapped
    return losses, rewards
