"""Policy losses of verl and ROLL: from log-probs and advantages to a scalar and its metrics.

Each loss is a formula for one token, made a `PolicyLossFn` by `policy_loss`, which sees to the mask, the importance
weights and the denominators; `core_algos` registers them. Notation: d = log_prob - old_log_prob within +-20,
r = exp(d), A the advantage, sg = no gradient. Formulas see tensors (B, T) that are 0 under mask 0.

Nothing here depends on how the batch was cut: formulas read a token or its row, and rows are never cut. Losses that
compare a token with all others stand in `covariance_losses`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from verl_lite.masked import Count, agg_loss, compute_segment_masked_mean, masked_mean, masked_sum
from verl_lite.metrics import Metric

LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: beyond it a ratio says nothing and overflows soon
RATIO_TYPES = ("token", "segment")
SEQUENCE_MEANS = frozenset({"gspo", "sapo", "geo_mean"})
"""Losses whose mode is always seq-mean-token-mean."""

RATIO_LOSSES = frozenset({"vanilla", "cispo", "tis", "topr"})
"""Losses that read ratio_type."""

TokenLosses = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Losses (B, T), and by name what to average over valid tokens as metrics (B, T)."""


class PolicyLossFn(Protocol):
    """What a policy loss is.

    old_log_prob, log_prob, advantages, response_mask: (B, T). loss_agg_mode, batch_num_tokens, global_batch_size (of
    the whole mini-batch): see `agg_loss`. config: any object with the named options as attributes, such as ActorConfig.
    rollout_is_weights: (B, T), if given they multiply the token losses. Returns (scalar loss, metrics).
    """

    def __call__(
        self,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str,
        config: Any,
        rollout_is_weights: torch.Tensor | None = None,
        *,
        batch_num_tokens: Count | None = None,
        global_batch_size: Count | None = None,
    ) -> tuple[torch.Tensor, dict[str, Metric]]: ...


def policy_loss(
    *, always: str | None = None, row_weights: bool = False, chooses: bool = False
) -> Callable[[Callable[..., TokenLosses]], PolicyLossFn]:
    """Decorator: makes a formula f(old_log_prob, log_prob, advantages, response_mask, config) a `PolicyLossFn`.

    always: the aggregation mode of losses that are defined with one; the argument loss_agg_mode is then not read.
    row_weights: a row is weighed by the geometric mean of its rollout_is_weights. chooses: the loss takes `selected`
    (B, T) by keyword; without it the mini-batch must be given whole (ValueError), so that the choice is everyone's.
    Other keywords go to the formula. Raises ValueError naming an argument whose shape does not match.
    """

    def decorate(formula: Callable[..., TokenLosses]) -> PolicyLossFn:
        def loss_function(
            old_log_prob: torch.Tensor,
            log_prob: torch.Tensor,
            advantages: torch.Tensor,
            response_mask: torch.Tensor,
            loss_agg_mode: str,
            config: Any,
            rollout_is_weights: torch.Tensor | None = None,
            *,
            batch_num_tokens: Count | None = None,
            global_batch_size: Count | None = None,
            **extras: Any,
        ) -> tuple[torch.Tensor, dict[str, Metric]]:
            given = {"old_log_prob": old_log_prob, "log_prob": log_prob, "advantages": advantages}
            for name, tensor in given.items():
                if tensor.shape != response_mask.shape:
                    raise ValueError(
                        f"{formula.__name__}: {name} has shape {tuple(tensor.shape)}, expected that of response_mask, "
                        f"{tuple(response_mask.shape)}."
                    )
            is_valid = response_mask != 0
            if chooses and extras.get("selected") is None:
                _require_whole(formula.__name__, is_valid, batch_num_tokens)
            masked = (torch.where(is_valid, tensor, 0) for tensor in given.values())
            losses, averages = formula(*masked, response_mask, config, **extras)
            if rollout_is_weights is not None:
                weights = rollout_is_weights
                if row_weights:
                    weights = masked_mean(torch.log(weights + 1e-10), is_valid, axis=-1).exp().unsqueeze(-1)
                losses = losses * weights
            loss = agg_loss(
                losses,
                response_mask,
                always or loss_agg_mode,
                batch_num_tokens=batch_num_tokens,
                global_batch_size=global_batch_size,
                loss_scale_factor=config.loss_scale_factor,
            )
            return loss, token_means(response_mask, **averages)

        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(loss_function, attribute, getattr(formula, attribute))
        return loss_function

    return decorate


def _require_whole(name: str, is_valid: torch.Tensor, batch_num_tokens: Count | None) -> None:
    here = int(is_valid.sum())
    if batch_num_tokens is not None and int(batch_num_tokens) != here:
        raise ValueError(
            f"{name}: {here} of the mini-batch's {int(batch_num_tokens)} tokens are here, and the choice of tokens "
            "would depend on how it was cut: choose over the whole batch and hand it in as selected (B, T)."
        )


def token_means(response_mask: torch.Tensor, **values: torch.Tensor) -> dict[str, Metric]:
    """Metrics that are means over valid tokens, moved to the host in one transfer. Each value: (B, T)."""
    totals = torch.stack([masked_sum(value.detach().float(), response_mask) for value in values.values()])
    host = torch.cat([totals, (response_mask != 0).sum()[None].to(totals.dtype)]).tolist()
    return {name: Metric.mean(total, host[-1]) for name, total in zip(values, host[:-1], strict=True)}


# ---------------------------------------------------------------------------------------------------- ratios


def masked_log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """log_prob - old_log_prob within +-20; 0 under mask 0 before it is exponentiated: a NaN there has no gradient."""
    log_ratio = torch.where(response_mask != 0, log_prob - old_log_prob, 0)
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def importance_log_ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, response_mask: torch.Tensor, config: Any
) -> torch.Tensor:
    """`masked_log_ratio` per token or, with config.ratio_type=segment, its mean over each run of valid tokens (ROLL).

    An object without ratio_type, such as a config of verl, means token.
    """
    if getattr(config, "ratio_type", "token") == "segment":
        segments = compute_segment_masked_mean(log_prob - old_log_prob, response_mask)
        return segments.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return masked_log_ratio(log_prob, old_log_prob, response_mask)


def clip_range(config: Any) -> tuple[float, float]:
    """(low, high) clip ranges of an actor's config: each falls back to clip_ratio where it is null.

    Raises ValueError for a negative one, with which the range would not hold the ratio 1.
    """
    low, high = config.clip_ratio_low, config.clip_ratio_high
    low, high = config.clip_ratio if low is None else low, config.clip_ratio if high is None else high
    _check_range(low, high)
    return low, high


def _check_range(low: float, high: float) -> None:
    if low < 0 or high < 0:
        raise ValueError(f"clip range [1 - {low}, 1 + {high}]: clip_ratio_low and clip_ratio_high are at least 0.")


def clipped_surrogate(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate with asymmetric and dual clip, per token.

    With r = exp(log_ratio): max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv:1707.06347, eq. 7), and where A < 0 at most
    -A c (dual clip, arXiv:1912.09729, eq. 5): a bad action made very likely no longer dominates the batch.
    All tensors (B, T). Returns (loss, whether the clip was active, whether the dual clip was active).
    Raises ValueError unless clip_ratio_c > 1.
    """
    if clip_ratio_c <= 1.0:
        raise ValueError(f"actor.clip_ratio_c={clip_ratio_c}: the dual clip bounds ratios above 1; set it above 1.0.")
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    pessimistic = torch.maximum(plain, clipped)
    bound = -advantages * clip_ratio_c
    is_bounded = (advantages < 0) & (pessimistic > bound)
    loss = torch.where(advantages < 0, torch.minimum(pessimistic, bound), pessimistic)
    return loss, clipped > plain, is_bounded


# ---------------------------------------------------------------------------------------------------- clipped ratios


@policy_loss()
def compute_policy_loss_vanilla(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
) -> TokenLosses:
    """PPO with asymmetric and dual clip: see `clipped_surrogate`.

    config: clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c, loss_scale_factor, ratio_type (segment: one ratio
    per run of response tokens; ROLL's dual_clip_loss is clip_ratio_c = 1 + 2 clip_ratio).
    Metrics: pg_clipfrac, pg_clipfrac_lower (shares of tokens), ppo_kl (mean of old - new).
    """
    low, high = clip_range(config)
    log_ratio = importance_log_ratio(log_prob, old_log_prob, response_mask, config)
    losses, is_clipped, is_bounded = clipped_surrogate(log_ratio, advantages, low, high, config.clip_ratio_c)
    divergence = -masked_log_ratio(log_prob, old_log_prob, response_mask)
    return losses, {"pg_clipfrac": is_clipped, "ppo_kl": divergence, "pg_clipfrac_lower": is_bounded}


def compute_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of `compute_policy_loss_vanilla` for a mini-batch given whole, with verl's older signature.

    All tensors (B, T). Returns scalars (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower).
    Raises ValueError if a clip range is neither given nor falls back to `cliprange`.
    """
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError("compute_policy_loss: give cliprange, or both cliprange_low and cliprange_high.")
    _check_range(low, high)
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask)
    losses, is_clipped, is_bounded = clipped_surrogate(log_ratio, advantages, low, high, clip_ratio_c)
    return (
        agg_loss(losses, response_mask, loss_agg_mode),
        masked_mean(is_clipped.float(), response_mask),
        masked_mean(-log_ratio, response_mask),
        masked_mean(is_bounded.float(), response_mask),
    )


@policy_loss(always="seq-mean-token-mean")
def compute_policy_loss_gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
) -> TokenLosses:
    """GSPO: max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(mean of d over the row) (arXiv:2507.18071).

    Written per token as s = sg(s) exp(log_prob - sg(log_prob)), log s at most 10, so that advantages may differ within
    a row (GSPO-token). The mode is always seq-mean-token-mean, as the paper defines it and verl has it.
    """
    low, high = clip_range(config)
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask)
    by_row = masked_mean(log_ratio, response_mask, axis=-1).detach().unsqueeze(-1)
    ratio = (log_prob - log_prob.detach() + by_row).clamp(max=10.0).exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, clipped), {"pg_clipfrac": clipped > plain, "ppo_kl": -log_ratio}


@policy_loss(always="seq-mean-token-mean")
def compute_policy_loss_sapo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
) -> TokenLosses:
    """SAPO: -A (4 / tau) sigmoid(tau (r - 1)), a soft gate in place of the clip (arXiv:2511.20347).

    tau = config.tau_pos where A > 0, else config.tau_neg. The mode is always seq-mean-token-mean. Nothing is clipped,
    so no clip fractions are reported (verl: 0).
    """
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask)
    tau = torch.where(advantages > 0, config.tau_pos, torch.full_like(advantages, config.tau_neg))
    gate = 4.0 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1.0))
    return -advantages * gate, {"ppo_kl": -log_ratio}


@policy_loss(always="seq-mean-token-mean", row_weights=True)
def compute_policy_loss_geo_mean(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
) -> TokenLosses:
    """GMPO: -A_row exp(mean over the row of clipped d), A_row the row's mean advantage (arXiv:2507.20673).

    d is clipped to [-low, high] where that is the worse for the sign of A, token by token. Rows are averaged over the
    whole mini-batch; verl averages over each micro-batch: its gradient grows with their number. Metrics: pg_clipfrac,
    pg_clipfrac_lower: tokens out of range with A > 0, with A < 0.
    """
    low, high = clip_range(config)
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask)
    clamped = log_ratio.clamp(-low, high)
    sign = advantages.sign()
    worse = sign * torch.minimum(sign * log_ratio, sign * clamped)
    ratio = masked_mean(worse, response_mask, axis=-1).exp()
    advantage = masked_mean(advantages, response_mask, axis=-1)
    is_out = log_ratio != clamped
    averages = {
        "pg_clipfrac": is_out & (advantages > 0),
        "ppo_kl": -log_ratio,
        "pg_clipfrac_lower": is_out & (advantages < 0),
    }
    return (-advantage * ratio).unsqueeze(-1).expand_as(log_ratio), averages


# ---------------------------------------------------------------------------------------------------- REINFORCE forms


@policy_loss()
def compute_policy_loss_gpg(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
) -> TokenLosses:
    """GPG: -A log_prob, plain policy gradient (arXiv:2504.02546)."""
    return -advantages * log_prob, {"ppo_kl": -masked_log_ratio(log_prob, old_log_prob, response_mask)}


@policy_loss()
def compute_policy_loss_cispo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
) -> TokenLosses:
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A log_prob: clipped tokens keep a gradient (arXiv:2506.13585).

    config: the clip ranges, ratio_type. ROLL's cispo_epsilon_low and _high are the clip ranges here; its unified mask
    is not offered.
    """
    low, high = clip_range(config)
    return _truncated(old_log_prob, log_prob, advantages, response_mask, config, 1 - low, 1 + high)


@policy_loss()
def compute_policy_loss_tis(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
) -> TokenLosses:
    """Truncated importance sampling (ROLL): -sg(clamp(r, lower, upper)) A log_prob.

    config.policy_loss: tis_lower_bound, tis_upper_bound; config.ratio_type.
    """
    low, high = config.policy_loss.tis_lower_bound, config.policy_loss.tis_upper_bound
    return _truncated(old_log_prob, log_prob, advantages, response_mask, config, low, high)


def _truncated(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    lower: float,
    upper: float,
) -> TokenLosses:
    ratio = importance_log_ratio(log_prob, old_log_prob, response_mask, config).detach().exp()
    truncated = ratio.clamp(lower, upper)
    divergence = -masked_log_ratio(log_prob, old_log_prob, response_mask)
    return -truncated * advantages * log_prob, {"pg_clipfrac": truncated != ratio, "ppo_kl": divergence}


@policy_loss()
def compute_policy_loss_topr(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    scores: torch.Tensor | None = None,
) -> TokenLosses:
    """TOPR: good answers as in REINFORCE, bad ones with the ratio truncated to [0, 1] (arXiv:2503.14286).

    -w_pos A log_prob for a good answer, else -w_neg sg(clamp(r, 0, 1)) A log_prob, with the w of
    config.policy_loss.topr_positive_weight and topr_negative_weight; config.ratio_type. An answer is good if its score
    is above 0: `scores` (B,) by keyword, as in ROLL. Without scores a token is good if its advantage is above 0.
    """
    options = config.policy_loss
    ratio = importance_log_ratio(log_prob, old_log_prob, response_mask, config).detach().exp()
    is_good = (advantages > 0) if scores is None else (scores > 0).unsqueeze(-1).expand_as(advantages)
    tapered = options.topr_negative_weight * ratio.clamp(0.0, 1.0)
    weights = torch.where(is_good, options.topr_positive_weight, tapered)
    averages = {
        "pg_clipfrac": ~is_good & (ratio > 1),
        "ppo_kl": -masked_log_ratio(log_prob, old_log_prob, response_mask),
    }
    return -weights * advantages * log_prob, averages


@policy_loss()
def compute_policy_loss_kimi15(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
) -> TokenLosses:
    """Kimi k1.5: -A log_prob + tau / 2 d^2 (arXiv:2501.12599), tau = config.policy_loss.kimi15_tau."""
    difference = log_prob - old_log_prob
    losses = -advantages * log_prob + 0.5 * config.policy_loss.kimi15_tau * difference.square()
    return losses, {"ppo_kl": -difference}


@policy_loss()
def compute_policy_loss_dro(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
) -> TokenLosses:
    """DRO: -(A log_prob - beta / 2 d^2) (arXiv:2405.19107), beta = config.policy_loss.dro_beta.

    Raises ValueError unless beta is above 0.
    """
    beta = config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ValueError(f"actor.policy_loss.dro_beta={beta}: dro needs a number above 0.")
    difference = log_prob - old_log_prob
    return -(advantages * log_prob - 0.5 * beta * difference.square()), {"ppo_kl": -difference}


@policy_loss()
def compute_policy_loss_dppo_tv(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
) -> TokenLosses:
    """DPPO with total variation: -sg(min(r, c)) A log_prob where the token is inside, else 0 (arXiv:2602.04879).

    Inside: p - p_old <= high where A > 0, p - p_old >= -low elsewhere. The clip ranges are bounds of probabilities
    here, and clip_ratio_c = c bounds the weight; 20 suits it better than PPO's 3.
    """
    low, high = clip_range(config)
    shift = (log_prob.exp() - old_log_prob.exp()).detach()
    is_inside = torch.where(advantages > 0, shift <= high, shift >= -low)
    return _divergence_gated(old_log_prob, log_prob, advantages, response_mask, config, is_inside)


@policy_loss()
def compute_policy_loss_dppo_kl(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
) -> TokenLosses:
    """DPPO with the binary KL divergence of the sampled token against all others (arXiv:2602.04879).

    Inside: p_old (log p_old - log p) + (1 - p_old) log((1 - p_old) / (1 - p)) <= high where A > 0, <= low elsewhere; or
    p on its way back: p <= p_old where A > 0, p >= p_old elsewhere. Else as `compute_policy_loss_dppo_tv`.
    """
    low, high = clip_range(config)
    old, new = old_log_prob.exp(), log_prob.detach().exp()
    others = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    divergence = old * (old_log_prob - log_prob.detach()) + others
    is_inside = torch.where(advantages > 0, (divergence <= high) | (new <= old), (divergence <= low) | (new >= old))
    return _divergence_gated(old_log_prob, log_prob, advantages, response_mask, config, is_inside)


def _divergence_gated(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    is_inside: torch.Tensor,
) -> TokenLosses:
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask)
    weights = log_ratio.detach().exp().clamp(max=config.clip_ratio_c)
    losses = torch.where(is_inside, -weights * advantages * log_prob, 0)
    averages = {
        "pg_clipfrac": ~is_inside,
        "ppo_kl": -log_ratio,
        "pg_clipfrac_lower": ~is_inside & (advantages <= 0),
    }
    return losses, averages
