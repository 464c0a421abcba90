"""The policy losses Clip-Cov and KL-Cov, which treat a few tokens differently, selected by comparison with all others.

A selection within a micro-batch would depend on how the batch is split. `select_clip_cov` and `select_kl_cov` therefore
select tokens once over the whole batch, with the log-probs before the update, and the losses take the result as the
argument `selected` (B, T). Without it they select tokens themselves and raise ValueError unless they get the whole
mini-batch.
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
    """Clip-Cov: PPO's clip without dual clip; tokens that would reduce entropy get no loss (arXiv:2505.22617).

    selected (B, T): the tokens without loss, from `select_clip_cov`; None: selects them from the whole mini-batch. verl
    selects tokens in each micro-batch with the current log-probs, so its selection depends on the split.
    Metrics: pg_clipfrac: share of selected tokens.
    """
    low, high = clip_range(config)
    ratio = bounded_log_ratio(log_prob, old_log_prob).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if selected is None:
        selected = select_clip_cov(old_log_prob, advantages, response_mask, config, log_prob=log_prob)
    return torch.where(selected, 0, losses), {"pg_clipfrac": selected}


@policy_loss("kl_cov", bounds_ratio=False)
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    selected: Tensor | None = None,
) -> TokenLosses:
    """KL-Cov: -A r, plus config.policy_loss.ppo_kl_coef |d| for the tokens of largest covariance (arXiv:2505.22617).

    selected (B, T): the tokens with the penalty, from `select_kl_cov`; None: selects them from the whole mini-batch.
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
    """Selects the tokens, (B, T) bool, whose loss clip_cov drops. Call it with the whole batch.

    Draws max(clip_cov_ratio * valid tokens, 1) tokens at random from those whose covariance (A - mean A)(log_prob -
    mean log_prob) is between clip_cov_lb and clip_cov_ub and whose loss PPO's clip does not drop (options in
    config.policy_loss). log_prob: None = old_log_prob, the policy before the update. generator: None = torch's default.
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
    """Selects the tokens, (B, T) bool, that kl_cov penalises. Call it with the whole batch.

    Selects the max(kl_cov_ratio * valid tokens, 1) tokens with the largest covariance (see `select_clip_cov`).
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
"""The function that selects the tokens of each loss from the whole batch."""
