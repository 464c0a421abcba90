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
from verl_lite.algos.policy_losses import clipped_surrogate


@register_policy_loss("clip_cov", columns=("selected",), bounds_ratio=True)
def clip_cov(inputs: LossInputs) -> LossResult:
    """Clip-Cov: max(-A r, -A clip(r, 1 - low, 1 + high)), but 0 for the selected tokens (arXiv:2505.22617).

    The selected tokens are some of those whose update would reduce the entropy, because their advantage and log-prob
    have a high covariance.
    selected: the tokens without loss, from `select_clip_cov`; None: selects them from the whole mini-batch. verl
    selects tokens in each micro-batch with the current log-probs, so its selection depends on the split.
    Metrics: pg_clipfrac: share of selected tokens.
    """
    low, high = clip_range(inputs.config)
    surrogate, _, _ = clipped_surrogate(inputs.log_ratio, inputs.advantages, low, high, clip_ratio_c=None)
    selected = _selected(inputs, "clip_cov")
    # a constant, so that these tokens have no gradient
    losses = torch.where(selected, 0, surrogate)
    return inputs.aggregate(losses), inputs.token_means(pg_clipfrac=selected)


@register_policy_loss("kl_cov", columns=("selected",))
def kl_cov(inputs: LossInputs) -> LossResult:
    """KL-Cov: -A r, plus config.policy_loss.ppo_kl_coef |d| for the tokens of largest covariance (arXiv:2505.22617).

    selected: the tokens with the penalty, from `select_kl_cov`; None: selects them from the whole mini-batch.
    Metrics: ppo_kl: mean of |d|, as in verl.
    """
    coefficient = inputs.config.policy_loss.ppo_kl_coef
    log_ratio = inputs.log_ratio
    distance = log_ratio.abs()
    selected = _selected(inputs, "kl_cov")
    penalty = torch.where(selected, coefficient * distance, 0)
    losses = -inputs.advantages * log_ratio.exp() + penalty
    return inputs.aggregate(losses), inputs.token_means(ppo_kl=distance)


def _selected(inputs: LossInputs, name: str) -> Tensor:
    """Returns `inputs.selected`, or selects the tokens of the loss from `inputs`. Raises ValueError if these are only a
    part of a mini-batch."""
    if inputs.selected is not None:
        return inputs.selected
    # without counts the inputs are a whole mini-batch, see `Aggregation`
    num_tokens = int(inputs.response_mask.bool().sum())
    batch_num_tokens = inputs.aggregation.batch_num_tokens
    if batch_num_tokens is not None and int(batch_num_tokens) != num_tokens:
        raise ValueError(
            f"{name}: {num_tokens} of the mini-batch's {int(batch_num_tokens)} tokens are here, and the choice of "
            "tokens would depend on how it was cut: choose over the whole batch and hand it in as selected (B, T)."
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
    mean log_prob) is between clip_cov_lb and clip_cov_ub and whose loss PPO's clip does not drop.

    Args:
        old_log_prob, advantages, response_mask: (B, T).
        config: the clip ranges, and in config.policy_loss clip_cov_ratio, clip_cov_lb and clip_cov_ub.
        log_prob: (B, T) under the current policy; None = old_log_prob, the policy before the update.
        generator: source of the draw; None = torch's default on the CPU.
    """
    options = config.policy_loss
    if not options.clip_cov_lb < options.clip_cov_ub:
        raise ValueError(
            f"clip_cov_lb={options.clip_cov_lb}, clip_cov_ub={options.clip_cov_ub}: no covariance lies between them."
        )
    if log_prob is None:
        log_prob = old_log_prob

    low, high = clip_range(config)
    log_ratio = masked_log_ratio(log_prob, old_log_prob, response_mask)
    _, is_clipped, _ = clipped_surrogate(log_ratio, advantages, low, high, clip_ratio_c=None)
    is_valid = response_mask.bool()
    covariance = _covariance(log_prob, advantages, is_valid)
    is_in_bounds = (covariance > options.clip_cov_lb) & (covariance < options.clip_cov_ub)
    is_candidate = is_valid & ~is_clipped & is_in_bounds
    candidates = is_candidate.flatten().nonzero().squeeze(-1)

    # at least one token, also if the share of a small batch rounds to 0
    num_selected = max(int(options.clip_cov_ratio * int(is_valid.sum())), 1)
    # randperm draws only on the device of its generator, and torch's default generator is that of the CPU
    device = torch.device("cpu")
    if generator is not None:
        device = generator.device
    order = torch.randperm(len(candidates), generator=generator, device=device)
    drawn = order.to(candidates.device)[:num_selected]
    return _mask_of(candidates[drawn], is_valid)


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

    Selects the max(kl_cov_ratio * valid tokens, 1) tokens with the largest covariance. The arguments are those of
    `select_clip_cov`; nothing is drawn with `generator`.
    """
    if log_prob is None:
        log_prob = old_log_prob
    is_valid = response_mask.bool()
    # masked tokens are the last in the order, and no more tokens are selected than are valid
    covariance = _covariance(log_prob, advantages, is_valid)
    covariance = torch.where(is_valid, covariance, -torch.inf)

    num_tokens = int(is_valid.sum())
    num_selected = max(int(config.policy_loss.kl_cov_ratio * num_tokens), 1)
    largest = covariance.flatten().topk(min(num_selected, num_tokens))
    return _mask_of(largest.indices, is_valid)


def _covariance(log_prob: Tensor, advantages: Tensor, is_valid: Tensor) -> Tensor:
    """Returns (A - mean A)(log_prob - mean log_prob) of each token, (B, T)."""
    mean_advantage = masked_mean(advantages, is_valid)
    mean_log_prob = masked_mean(log_prob, is_valid)
    return (advantages - mean_advantage) * (log_prob - mean_log_prob)


def _mask_of(positions: Tensor, like: Tensor) -> Tensor:
    """Returns a bool tensor of the shape of `like`, True at `positions` of the flattened tensor."""
    is_selected = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    is_selected[positions] = True
    return is_selected.view(like.shape)


TOKEN_SELECTIONS: dict[str, Callable[..., Tensor]] = {"clip_cov": select_clip_cov, "kl_cov": select_kl_cov}
"""The function that selects the tokens of each loss from the whole batch."""
