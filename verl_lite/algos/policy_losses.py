"""Policy losses of verl and ROLL: compute a scalar loss and its metrics from log-probs and advantages.

Each loss is a function of `LossInputs`. Notation: d = log_prob - old_log_prob clamped to +-20, r = exp(d), A the
advantage, sg = stop gradient. Each loss has the metric ppo_kl, the mean of -d, unless it returns its own.

No loss depends on how the batch is split: formulas read a token or its row, and rows are never split. This file has the
losses whose gradient flows through the ratio. `reinforce_losses` has the losses of REINFORCE's form,
`covariance_losses` the losses that compare a token with all others. `core_algos` has all of them under verl's names.
"""

import warnings

import torch
from torch import Tensor

from verl_lite.algos.loss_inputs import LossInputs, LossResult, clip_range, require_clip_range
from verl_lite.algos.masked import agg_loss, at_least_fp32, check_shapes, masked_log_ratio, masked_mean
from verl_lite.algos.policy_loss_registry import register_policy_loss

SEQUENCE_MEAN = "seq-mean-token-mean"
"""The aggregation mode with which gspo, sapo and geo_mean are defined."""


@register_policy_loss("vanilla", bounds_ratio=True)
def vanilla(inputs: LossInputs) -> LossResult:
    """PPO: max(-A r, -A clip(r, 1 - low, 1 + high)), at most -A c where A < 0; see `clipped_surrogate`.

    config: clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c = c (ROLL's dual_clip_loss: 1 + 2 clip_ratio),
    loss_scale_factor, ratio_type (segment: one ratio per run of response tokens).
    Metrics: pg_clipfrac, pg_clipfrac_lower (shares of tokens).
    """
    low, high = clip_range(inputs.config)
    losses, is_clipped, is_bounded = clipped_surrogate(
        inputs.importance_log_ratio, inputs.advantages, low, high, inputs.config.clip_ratio_c
    )
    return inputs.aggregate(losses), inputs.token_means(pg_clipfrac=is_clipped, pg_clipfrac_lower=is_bounded)


@register_policy_loss("a3po", columns=("staleness",), bounds_ratio=True)
def a3po(inputs: LossInputs) -> LossResult:
    """A-3PO: decoupled PPO with an interpolated proximal policy (arXiv:2512.06547; AReaL's prox_logp_method=loglinear).

    old_log_prob is that of the policy that sampled the token, s weight updates ago. The proximal policy is not
    computed: log pi_prox = old_log_prob + a sg(d) with a = (s - 1) / s, and a = 0 for s = 0. The loss is
    sg(pi_prox / pi_old) times `clipped_surrogate` of pi / pi_prox. For example, s = 2, pi / pi_old = 1.44 and A = 1
    give pi_prox / pi_old = 1.2 and the loss -1.2 min(1.2, 1 + high). staleness: s; None = 0, which gives PPO.
    config: as for vanilla, without ratio_type. Metrics: pg_clipfrac, pg_clipfrac_lower.
    """
    low, high = clip_range(inputs.config)
    log_ratio = inputs.log_ratio
    # log pi_prox - log pi_old, 0 as long as no weight update separates the two
    proximal = torch.zeros_like(log_ratio)
    if inputs.staleness is not None:
        # 0 counts as 1, because a is 0 for both
        updates = inputs.staleness.clamp(min=1).to(log_ratio.dtype)
        proximal = log_ratio.detach() * (1 - 1 / updates)

    surrogate, is_clipped, is_bounded = clipped_surrogate(
        log_ratio - proximal, inputs.advantages, low, high, inputs.config.clip_ratio_c
    )
    losses = proximal.exp() * surrogate
    return inputs.aggregate(losses), inputs.token_means(pg_clipfrac=is_clipped, pg_clipfrac_lower=is_bounded)


@register_policy_loss("gspo", loss_agg_mode=SEQUENCE_MEAN, bounds_ratio=True)
def gspo(inputs: LossInputs) -> LossResult:
    """GSPO: max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(mean of d over the row) (arXiv:2507.18071).

    Computed per token as s = sg(s) exp(log_prob - sg(log_prob)), so that advantages may differ within a row
    (GSPO-token); log s is at most 10. The aggregation mode is always seq-mean-token-mean, as in the paper (verl 0.9.1:
    loss_agg_mode).
    """
    low, high = clip_range(inputs.config)
    token_log_ratio = inputs.log_ratio.detach()
    row_log_ratio = masked_mean(token_log_ratio, inputs.response_mask, axis=-1)
    # the value is that of the row, the gradient that of the token
    zero_with_gradient = inputs.log_prob - inputs.log_prob.detach()
    log_ratio = zero_with_gradient + row_log_ratio.unsqueeze(-1)
    # verl's bound
    log_ratio = log_ratio.clamp(max=10.0)

    losses, is_clipped, _ = clipped_surrogate(log_ratio, inputs.advantages, low, high, clip_ratio_c=None)
    # not a mean over tokens, in which the ratio of a long response would have more weight
    loss = inputs.aggregate(losses, loss_agg_mode=SEQUENCE_MEAN)
    return loss, inputs.token_means(pg_clipfrac=is_clipped)


@register_policy_loss("sapo", loss_agg_mode=SEQUENCE_MEAN, bounds_ratio=True)
def sapo(inputs: LossInputs) -> LossResult:
    """SAPO: -A (4 / tau) sigmoid(tau (r - 1)), a soft gate instead of the clip (arXiv:2511.20347).

    tau = config.tau_pos where A > 0, else config.tau_neg. The aggregation mode is always seq-mean-token-mean. There are
    no clip fractions, because nothing is clipped (verl reports 0).
    """
    tau_pos = inputs.config.tau_pos
    tau_neg = inputs.config.tau_neg
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos={tau_pos}, tau_neg={tau_neg}: sapo needs both above 0.")
    advantages = inputs.advantages
    ratio = inputs.log_ratio.exp()
    # one of the two is a tensor, because torch.where of two numbers is fp32, also if the advantages are fp64
    negative = torch.full_like(advantages, tau_neg)
    tau = torch.where(advantages > 0, tau_pos, negative)
    # 4 / tau: the gate has slope 1 at ratio 1 for any tau, so that the gradient of a fresh sample is PPO's
    gate = torch.sigmoid(tau * (ratio - 1.0))
    losses = -advantages * (4.0 / tau) * gate
    return inputs.aggregate(losses, loss_agg_mode=SEQUENCE_MEAN), inputs.token_means()


@register_policy_loss("geo_mean", loss_agg_mode=SEQUENCE_MEAN, bounds_ratio=True)
def geo_mean(inputs: LossInputs) -> LossResult:
    """GMPO: -A_row exp(mean over the row of clipped d), A_row the row's mean advantage (arXiv:2507.20673).

    Each token's d is clipped to [-low, high] if that makes the objective worse for the sign of A. Rows are averaged
    over the whole mini-batch; verl averages over each micro-batch, so its gradient grows with their number. A row is
    weighted by the geometric mean of its rollout_is_weights. Metrics: pg_clipfrac and pg_clipfrac_lower, the shares of
    tokens out of range with A > 0 and with A < 0.
    """
    low, high = clip_range(inputs.config)
    mask = inputs.response_mask
    advantages = inputs.advantages
    log_ratio = inputs.log_ratio
    in_range = log_ratio.clamp(-low, high)
    sign = advantages.sign()
    # the smaller objective, which has the larger log-ratio where A < 0
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * in_range)

    row_ratio = masked_mean(pessimistic, mask, axis=-1).exp()
    row_advantage = masked_mean(advantages, mask, axis=-1)
    row_losses = -row_advantage * row_ratio
    # the loss of a row on each of its tokens, whose mean over the row is that loss again
    losses = row_losses.unsqueeze(-1).expand_as(log_ratio)

    row_weights = None
    if inputs.rollout_is_weights is not None:
        # a weight of 0, which IcePop gives to tokens out of bounds, has no logarithm
        log_weights = torch.log(inputs.rollout_is_weights + 1e-10)
        geometric_means = masked_mean(log_weights, mask, axis=-1).exp()
        row_weights = geometric_means.unsqueeze(-1)
    loss = inputs.aggregate(losses, loss_agg_mode=SEQUENCE_MEAN, weights=row_weights)

    is_out = log_ratio != in_range
    is_good_out = is_out & (advantages > 0)
    is_bad_out = is_out & (advantages < 0)
    return loss, inputs.token_means(pg_clipfrac=is_good_out, pg_clipfrac_lower=is_bad_out)


# ---------------------------------------------------------------------------------------------------- clipping


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate with asymmetric and dual clip, per token.

    With r = exp(log_ratio) the loss is max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv:1707.06347, eq. 7). Where A < 0
    it is at most -A c (dual clip, arXiv:1912.09729, eq. 5), so that bad actions that became very likely do not dominate
    the batch.

    Args:
        log_ratio, advantages: (B, T).
        clip_ratio_low, clip_ratio_high: low and high.
        clip_ratio_c: c, above 1; None = no dual clip.

    Returns:
        The loss, and whether the clip and the dual clip were active (bool), all (B, T).

    Raises:
        ValueError: clip_ratio_c is not above 1.
    """
    if clip_ratio_c is not None and clip_ratio_c <= 1.0:
        raise ValueError(f"clip_ratio_c={clip_ratio_c}: the dual clip bounds ratios above 1; set it above 1.0.")
    advantages = at_least_fp32(advantages)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    is_clipped = clipped > plain
    pessimistic = torch.maximum(plain, clipped)
    if clip_ratio_c is None:
        return pessimistic, is_clipped, torch.zeros_like(is_clipped)

    bound = -advantages * clip_ratio_c
    is_bounded = (advantages < 0) & (pessimistic > bound)
    losses = torch.where(advantages < 0, torch.minimum(pessimistic, bound), pessimistic)
    return losses, is_clipped, is_bounded


# ---------------------------------------------------------------------------------------------------- deprecated


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the loss `vanilla` for a whole mini-batch. Deprecated, as in verl.

    Args:
        old_log_prob, log_prob, advantages, response_mask: (B, T).
        cliprange: the value of cliprange_low and cliprange_high where they are None.
        clip_ratio_c: see `clipped_surrogate`.
        loss_agg_mode: see `agg_loss`.

    Returns:
        The scalars pg_loss, pg_clipfrac, ppo_kl and pg_clipfrac_lower.

    Raises:
        ValueError: a clip range is negative or missing, clip_ratio_c is not above 1, shapes differ, or the mask keeps
            nothing.
    """
    warnings.warn("compute_policy_loss is deprecated: compute_policy_loss_vanilla", DeprecationWarning, stacklevel=2)
    if cliprange_low is None:
        cliprange_low = cliprange
    if cliprange_high is None:
        cliprange_high = cliprange
    if cliprange_low is None or cliprange_high is None:
        raise ValueError("compute_policy_loss: give cliprange, or both cliprange_low and cliprange_high.")
    require_clip_range("cliprange", cliprange_low, cliprange_high)
    check_shapes(
        "compute_policy_loss",
        response_mask=response_mask,
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
    )
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask)
    losses, is_clipped, is_bounded = clipped_surrogate(
        log_ratio, advantages, cliprange_low, cliprange_high, clip_ratio_c
    )
    loss = agg_loss(losses, response_mask, loss_agg_mode)
    clip_fraction = masked_mean(is_clipped.to(losses.dtype), response_mask)
    kl = masked_mean(-log_ratio, response_mask)
    bound_fraction = masked_mean(is_bounded.to(losses.dtype), response_mask)
    return loss, clip_fraction, kl, bound_fraction
