"""Policy losses of the form -w A log_prob with a weight w without gradient: REINFORCE and its off-policy variants.

kimi15 and dro add the squared log-ratio instead of a weight. `policy_losses` defines the notation.
"""

import math

import torch
from torch import Tensor

from verl_lite.algos.loss_inputs import LossInputs, LossResult, clip_range
from verl_lite.algos.policy_loss_registry import register_policy_loss


@register_policy_loss("gpg")
def gpg(inputs: LossInputs) -> LossResult:
    """GPG: -A log_prob, the plain policy gradient (arXiv:2504.02546)."""
    losses = -inputs.advantages * inputs.log_prob
    return inputs.aggregate(losses), inputs.token_means()


@register_policy_loss("cispo", bounds_ratio=True)
def cispo(inputs: LossInputs) -> LossResult:
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A log_prob; clipped tokens keep a gradient (arXiv:2506.13585).

    config: clip ranges (ROLL's cispo_epsilon_low and _high), ratio_type. config.policy_loss.cispo_unified_mask drops
    the loss of tokens that PPO's clip would drop: r above the range with A > 0, or below it with A < 0.
    """
    low, high = clip_range(inputs.config)
    losses, is_truncated = _truncated(inputs, 1 - low, 1 + high)
    # verl's config has no such option
    if getattr(inputs.config.policy_loss, "cispo_unified_mask", False):
        ratio = inputs.importance_log_ratio.exp()
        is_below_upper = ratio <= 1 + high
        is_above_lower = ratio >= 1 - low
        has_loss = torch.where(inputs.advantages > 0, is_below_upper, is_above_lower)
        losses = torch.where(has_loss, losses, 0)
    return inputs.aggregate(losses), inputs.token_means(pg_clipfrac=is_truncated)


@register_policy_loss("tis", bounds_ratio=True)
def tis(inputs: LossInputs) -> LossResult:
    """Truncated importance sampling (ROLL): -sg(clamp(r, lower, upper)) A log_prob.

    config.policy_loss: tis_lower_bound, tis_upper_bound; config.ratio_type.
    """
    options = inputs.config.policy_loss
    low = options.tis_lower_bound
    high = options.tis_upper_bound
    if not low < high:
        raise ValueError(f"tis_lower_bound={low}, tis_upper_bound={high}: the lower is expected below the upper.")
    losses, is_truncated = _truncated(inputs, low, high)
    return inputs.aggregate(losses), inputs.token_means(pg_clipfrac=is_truncated)


def _truncated(inputs: LossInputs, lower: float, upper: float) -> tuple[Tensor, Tensor]:
    """Returns -sg(clamp(r, lower, upper)) A log_prob and whether the clamp changed r, both (b, R)."""
    # without gradient, so that a truncated token keeps that of its log_prob
    ratio = inputs.importance_log_ratio.detach().exp()
    truncated = ratio.clamp(lower, upper)
    losses = -truncated * inputs.advantages * inputs.log_prob
    is_truncated = truncated != ratio
    return losses, is_truncated


@register_policy_loss("topr", columns=("scores",), bounds_ratio=True)
def topr(inputs: LossInputs) -> LossResult:
    """TOPR: REINFORCE for good responses; for bad responses the ratio is truncated to [0, 1] (arXiv:2503.14286).

    -w_pos A log_prob for a good response, else -w_neg sg(clamp(r, 0, 1)) A log_prob. The weights w are
    config.policy_loss.topr_positive_weight and topr_negative_weight; config.ratio_type applies to r. A response is good
    if its score is above 0, as in ROLL. Without scores a token is good if its advantage is above 0.
    """
    options = inputs.config.policy_loss
    # so that the loss can be called without scores
    is_good = inputs.advantages > 0
    if inputs.scores is not None:
        is_good = (inputs.scores > 0).unsqueeze(-1).expand_as(inputs.advantages)

    ratio = inputs.importance_log_ratio.detach().exp()
    bad_weights = options.topr_negative_weight * ratio.clamp(0.0, 1.0)
    weights = torch.where(is_good, options.topr_positive_weight, bad_weights)
    losses = -weights * inputs.advantages * inputs.log_prob
    is_truncated = ~is_good & (ratio > 1)
    return inputs.aggregate(losses), inputs.token_means(pg_clipfrac=is_truncated)


@register_policy_loss("kimi15")
def kimi15(inputs: LossInputs) -> LossResult:
    """Kimi k1.5: -A log_prob + tau / 2 d^2 (arXiv:2501.12599), tau = config.policy_loss.kimi15_tau."""
    tau = inputs.config.policy_loss.kimi15_tau
    difference = inputs.log_prob - inputs.old_log_prob
    penalty = 0.5 * tau * difference.square()
    losses = -inputs.advantages * inputs.log_prob + penalty
    return inputs.aggregate(losses), inputs.token_means()


@register_policy_loss("dro", needs=("dro_beta",))
def dro(inputs: LossInputs) -> LossResult:
    """DRO: -(A log_prob - beta / 2 d^2) (arXiv:2405.19107), beta = config.policy_loss.dro_beta.

    Raises ValueError unless beta is above 0.
    """
    beta = inputs.config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ValueError(f"dro_beta={beta}: dro needs a number above 0.")
    difference = inputs.log_prob - inputs.old_log_prob
    penalty = 0.5 * beta * difference.square()
    losses = -(inputs.advantages * inputs.log_prob - penalty)
    return inputs.aggregate(losses), inputs.token_means()


@register_policy_loss("dppo_tv", bounds_ratio=True)
def dppo_tv(inputs: LossInputs) -> LossResult:
    """DPPO with total variation: -sg(min(r, c)) A log_prob for a token inside the region, else 0 (arXiv:2602.04879).

    A token is inside if p - p_old <= high where A > 0, or p - p_old >= -low elsewhere. The clip ranges bound
    differences of probabilities, and clip_ratio_c = c bounds the weight; 20 works better than PPO's 3. Metrics, as in
    verl: pg_clipfrac, the share of tokens outside; pg_clipfrac_lower, the share of tokens inside with a ratio above c.
    """
    low, high = clip_range(inputs.config)
    new = inputs.log_prob.detach().exp()
    old = inputs.old_log_prob.exp()
    shift = new - old
    is_inside_if_good = shift <= high
    is_inside_if_bad = shift >= -low
    is_inside = torch.where(inputs.advantages > 0, is_inside_if_good, is_inside_if_bad)
    return _loss_inside(inputs, is_inside)


@register_policy_loss("dppo_kl", bounds_ratio=True)
def dppo_kl(inputs: LossInputs) -> LossResult:
    """DPPO with the binary KL divergence of the sampled token against all others (arXiv:2602.04879).

    A token is inside if p_old (log p_old - log p) + (1 - p_old) log((1 - p_old) / (1 - p)) is at most high where A > 0
    (low elsewhere), or if its update reduces the divergence: p <= p_old where A > 0, p >= p_old elsewhere. The loss and
    the metrics are those of `dppo_tv`.
    """
    low, high = clip_range(inputs.config)
    old_log_prob = inputs.old_log_prob
    new_log_prob = inputs.log_prob.detach()
    old = old_log_prob.exp()
    new = new_log_prob.exp()
    of_sampled_token = old * (old_log_prob - new_log_prob)
    # 1e-8: a probability of 1 leaves 0 to the other tokens
    odds = (1 - old + 1e-8) / (1 - new + 1e-8)
    of_other_tokens = (1 - old) * torch.log(odds)
    divergence = of_sampled_token + of_other_tokens

    is_inside_if_good = (divergence <= high) | (new <= old)
    is_inside_if_bad = (divergence <= low) | (new >= old)
    is_inside = torch.where(inputs.advantages > 0, is_inside_if_good, is_inside_if_bad)
    return _loss_inside(inputs, is_inside)


def _loss_inside(inputs: LossInputs, is_inside: Tensor) -> LossResult:
    """Computes the loss and the metrics of DPPO. is_inside: (b, R) bool."""
    bound = inputs.config.clip_ratio_c
    if bound is None:
        bound = math.inf
    if bound <= 1.0:
        raise ValueError(f"clip_ratio_c={bound}: it bounds ratios above 1; set it above 1.0.")
    # a constant: the gradient is that of log_prob alone
    ratio = inputs.log_ratio.detach().exp()
    weights = ratio.clamp(max=bound)
    losses = -weights * inputs.advantages * inputs.log_prob
    losses = torch.where(is_inside, losses, 0)

    is_bounded = is_inside & (ratio > bound)
    metrics = inputs.token_means(pg_clipfrac=~is_inside, pg_clipfrac_lower=is_bounded)
    return inputs.aggregate(losses), metrics
