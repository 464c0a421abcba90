"""Policy losses of the form -w A log_prob with a weight w without gradient: REINFORCE and its off-policy variants.

kimi15 and dro add the squared log-ratio instead of a weight. `policy_losses` defines the notation and the decorator.
"""

import math
from typing import Any

import torch
from torch import Tensor

from verl_lite.algos.policy_losses import TokenLosses, bounded_log_ratio, clip_range, importance_log_ratio, policy_loss


@policy_loss("gpg", bounds_ratio=False)
def compute_policy_loss_gpg(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> TokenLosses:
    """GPG: -A log_prob, the plain policy gradient (arXiv:2504.02546)."""
    return -advantages * log_prob, {}


@policy_loss("cispo")
def compute_policy_loss_cispo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> TokenLosses:
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A log_prob: clipped tokens keep a gradient (arXiv:2506.13585).

    config: clip ranges (ROLL's cispo_epsilon_low and _high), ratio_type. config.policy_loss.cispo_unified_mask drops
    the loss of tokens that PPO's clip would drop: r above the range with A > 0, or below it with A < 0.
    """
    low, high = clip_range(config)
    losses, averages = _truncated(old_log_prob, log_prob, advantages, response_mask, config, 1 - low, 1 + high)
    if getattr(config.policy_loss, "cispo_unified_mask", False):  # verl's config has no such option
        ratio = importance_log_ratio(log_prob, old_log_prob, response_mask, config).exp()
        losses = torch.where(torch.where(advantages > 0, ratio <= 1 + high, ratio >= 1 - low), losses, 0)
    return losses, averages


@policy_loss("tis")
def compute_policy_loss_tis(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> TokenLosses:
    """Truncated importance sampling (ROLL): -sg(clamp(r, lower, upper)) A log_prob.

    config.policy_loss: tis_lower_bound, tis_upper_bound; config.ratio_type.
    """
    low, high = config.policy_loss.tis_lower_bound, config.policy_loss.tis_upper_bound
    if not low < high:
        raise ValueError(f"tis_lower_bound={low}, tis_upper_bound={high}: the lower is expected below the upper.")
    return _truncated(old_log_prob, log_prob, advantages, response_mask, config, low, high)


def _truncated(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    lower: float,
    upper: float,
) -> TokenLosses:
    ratio = importance_log_ratio(log_prob, old_log_prob, response_mask, config).detach().exp()
    truncated = ratio.clamp(lower, upper)
    return -truncated * advantages * log_prob, {"pg_clipfrac": truncated != ratio}


@policy_loss("topr")
def compute_policy_loss_topr(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    scores: Tensor | None = None,
) -> TokenLosses:
    """TOPR: REINFORCE for good responses; for bad responses the ratio is truncated to [0, 1] (arXiv:2503.14286).

    -w_pos A log_prob for a good response, else -w_neg sg(clamp(r, 0, 1)) A log_prob. The weights w are
    config.policy_loss.topr_positive_weight and topr_negative_weight; config.ratio_type applies to r. A response is good
    if its score in `scores` (B,) is above 0, as in ROLL. Without scores a token is good if its advantage is above 0.
    """
    options = config.policy_loss
    ratio = importance_log_ratio(log_prob, old_log_prob, response_mask, config).detach().exp()
    is_good = (advantages > 0) if scores is None else (scores > 0).unsqueeze(-1).expand_as(advantages)
    tapered = options.topr_negative_weight * ratio.clamp(0.0, 1.0)
    weights = torch.where(is_good, options.topr_positive_weight, tapered)
    return -weights * advantages * log_prob, {"pg_clipfrac": ~is_good & (ratio > 1)}


@policy_loss("kimi15", bounds_ratio=False)
def compute_policy_loss_kimi15(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> TokenLosses:
    """Kimi k1.5: -A log_prob + tau / 2 d^2 (arXiv:2501.12599), tau = config.policy_loss.kimi15_tau."""
    difference = log_prob - old_log_prob
    return -advantages * log_prob + 0.5 * config.policy_loss.kimi15_tau * difference.square(), {}


@policy_loss("dro", needs=("dro_beta",), bounds_ratio=False)
def compute_policy_loss_dro(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> TokenLosses:
    """DRO: -(A log_prob - beta / 2 d^2) (arXiv:2405.19107), beta = config.policy_loss.dro_beta.

    Raises ValueError unless beta is above 0.
    """
    beta = config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ValueError(f"dro_beta={beta}: dro needs a number above 0.")
    difference = log_prob - old_log_prob
    return -(advantages * log_prob - 0.5 * beta * difference.square()), {}


@policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> TokenLosses:
    """DPPO with total variation: -sg(min(r, c)) A log_prob for a token inside the region, else 0 (arXiv:2602.04879).

    A token is inside if p - p_old <= high where A > 0, or p - p_old >= -low elsewhere. The clip ranges bound
    differences of probabilities, and clip_ratio_c = c bounds the weight; 20 works better than PPO's 3. Metrics, as in
    verl: pg_clipfrac, the share of tokens outside; pg_clipfrac_lower, the share of tokens inside with a ratio above c.
    """
    low, high = clip_range(config)
    shift = (log_prob.exp() - old_log_prob.exp()).detach()
    is_inside = torch.where(advantages > 0, shift <= high, shift >= -low)
    return _divergence_gated(old_log_prob, log_prob, advantages, response_mask, config, is_inside)


@policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> TokenLosses:
    """DPPO with the binary KL divergence of the sampled token against all others (arXiv:2602.04879).

    A token is inside if p_old (log p_old - log p) + (1 - p_old) log((1 - p_old) / (1 - p)) is at most high where A > 0
    (low elsewhere), or if its update reduces the divergence: p <= p_old where A > 0, p >= p_old elsewhere. The loss and
    the metrics are those of `compute_policy_loss_dppo_tv`.
    """
    low, high = clip_range(config)
    old, new = old_log_prob.exp(), log_prob.detach().exp()
    others = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    divergence = old * (old_log_prob - log_prob.detach()) + others
    is_inside = torch.where(advantages > 0, (divergence <= high) | (new <= old), (divergence <= low) | (new >= old))
    return _divergence_gated(old_log_prob, log_prob, advantages, response_mask, config, is_inside)


def _divergence_gated(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any, is_inside: Tensor
) -> TokenLosses:
    bound = math.inf if config.clip_ratio_c is None else config.clip_ratio_c
    if bound <= 1.0:
        raise ValueError(f"clip_ratio_c={bound}: it bounds ratios above 1; set it above 1.0.")
    ratio = bounded_log_ratio(log_prob.detach(), old_log_prob).exp()
    losses = torch.where(is_inside, -ratio.clamp(max=bound) * advantages * log_prob, 0)
    return losses, {"pg_clipfrac": ~is_inside, "pg_clipfrac_lower": is_inside & (ratio > bound)}
