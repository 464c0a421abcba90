"""Policy losses that treat a few tokens differently, chosen by comparing them with all others: Clip-Cov and KL-Cov.

A choice made within a micro-batch would depend on how the batch was cut. So the losses take the choice as an argument,
`selected` (B, T), made once over the whole batch by `select_clip_cov` or `select_kl_cov` with the log-probs before the
update; they choose by themselves only in a mini-batch given whole, and refuse to within a part of one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl_lite.algos.masked import masked_mean
from verl_lite.algos.policy_losses import TokenLosses, bounded_log_ratio, clip_range, masked_log_ratio, policy_loss


@policy_loss("clip_cov")
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    selected: Tensor | None = None,
) -> TokenLosses:
    """Clip-Cov: PPO's clip without dual clip, and no loss for a few tokens that would cost entropy (arXiv:2505.22617).

    selected (B, T): those tokens, from `select_clip_cov`; chosen here if the mini-batch is given whole. verl chooses
    anew in each micro-batch with the log-probs of now, so that its choice depends on the cut.
    Metrics: pg_clipfrac: share of the chosen tokens.
    """
    low, high = clip_range(config)
    ratio = bounded_log_ratio(log_prob, old_log_prob).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if selected is None:
        selected = select_clip_cov(old_log_prob, advantages, response_mask, config, log_prob=log_prob)
    return torch.where(selected, 0, losses), {"pg_clipfrac": selected}


@policy_loss("kl_cov")
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    selected: Tensor | None = None,
) -> TokenLosses:
    """KL-Cov: -A r, plus config.policy_loss.ppo_kl_coef |d| for the tokens of largest covariance (arXiv:2505.22617).

    selected (B, T): those tokens, from `select_kl_cov`; chosen here if the mini-batch is given whole.
    Metrics: ppo_kl: mean of |d|, as in verl.
    """
    log_ratio = bounded_log_ratio(log_prob, old_log_prob)
    if selected is None:
        selected = select_kl_cov(old_log_prob, advantages, response_mask, config, log_prob=log_prob)
    penalty = torch.where(selected, config.policy_loss.ppo_kl_coef * log_ratio.abs(), 0)
    return -advantages * log_ratio.exp() + penalty, {"ppo_kl": log_ratio.abs()}


@torch.no_grad()
def select_clip_cov(
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    *,
    log_prob: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Tokens (B, T) bool whose loss clip_cov drops, to be chosen over the whole batch.

    max(clip_cov_ratio times the valid tokens, 1) drawn at random among those whose covariance (A - mean A)(log_prob -
    mean log_prob) lies between clip_cov_lb and clip_cov_ub, less those that PPO's clip drops already (options of
    config.policy_loss). log_prob: null = old_log_prob, the policy before the update. generator: null = torch's own.
    """
    options, is_valid = config.policy_loss, response_mask.bool()
    if not options.clip_cov_lb < options.clip_cov_ub:
        raise ValueError(
            f"clip_cov_lb={options.clip_cov_lb}, clip_cov_ub={options.clip_cov_ub}: no covariance lies between them."
        )
    new = old_log_prob if log_prob is None else log_prob
    low, high = clip_range(config)
    ratio = masked_log_ratio(new, old_log_prob, response_mask).exp()
    is_clipped = -advantages * ratio.clamp(1 - low, 1 + high) > -advantages * ratio
    covariance = _covariance(new, advantages, is_valid)
    is_candidate = is_valid & ~is_clipped & (covariance > options.clip_cov_lb) & (covariance < options.clip_cov_ub)
    candidates = is_candidate.flatten().nonzero().squeeze(-1)
    wanted = max(int(options.clip_cov_ratio * int(is_valid.sum())), 1)
    source = "cpu" if generator is None else generator.device
    order = torch.randperm(len(candidates), generator=generator, device=source).to(candidates.device)
    selected = torch.zeros(is_valid.numel(), dtype=torch.bool, device=is_valid.device)
    selected[candidates[order[:wanted]]] = True
    return selected.view(is_valid.shape)


@torch.no_grad()
def select_kl_cov(
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    *,
    log_prob: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Tokens (B, T) bool that kl_cov penalises, to be chosen over the whole batch.

    The max(kl_cov_ratio times the valid tokens, 1) of largest covariance, see `select_clip_cov`. Nothing is drawn.
    """
    is_valid = response_mask.bool()
    new = old_log_prob if log_prob is None else log_prob
    covariance = torch.where(is_valid, _covariance(new, advantages, is_valid), -torch.inf)
    tokens = int(is_valid.sum())
    wanted = min(max(int(config.policy_loss.kl_cov_ratio * tokens), 1), tokens)
    selected = torch.zeros(is_valid.numel(), dtype=torch.bool, device=is_valid.device)
    selected[covariance.flatten().topk(wanted).indices] = True
    return selected.view(is_valid.shape)


def _covariance(log_prob: Tensor, advantages: Tensor, is_valid: Tensor) -> Tensor:
    return (advantages - masked_mean(advantages, is_valid)) * (log_prob - masked_mean(log_prob, is_valid))


TOKEN_SELECTIONS: dict[str, Callable[..., Tensor]] = {"clip_cov": select_clip_cov, "kl_cov": select_kl_cov}
"""How the tokens of each of these losses are chosen over the whole batch."""
