"""Every policy loss, the value loss and every aggregation as plain loops over floats, written from the formulas.

`naive_policy_loss(name, columns, mode, config)` takes the columns of a policy loss and gives its value. The reference
of the tests and of `python -m tests.bench algos`: slow on purpose. A stop-gradient does not matter for a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Token = tuple[float, float, float]
"""(old log-prob, log-prob, advantage)"""


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ratio(old: float, new: float) -> float:
    return math.exp(clip(new - old, -20.0, 20.0))


def clip_bounds(config: Any) -> tuple[float, float]:
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def vanilla(old: float, new: float, a: float, config: Any, chosen: bool) -> float:
    low, high = clip_bounds(config)
    r = ratio(old, new)
    loss = max(-a * r, -a * clip(r, 1 - low, 1 + high))
    return min(loss, -a * (config.clip_ratio_c or math.inf)) if a < 0 else loss


def sapo(old: float, new: float, a: float, config: Any, chosen: bool) -> float:
    tau = config.tau_pos if a > 0 else config.tau_neg
    return -a * 4 / tau / (1 + math.exp(-tau * (ratio(old, new) - 1)))


def gpg(old: float, new: float, a: float, config: Any, chosen: bool) -> float:
    return -a * new


def cispo(old: float, new: float, a: float, config: Any, chosen: bool) -> float:
    low, high = clip_bounds(config)
    r = ratio(old, new)
    if config.policy_loss.cispo_unified_mask and (r > 1 + high if a > 0 else r < 1 - low):
        return 0.0
    return -clip(r, 1 - low, 1 + high) * a * new


def tis(old: float, new: float, a: float, config: Any, chosen: bool) -> float:
    options = config.policy_loss
    return -clip(ratio(old, new), options.tis_lower_bound, options.tis_upper_bound) * a * new


def topr(old: float, new: float, a: float, config: Any, chosen: bool) -> float:
    options = config.policy_loss
    weight = options.topr_positive_weight if a > 0 else options.topr_negative_weight * clip(ratio(old, new), 0.0, 1.0)
    return -weight * a * new


def kimi15(old: float, new: float, a: float, config: Any, chosen: bool) -> float:
    return -a * new + config.policy_loss.kimi15_tau / 2 * (new - old) ** 2


def dro(old: float, new: float, a: float, config: Any, chosen: bool) -> float:
    return -(a * new - config.policy_loss.dro_beta / 2 * (new - old) ** 2)


def weighted_inside(old: float, new: float, a: float, config: Any, inside: bool) -> float:
    return -min(ratio(old, new), config.clip_ratio_c or math.inf) * a * new if inside else 0.0


def dppo_tv(old: float, new: float, a: float, config: Any, chosen: bool) -> float:
    low, high = clip_bounds(config)
    shift = math.exp(new) - math.exp(old)
    return weighted_inside(old, new, a, config, shift <= high if a > 0 else shift >= -low)


def dppo_kl(old: float, new: float, a: float, config: Any, chosen: bool) -> float:
    low, high = clip_bounds(config)
    p, q = math.exp(old), math.exp(new)
    divergence = p * (old - new) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    inside = (divergence <= high or q <= p) if a > 0 else (divergence <= low or q >= p)
    return weighted_inside(old, new, a, config, inside)


def clip_cov(old: float, new: float, a: float, config: Any, chosen: bool) -> float:
    low, high = clip_bounds(config)
    r = ratio(old, new)
    return 0.0 if chosen else max(-a * r, -a * clip(r, 1 - low, 1 + high))


def kl_cov(old: float, new: float, a: float, config: Any, chosen: bool) -> float:
    r = ratio(old, new)
    return -a * r + (config.policy_loss.ppo_kl_coef * abs(clip(new - old, -20.0, 20.0)) if chosen else 0.0)


def a3po(old: float, new: float, a: float, config: Any, age: int) -> float:
    proximal = old if age < 2 else old / age + new * (age - 1) / age  # of a token sampled so many weight updates ago
    return ratio(old, proximal) * vanilla(proximal, new, a, config, False)


def gspo(tokens: list[Token], weights: list[float], config: Any) -> list[float]:
    """Of a row: every token has the row's ratio, exp of the mean log-ratio."""
    low, high = clip_bounds(config)
    s = math.exp(min(math.fsum(clip(new - old, -20.0, 20.0) for old, new, _ in tokens) / len(tokens), 10.0))
    clipped = clip(s, 1 - low, 1 + high)
    return [w * max(-a * s, -a * clipped) for (_, _, a), w in zip(tokens, weights, strict=True)]


def geo_mean(tokens: list[Token], weights: list[float], config: Any) -> list[float]:
    """Of a row: mean advantage times the geometric mean of ratios, each clipped where that is the worse."""
    low, high = clip_bounds(config)
    total = 0.0
    for old, new, a in tokens:
        sign, d = (a > 0) - (a < 0), clip(new - old, -20.0, 20.0)
        total += sign * min(sign * d, sign * clip(d, -low, high))
    advantage = math.fsum(a for _, _, a in tokens) / len(tokens)
    weight = math.exp(math.fsum(math.log(w + 1e-10) for w in weights) / len(weights))
    return [-advantage * math.exp(total / len(tokens)) * weight] * len(tokens)


NAIVE_TOKEN_LOSSES: dict[str, Callable[[float, float, float, Any, bool], float]] = {
    loss.__name__: loss
    for loss in (vanilla, sapo, gpg, cispo, tis, topr, kimi15, dro, dppo_tv, dppo_kl, clip_cov, kl_cov, a3po)
}
NAIVE_ROW_LOSSES: dict[str, Callable[[list[Token], list[float], Any], list[float]]] = {
    "gspo": gspo,
    "geo_mean": geo_mean,
}
SEQUENCE_MEANS = ("gspo", "sapo", "geo_mean")
RATIO_LOSSES = ("vanilla", "cispo", "tis", "topr")  # they read ratio_type


def naive_policy_loss(name: str, columns: dict[str, Any], mode: str, config: Any) -> float:
    """Its value for a mini-batch given whole. `selected` or `staleness` (B, T) where the loss takes it."""
    names = ("old_log_prob", "log_prob", "advantages")
    mask = [[m != 0 for m in row] for row in columns["response_mask"].tolist()]
    weights = columns["rollout_is_weights"].tolist() if "rollout_is_weights" in columns else None
    chosen = columns.get("selected", columns.get("staleness"))
    losses = []
    for row, lists in enumerate(zip(*(columns[name].tolist() for name in names), strict=True)):
        kept = [t for t in range(len(mask[row])) if mask[row][t]]
        tokens: list[Token] = [(lists[0][t], lists[1][t], lists[2][t]) for t in kept]
        own = [weights[row][t] if weights else 1.0 for t in kept]
        if name in NAIVE_ROW_LOSSES:
            values = NAIVE_ROW_LOSSES[name](tokens, own, config) if tokens else []
        else:
            formula = NAIVE_TOKEN_LOSSES[name]
            flags = [0 if chosen is None else int(chosen[row][t]) for t in kept]
            values = [formula(*token, config, flag) * w for token, flag, w in zip(tokens, flags, own, strict=True)]
        losses.append(values)
    width = len(mask[0]) if mask else 0
    return naive_aggregate(losses, "seq-mean-token-mean" if name in SEQUENCE_MEANS else mode, width)


def naive_aggregate(losses: list[list[float]], mode: str, width: int) -> float:
    """The scalar of a whole mini-batch, from the losses of each row's valid tokens."""
    rows = [row for row in losses if row]
    match mode:
        case "token-mean":
            return math.fsum(x for row in rows for x in row) / sum(len(row) for row in rows)
        case "token-sum":
            return math.fsum(x for row in rows for x in row)
        case "seq-mean-token-sum":
            return math.fsum(math.fsum(row) for row in rows) / len(rows)
        case "seq-mean-token-mean":
            return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)
        case "seq-mean-token-sum-norm":
            return math.fsum(math.fsum(row) for row in rows) / len(rows) / width
    raise AssertionError(mode)


def naive_value_loss(columns: dict[str, torch.Tensor], cliprange: float, mode: str) -> float:
    """Half the larger squared error with or without the clip; columns vpreds, returns, values, response_mask."""
    names = ("vpreds", "returns", "values", "response_mask")
    losses = []
    for row in zip(*(columns[name].tolist() for name in names), strict=True):
        values = []
        for new, target, old, m in zip(*row, strict=True):
            if m:
                clipped = clip(new, old - cliprange, old + cliprange)
                values.append(0.5 * max((new - target) ** 2, (clipped - target) ** 2))
        losses.append(values)
    return naive_aggregate(losses, mode, columns["vpreds"].shape[1])
