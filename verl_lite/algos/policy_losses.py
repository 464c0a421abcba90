"""Policy losses of verl and ROLL: compute a scalar loss and its metrics from log-probs and advantages.

Each loss is a formula for one token. The decorator `policy_loss` turns it into a `PolicyLossFn` and applies the mask,
the importance weights and the denominators. Notation: d = log_prob - old_log_prob clamped to +-20, r = exp(d), A the
advantage, sg = stop gradient. Formulas receive tensors (B, T) of at least fp32 that are 0 under mask 0, and a bool
mask. Each loss has the metric ppo_kl, the mean of -d, unless its formula returns its own.

No loss depends on how the batch is split: formulas read a token or its row, and rows are never split. This file has the
losses whose gradient flows through the ratio. `reinforce_losses` has the losses of REINFORCE's form,
`covariance_losses` the losses that compare a token with all others.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from verl_lite.algos.masked import (
    Count,
    agg_loss,
    at_least_fp32,
    check_shapes,
    compute_segment_masked_mean,
    masked_mean,
    masked_sum,
)
from verl_lite.metrics import Metric, declared
from verl_lite.registry import Registry, accepts, takes

LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: larger ratios carry no information and soon overflow
FORMULA_ARGUMENTS = 5  # old_log_prob, log_prob, advantages, response_mask, config

TokenLosses = tuple[Tensor, dict[str, Tensor]]
"""Losses (B, T), and tensors (B, T) by metric name whose mean over the valid tokens is the metric."""


class PolicyLossFn(Protocol):
    """The signature of a policy loss. Returns (scalar loss, metrics).

    old_log_prob, log_prob, advantages, response_mask: (B, T). loss_agg_mode, batch_num_tokens, global_batch_size (both
    of the whole mini-batch): see `agg_loss`. config: an object with the loss's options as attributes, such as
    ActorConfig. rollout_is_weights: (B, T) factors of the token losses, or None. A loss may name two more arguments:
    `selected` (B, T) bool, tokens selected from the whole batch (`covariance_losses`), and `scores` (B,), the score of
    each response.
    """

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        config: Any,
        rollout_is_weights: Tensor | None = None,
        *,
        batch_num_tokens: Count | None = None,
        global_batch_size: Count | None = None,
    ) -> tuple[Tensor, dict[str, Metric]]: ...


POLICY_LOSS_REGISTRY: Registry[PolicyLossFn] = Registry("policy loss")


def policy_loss(
    name: str,
    *,
    needs: tuple[str, ...] = (),
    always: str | None = None,
    row_weights: bool = False,
    bounds_ratio: bool = True,
) -> Callable[[Callable[..., TokenLosses]], PolicyLossFn]:
    """Returns a decorator that turns a formula f(old_log_prob, log_prob, advantages, response_mask, config) into a
    `PolicyLossFn` and registers it.

    needs, bounds_ratio: see `core_algos.register_policy_loss`. always: aggregation mode that replaces the argument
    loss_agg_mode, for losses that are defined with a mode. row_weights: weight each row by the geometric mean of its
    rollout_is_weights.

    The loss takes further arguments of the formula by keyword. If the formula names `selected` (B, T) and it is not
    passed, the loss raises ValueError unless it gets the whole mini-batch, because the selection would depend on the
    split. The loss raises ValueError, naming the argument, for shapes that do not match.
    """

    def decorate(formula: Callable[..., TokenLosses]) -> PolicyLossFn:
        def loss_function(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = "token-mean",
            config: Any = None,
            rollout_is_weights: Tensor | None = None,
            *,
            batch_num_tokens: Count | None = None,
            global_batch_size: Count | None = None,
            **extras: Any,
        ) -> tuple[Tensor, dict[str, Metric]]:
            if config is None:  # optional only in the signature, as in verl
                raise ValueError(f"{formula.__name__}: config is missing; an ActorConfig or its like is expected.")
            given = {"old_log_prob": old_log_prob, "log_prob": log_prob, "advantages": advantages}
            optional = {"rollout_is_weights": rollout_is_weights, "selected": extras.get("selected")}
            checked = given | {name: tensor for name, tensor in optional.items() if tensor is not None}
            check_shapes(formula.__name__, response_mask=response_mask, **checked)
            is_valid = response_mask.bool()
            tokens = is_valid.sum()
            if takes(formula, "selected") and extras.get("selected") is None:
                _require_whole(formula.__name__, int(tokens), batch_num_tokens)
            masked = [torch.where(is_valid, at_least_fp32(tensor), 0) for tensor in given.values()]
            old, new, _advantages = (tensor.detach() for tensor in masked)
            losses, averages = formula(*masked, is_valid, config, **extras)
            if rollout_is_weights is not None:
                weights = at_least_fp32(rollout_is_weights)
                if row_weights:
                    weights = masked_mean(torch.log(weights + 1e-10), is_valid, axis=-1).exp().unsqueeze(-1)
                losses = losses * weights
            loss = agg_loss(
                losses,
                is_valid,
                always or loss_agg_mode,
                batch_num_tokens=batch_num_tokens,
                global_batch_size=global_batch_size,
                loss_scale_factor=config.loss_scale_factor,
            )
            averages = {"ppo_kl": bounded_log_ratio(old, new)} | averages
            totals = {name: masked_sum(x.detach(), is_valid) for name, x in averages.items()}
            return loss, {name: Metric.mean(total, tokens) for name, total in totals.items()}

        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(loss_function, attribute, getattr(formula, attribute))
        own = [*inspect.signature(formula).parameters.values()][FORMULA_ARGUMENTS:]
        signature = inspect.signature(loss_function)
        named = [*signature.parameters.values()][:-1] + [each.replace(kind=each.KEYWORD_ONLY) for each in own]
        loss_function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
        return POLICY_LOSS_REGISTRY.register(name, needs=needs, loss_agg_mode=always, bounds_ratio=bounds_ratio)(
            loss_function
        )

    return decorate


def _require_whole(name: str, here: int, batch_num_tokens: Count | None) -> None:
    if batch_num_tokens is not None and int(batch_num_tokens) != here:
        raise ValueError(
            f"{name}: {here} of the mini-batch's {int(batch_num_tokens)} tokens are here, and the choice of tokens "
            "would depend on how it was cut: choose over the whole batch and hand it in as selected (B, T)."
        )


def call_policy_loss(
    loss_fn: Callable[..., tuple[Tensor, Mapping[str, Any]]],
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None = None,
    *,
    counts: Mapping[str, Count | None],
    columns: Mapping[str, Tensor],
) -> tuple[Tensor, dict[str, Metric]]:
    """Calls a policy loss, either a `PolicyLossFn` or a function with verl's signature, and returns (loss, metrics).

    counts: batch_num_tokens and global_batch_size. A function with verl's signature gets them in
    config.global_batch_info of a wrapped config, as verl passes them. `declared` converts its metrics, which are plain
    numbers. columns: the arguments that the loss names beyond the usual arguments.
    """
    options, given = config, {**columns, **counts}
    if not accepts(loss_fn, "batch_num_tokens"):
        options, given = _VerlConfig(config, counts), {**columns}
    arguments = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, options, rollout_is_weights)
    loss, metrics = loss_fn(*arguments, **given)
    if all(isinstance(value, Metric) for value in metrics.values()):
        return loss, dict(metrics)
    return loss, declared(metrics, response_mask.bool().sum().double(), counts.get("batch_num_tokens"))


class _VerlConfig:
    """Wraps an actor's config for verl's losses: adds global_batch_info with the denominators of the mini-batch."""

    def __init__(self, config: Any, counts: Mapping[str, Count | None]) -> None:
        self._config = config
        self.global_batch_info = {"dp_size": 1, "loss_scale_factor": config.loss_scale_factor, **counts}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


# ---------------------------------------------------------------------------------------------------- ratios


def masked_log_ratio(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Returns log_prob - old_log_prob clamped to +-20, and 0 under mask 0, where NaN thus has no gradient."""
    difference = at_least_fp32(log_prob) - at_least_fp32(old_log_prob)
    log_ratio = torch.where(response_mask.bool(), difference, 0)
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def bounded_log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Returns log_prob - old_log_prob clamped to +-20, for log-probs that are already masked."""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def importance_log_ratio(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor, config: Any) -> Tensor:
    """Returns `masked_log_ratio` or, for config.ratio_type=segment, the mean over each run of valid tokens (ROLL).

    A config without ratio_type, such as verl's, is treated as ratio_type=token.
    """
    if getattr(config, "ratio_type", "token") == "segment":
        segments = compute_segment_masked_mean(log_prob - old_log_prob, response_mask)
        return segments.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return masked_log_ratio(log_prob, old_log_prob, response_mask)


def clip_range(config: Any) -> tuple[float, float]:
    """Returns the clip ranges (low, high) of an actor's config; each falls back to clip_ratio if it is null.

    Raises ValueError if a range is negative, because [1 - low, 1 + high] would not contain the ratio 1.
    """
    low, high = config.clip_ratio_low, config.clip_ratio_high
    low = config.clip_ratio if low is None else low
    high = config.clip_ratio if high is None else high
    _check_range("clip_ratio", low, high)
    return low, high


def _check_range(name: str, low: float, high: float) -> None:
    if low < 0 or high < 0:
        raise ValueError(
            f"{name}_low={low}, {name}_high={high} (each is {name} where it is not given): both are expected to be at "
            "least 0, or the clip range [1 - low, 1 + high] would not hold the ratio 1."
        )


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate with asymmetric and dual clip, per token.

    With r = exp(log_ratio) the loss is max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv:1707.06347, eq. 7). Where A < 0
    it is at most -A c (dual clip, arXiv:1912.09729, eq. 5), so that bad actions that became very likely do not dominate
    the batch; c = None disables the dual clip. All tensors are (B, T). Returns (loss, clip active, dual clip active),
    the last two bool. Raises ValueError unless clip_ratio_c > 1.
    """
    if clip_ratio_c is not None and clip_ratio_c <= 1.0:
        raise ValueError(f"clip_ratio_c={clip_ratio_c}: the dual clip bounds ratios above 1; set it above 1.0.")
    advantages = at_least_fp32(advantages)
    ratio, cost = log_ratio.exp(), -advantages
    plain = cost * ratio
    clipped = cost * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    pessimistic = torch.maximum(plain, clipped)
    if clip_ratio_c is None:
        return pessimistic, clipped > plain, torch.zeros_like(pessimistic, dtype=torch.bool)
    bound = cost * clip_ratio_c
    is_bounded = (advantages < 0) & (pessimistic > bound)
    loss = torch.where(advantages < 0, torch.minimum(pessimistic, bound), pessimistic)
    return loss, clipped > plain, is_bounded


# ---------------------------------------------------------------------------------------------------- clipped ratios


@policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> TokenLosses:
    """PPO with asymmetric and dual clip: see `clipped_surrogate`.

    config: clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c (ROLL's dual_clip_loss: 1 + 2 clip_ratio),
    loss_scale_factor, ratio_type (segment: one ratio per run of response tokens).
    Metrics: pg_clipfrac, pg_clipfrac_lower (shares of tokens).
    """
    low, high = clip_range(config)
    log_ratio = importance_log_ratio(log_prob, old_log_prob, response_mask, config)
    losses, is_clipped, is_bounded = clipped_surrogate(log_ratio, advantages, low, high, config.clip_ratio_c)
    return losses, {"pg_clipfrac": is_clipped, "pg_clipfrac_lower": is_bounded}


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
    """Computes the loss of `compute_policy_loss_vanilla` for a whole mini-batch. Deprecated, as in verl.

    All tensors are (B, T). Returns scalars (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower).
    Raises ValueError if a clip range is negative or missing (without a `cliprange` to fall back to), if clip_ratio_c is
    not above 1, if shapes differ, and if the mask keeps nothing.
    """
    warnings.warn("compute_policy_loss is deprecated: compute_policy_loss_vanilla", DeprecationWarning, stacklevel=2)
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError("compute_policy_loss: give cliprange, or both cliprange_low and cliprange_high.")
    _check_range("cliprange", low, high)
    check_shapes(
        "compute_policy_loss",
        response_mask=response_mask,
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
    )
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask)
    losses, is_clipped, is_bounded = clipped_surrogate(log_ratio, advantages, low, high, clip_ratio_c)
    return (
        agg_loss(losses, response_mask, loss_agg_mode),
        masked_mean(is_clipped.to(losses.dtype), response_mask),
        masked_mean(-log_ratio, response_mask),
        masked_mean(is_bounded.to(losses.dtype), response_mask),
    )


@policy_loss("a3po")
def compute_policy_loss_a3po(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    staleness: Tensor | None = None,
) -> TokenLosses:
    """A-3PO: decoupled PPO with an interpolated proximal policy (arXiv:2512.06547; AReaL's prox_logp_method=loglinear).

    old_log_prob is that of the policy that sampled the token, s weight updates ago. The proximal policy is not
    computed: log pi_prox = old_log_prob + a sg(d) with a = (s - 1) / s, and a = 0 for s = 0. The loss is
    sg(pi_prox / pi_old) times `clipped_surrogate` of pi / pi_prox. For example, s = 2, pi / pi_old = 1.44 and A = 1
    give pi_prox / pi_old = 1.2 and the loss -1.2 min(1.2, 1 + high). staleness: (B, T) s; None = 0, which gives PPO.
    config: as for vanilla, without ratio_type. Metrics: pg_clipfrac, pg_clipfrac_lower.
    """
    low, high = clip_range(config)
    log_ratio = bounded_log_ratio(log_prob, old_log_prob)
    proximal = torch.zeros_like(log_ratio)
    if staleness is not None:
        check_shapes("a3po", response_mask=response_mask, staleness=staleness)
        proximal = log_ratio.detach() * (1 - 1 / staleness.clamp(min=1).to(log_ratio.dtype))
    surrogate = clipped_surrogate(log_ratio - proximal, advantages, low, high, config.clip_ratio_c)
    losses, is_clipped, is_bounded = surrogate
    return proximal.exp() * losses, {"pg_clipfrac": is_clipped, "pg_clipfrac_lower": is_bounded}


@policy_loss("gspo", always="seq-mean-token-mean")
def compute_policy_loss_gspo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> TokenLosses:
    """GSPO: max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(mean of d over the row) (arXiv:2507.18071).

    Computed per token as s = sg(s) exp(log_prob - sg(log_prob)), so that advantages may differ within a row
    (GSPO-token); log s is at most 10. The aggregation mode is always seq-mean-token-mean, as in the paper (verl 0.9.1:
    loss_agg_mode).
    """
    low, high = clip_range(config)
    log_ratio = bounded_log_ratio(log_prob.detach(), old_log_prob)
    by_row = masked_mean(log_ratio, response_mask, axis=-1).unsqueeze(-1)
    ratio = (log_prob - log_prob.detach() + by_row).clamp(max=10.0).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, clipped), {"pg_clipfrac": clipped > plain}


@policy_loss("sapo", always="seq-mean-token-mean")
def compute_policy_loss_sapo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> TokenLosses:
    """SAPO: -A (4 / tau) sigmoid(tau (r - 1)), a soft gate instead of the clip (arXiv:2511.20347).

    tau = config.tau_pos where A > 0, else config.tau_neg. The aggregation mode is always seq-mean-token-mean. There are
    no clip fractions, because nothing is clipped (verl reports 0).
    """
    if config.tau_pos <= 0 or config.tau_neg <= 0:
        raise ValueError(f"tau_pos={config.tau_pos}, tau_neg={config.tau_neg}: sapo needs both above 0.")
    ratio = bounded_log_ratio(log_prob, old_log_prob).exp()
    tau = torch.where(advantages > 0, config.tau_pos, torch.full_like(advantages, config.tau_neg))
    return -advantages * (4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)), {}


@policy_loss("geo_mean", always="seq-mean-token-mean", row_weights=True)
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> TokenLosses:
    """GMPO: -A_row exp(mean over the row of clipped d), A_row the row's mean advantage (arXiv:2507.20673).

    Each token's d is clipped to [-low, high] if that makes the objective worse for the sign of A. Rows are averaged
    over the whole mini-batch; verl averages over each micro-batch, so its gradient grows with their number. Metrics:
    pg_clipfrac and pg_clipfrac_lower, the shares of tokens out of range with A > 0 and with A < 0.
    """
    low, high = clip_range(config)
    log_ratio = bounded_log_ratio(log_prob, old_log_prob)
    clamped = log_ratio.clamp(-low, high)
    sign = advantages.sign()
    worse = sign * torch.minimum(sign * log_ratio, sign * clamped)
    ratio = masked_mean(worse, response_mask, axis=-1).exp()
    advantage = masked_mean(advantages, response_mask, axis=-1)
    is_out = log_ratio != clamped
    averages = {"pg_clipfrac": is_out & (advantages > 0), "pg_clipfrac_lower": is_out & (advantages < 0)}
    return (-advantage * ratio).unsqueeze(-1).expand_as(log_ratio), averages
