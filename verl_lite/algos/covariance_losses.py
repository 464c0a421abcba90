"""The policy losses Clip-Cov and KL-Cov, which treat a few tokens differently, selected by comparison with all others.

A selection within a micro-batch would depend on how the batch is split. `select_clip_cov` and `select_kl_cov` therefore
select tokens once over the whole batch, with the log-probs before the update, and the losses read the result as
`LossInputs.selected`. Without it they select tokens themselves and raise ValueError unless they get the whole
mini-batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from verl_lite.algos.loss_inputs import LossConfig, LossInputs, LossResult, clip_range
from verl_lite.algos.masked import masked_log_ratio, masked_mean
from verl_lite.algos.policy_loss_registry import register_policy_loss


@register_policy_loss("clip_cov", columns=("selected",), bounds_ratio=True)
def clip_cov(inputs: LossInputs) -> LossResult:
    """Clip-Cov: PPO's clip without dual clip; tokens that would reduce entropy get no loss (arXiv:2505.22617).

    selected: the tokens without loss, from `select_clip_cov`; None: selects them from the whole mini-batch. verl
    selects tokens in each micro-batch with the current log-probs, so its selection depends on the split.
    Metrics: pg_clipfrac: share of selected tokens.
    """
    low, high = clip_range(inputs.config)
    advantages = inputs.advantages
    ratio = inputs.log_ratio.exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    selected = _selected(inputs, "clip_cov")
    return inputs.aggregate(torch.where(selected, 0, losses)), inputs.token_means(pg_clipfrac=selected)


@register_policy_loss("kl_cov", columns=("selected",))
def kl_cov(inputs: LossInputs) -> LossResult:
    """KL-Cov: -A r, plus config.policy_loss.ppo_kl_coef |d| for the tokens of largest covariance (arXiv:2505.22617).

    selected: the tokens with the penalty, from `select_kl_cov`; None: selects them from the whole mini-batch.
    Metrics: ppo_kl: mean of |d|, as in verl.
    """
    log_ratio = inputs.log_ratio
    distance = log_ratio.abs()
    penalty = torch.where(_selected(inputs, "kl_cov"), inputs.config.policy_loss.ppo_kl_coef * distance, 0)
    losses = -inputs.advantages * log_ratio.exp() + penalty
    return inputs.aggregate(losses), inputs.token_means(ppo_kl=distance)


def _selected(inputs: LossInputs, name: str) -> Tensor:
    """Returns `inputs.selected`, or selects the tokens of the loss from `inputs`. Raises ValueError if these are only a
    part of a mini-batch."""
    if inputs.selected is not None:
        return inputs.selected
    tokens = int(inputs.response_mask.bool().sum())
    batch_num_tokens = inputs.aggregation.batch_num_tokens
    if batch_num_tokens is not None and int(batch_num_tokens) != tokens:
        raise ValueError(
            f"{name}: {tokens} of the mini-batch's {int(batch_num_tokens)} tokens are here, and the choice of tokens "
            "would depend on how it was cut: choose over the whole batch and hand it in as selected (B, T)."
        )
    select = TOKEN_SELECTIONS[name]
    return select(inputs.old_log_prob, inputs.advantages, inputs.response_mask, inputs.config, log_prob=inputs.log_prob)


@torch.no_grad()
def select_clip_cov(
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: LossConfig,
    *,
    log_prob: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Selects the tokens, (B, T) bool, whose loss clip_cov drops. Call it with the whole batch.

    Draws max(clip_cov_ratio * valid tokens, 1) tokens at random from those whose covariance (A - mean A)(log_prob -
    mean log_prob) is between clip_cov_lb and clip_cov_ub and whose loss PPO's clip does not drop (options in
    config.policy_loss). log_prob: None = old_log_prob, the policy before the update. generator: None = torch's default.
    """
    options = config.policy_loss
    is_valid = response_mask.bool()
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
    config: LossConfig,
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
