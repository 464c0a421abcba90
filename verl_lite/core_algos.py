"""The mathematics of policy optimisation: advantage estimators, policy losses, their aggregation, KL estimators.

This module exports the names that verl's users import, except `compute_policy_loss_reinforce` and
`compute_policy_loss_bypass_mode` (use `algorithm.rollout_correction` with any loss), `compute_pf_ppo_reweight_data`
(`trainer.ppo.pf_ppo`) and the functions for images (`verl_lite.diffusion.flow_sde`). The folder `algos` implements
them: estimators in `advantages` and `advantages_by_token` (verl's) and `agentic_advantages` (ROLL's), losses in
`policy_losses`, `reinforce_losses`, `covariance_losses` and `value_loss`, their argument in `loss_inputs`, masked and
group sums and `agg_loss` in `masked`. The guide, README.md in this folder, lists every name with its formula, key and
source.

All functions are pure. Shapes are (B, T) with T response tokens; `response_mask` is 1 on the policy's tokens. Three
rules hold for all functions. A value under mask 0, even NaN, has no effect. A row whose mask is all 0 (padding, a
failed reward) has weight zero in every loss, count and group statistic. Losses get their denominators as arguments,
counted once over the whole mini-batch before it is split. The losses of all parts thus sum to the loss of the
mini-batch, and the gradient does not depend on micro-batches, ranks or packing.

Two registries are the extension points: `@register_adv_est(name)` and `@register_policy_loss(name)`.
"""

from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Protocol

import torch
from torch import Tensor

from verl_lite.algos.advantages import (
    ADV_ESTIMATOR_REGISTRY,
    compute_gae_advantage_return,
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_maxrl_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
    outcome_scores,
)
from verl_lite.algos.advantages_by_token import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)
from verl_lite.algos.agentic_advantages import (
    compute_agentic_reinforce_advantage,
    compute_agentic_reinforce_return,
    compute_gigpo_advantage,
    compute_reinforce_advantage,
    compute_reinforce_return,
    compute_step_reinforce_advantage,
)
from verl_lite.algos.covariance_losses import clip_cov, kl_cov
from verl_lite.algos.loss_inputs import Aggregation, LossInputs, LossResult, clip_range
from verl_lite.algos.masked import (
    LOG_RATIO_BOUND,
    LOSS_AGG_MODES,
    Count,
    RunningMoments,
    agg_loss,
    at_least_fp32,
    check_shapes,
    compute_clip_fraction,
    compute_segment_masked_mean,
    group_ids,
    group_mean_std,
    masked_log_ratio,
    masked_mean,
    masked_normalize,
    masked_sum,
    masked_var,
    masked_whiten,
)
from verl_lite.algos.policy_loss_registry import (
    LOSS_COLUMNS,
    POLICY_LOSS_REGISTRY,
    PolicyLoss,
    PolicyLossFn,
    VerlPolicyLoss,
    get_policy_loss,
    get_policy_loss_fn,
    register_policy_loss,
)
from verl_lite.algos.policy_losses import (
    a3po,
    clipped_surrogate,
    compute_policy_loss,
    geo_mean,
    gspo,
    sapo,
    vanilla,
)
from verl_lite.algos.reinforce_losses import cispo, dppo_kl, dppo_tv, dro, gpg, kimi15, tis, topr
from verl_lite.algos.value_loss import ValueLossInputs, value_loss

AdvantageEstimatorFn = Callable[..., tuple[Tensor, Tensor]]


def register_adv_est(
    name_or_enum: str | Enum, *, groups: bool | None = None, rows: str | None = None, raw_scores: bool = False
) -> Callable[[AdvantageEstimatorFn], AdvantageEstimatorFn]:
    """Returns a decorator that registers an advantage estimator as `algorithm.adv_estimator=name`.

    The estimator is called by keyword with token_level_rewards, response_mask (B, T), index (B,) group ids, config, and
    the other columns of the batch. It returns (advantages, returns), both (B, T).

    Args:
        groups: True if the estimator compares the rows of a group, so that a group of one row gives no signal:
            rollout.n=1 is refused. None if it also accepts such groups. Unless it is False, estimators with the
            parameter `index` do not see groups of several rows in which fewer than two rewards are valid.
        rows: kind of rows it requires from agents: "step" (episodes only) or "trajectory"; None = either.
        raw_scores: it does not read the scores that `algorithm.norm_*`, `reward_clip` and `whiten_rewards` change.
    """
    return ADV_ESTIMATOR_REGISTRY.register(name_or_enum, groups=groups, rows=rows, raw_scores=raw_scores)


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvantageEstimatorFn:
    """Returns the estimator by name or path pkg.module:function. Raises UserError if there is none."""
    return ADV_ESTIMATOR_REGISTRY.get_fn(name_or_enum)


# verl has two implementations of GRPO, here both names are one function
compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
AdvantageEstimator = StrEnum("AdvantageEstimator", {name.upper(): name for name in ADV_ESTIMATOR_REGISTRY})  # type: ignore[misc]
"""verl's enum of estimator names. The registry accepts a member or its name."""

# the policy losses under verl's names, with verl's arguments
compute_policy_loss_a3po = VerlPolicyLoss(a3po)
compute_policy_loss_cispo = VerlPolicyLoss(cispo)
compute_policy_loss_clip_cov = VerlPolicyLoss(clip_cov)
compute_policy_loss_dppo_kl = VerlPolicyLoss(dppo_kl)
compute_policy_loss_dppo_tv = VerlPolicyLoss(dppo_tv)
compute_policy_loss_dro = VerlPolicyLoss(dro)
compute_policy_loss_geo_mean = VerlPolicyLoss(geo_mean)
compute_policy_loss_gpg = VerlPolicyLoss(gpg)
compute_policy_loss_gspo = VerlPolicyLoss(gspo)
compute_policy_loss_kimi15 = VerlPolicyLoss(kimi15)
compute_policy_loss_kl_cov = VerlPolicyLoss(kl_cov)
compute_policy_loss_sapo = VerlPolicyLoss(sapo)
compute_policy_loss_tis = VerlPolicyLoss(tis)
compute_policy_loss_topr = VerlPolicyLoss(topr)
compute_policy_loss_vanilla = VerlPolicyLoss(vanilla)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `value_loss` from verl's arguments. The gradient does not depend on the split (ROLL's does).

    Args:
        vpreds, returns, values, response_mask: (B, T); see `ValueLossInputs`.
        cliprange_value: largest change of a value that lowers the loss, above 0.
        loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor: see `agg_loss`.

    Returns:
        The loss, and the share of the valid tokens whose clip was active.

    Raises:
        ValueError: cliprange_value is not above 0, or shapes differ.
    """
    aggregation = Aggregation(loss_agg_mode, batch_num_tokens, global_batch_size, loss_scale_factor, dp_size)
    inputs = ValueLossInputs(
        vpreds=vpreds,
        returns=returns,
        values=values,
        response_mask=response_mask,
        cliprange_value=cliprange_value,
        aggregation=aggregation,
    )
    return value_loss(inputs)


KL_ALIASES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str, response_mask: Tensor | None = None) -> Tensor:
    """Estimates KL(policy || reference) at each sampled token from d = logprob - ref_logprob (B, T).

      k1 (= kl)            d                  unbiased value; as a loss its gradient has expectation 0
      abs                  |d|
      k2 (= mse)           d^2 / 2            biased value, unbiased gradient
      k3 (= low_var_kl)    exp(-d) + d - 1    unbiased value, low variance, biased gradient; within +-10, -d within +-20
      any with "+"         that value, the gradient of k2 (http://joschu.net/blog/kl-approx.html)

    With `response_mask`, d is 0 under mask 0, so a NaN there does not reach the gradient.

    Raises:
        NotImplementedError: the name is "full", which requires whole distributions.
        ValueError: the name is unknown, or shapes differ.
    """
    name = kl_penalty.removesuffix("+")
    if name == "full":
        raise NotImplementedError("kl_penalty='full' needs the distributions over the vocabulary, not log-probs.")
    if name not in KL_ALIASES:
        names = ", ".join(KL_ALIASES)
        raise ValueError(f"Unknown kl_penalty: {kl_penalty!r}. Expected one of {names}, with or without '+'.")
    expected_shape = tuple(logprob.shape)
    for argument, tensor in (("ref_logprob", ref_logprob), ("response_mask", response_mask)):
        if tensor is not None and tensor.shape != logprob.shape:
            raise ValueError(
                f"kl_penalty: {argument} has shape {tuple(tensor.shape)}, expected that of logprob, {expected_shape}."
            )

    difference = at_least_fp32(logprob) - at_least_fp32(ref_logprob)
    if response_mask is not None:
        difference = torch.where(response_mask.bool(), difference, 0)
    estimator = KL_ALIASES[name]
    estimate = _kl_estimate(difference, estimator)
    if not kl_penalty.endswith("+") or estimator == "k2":
        return estimate
    # the value of one estimator with the gradient of another
    with_gradient = _kl_estimate(difference, "k2")
    return estimate.detach() + with_gradient - with_gradient.detach()


# for functions with an argument named kl_penalty
_kl_penalty = kl_penalty


def _kl_estimate(difference: Tensor, name: str) -> Tensor:
    match name:
        case "k1":
            return difference
        case "abs":
            return difference.abs()
        case "k2":
            return 0.5 * difference.square()
        case _:
            # verl's bounds: exp(-d) overflows where the policies are far apart
            inverse = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            return (inverse.exp() - inverse - 1).clamp(-10.0, 10.0)


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Returns the value of `kl_penalty`, (B, T), ignoring a "+", which changes only the gradient. (verl's name)"""
    return _kl_penalty(logprob, ref_logprob, kl_penalty.removesuffix("+"))


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, action_mask: Tensor | None = None, kl_penalty: str = "kl"
) -> Tensor:
    """Computes `kl_penalty` with ROLL's name and arguments; 0 where `action_mask` is 0."""
    return _kl_penalty(log_probs, log_probs_base, kl_penalty, action_mask)


def apply_kl_penalty(
    token_level_scores: Tensor,
    log_prob: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    kl_penalty_type: str = "kl",
) -> tuple[Tensor, float]:
    """Subtracts the KL to the reference model from the rewards: token_level_scores - kl_coef * kl.

    Args:
        token_level_scores, log_prob, ref_log_prob, response_mask: (B, T).
        kl_coef: the coefficient, such as the controller's value.
        kl_penalty_type: estimator of the KL, see `kl_penalty`.

    Returns:
        The rewards (B, T), and the mean KL, used by the controller and `actor/reward_kl_penalty`: the mean over the
        tokens of each sequence, averaged over the sequences with a valid token.

    Raises:
        ValueError: shapes differ, or the estimator is unknown.
    """
    check_shapes("apply_kl_penalty", token_level_scores=token_level_scores, response_mask=response_mask)
    # rewards are constants of the loss
    with torch.no_grad():
        # 0 under mask 0, as every estimate of d = 0
        divergence = kl_penalty(log_prob, ref_log_prob, kl_penalty_type, response_mask)

        lengths = response_mask.bool().sum(dim=-1)
        num_sequences = (lengths > 0).sum().clamp(min=1)
        per_sequence = divergence.sum(dim=-1) / lengths.clamp(min=1)
        mean_kl = float(per_sequence.sum() / num_sequences)
    return token_level_scores - kl_coef * divergence, mean_kl


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Returns token_level_scores - kl_ratio (old_log_prob - ref_log_prob), all (B, T), unmasked. (verl's name)"""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


class FixedKLController:
    """A constant KL coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing: the coefficient is constant."""

    # in the checkpoint, so that a resumed run continues with the same coefficient
    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class AdaptiveKLController(FixedKLController):
    """A KL coefficient that tracks a target KL: value *= 1 + clip(kl / target - 1, +-0.2) n_steps / horizon.

    Ziegler et al. 2019, arXiv:1909.08593, section 2.2. `horizon` and `n_steps` are in sequences.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        super().__init__(init_kl_coef)
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(f"algorithm.kl_ctrl: target_kl={target_kl} and horizon={horizon} must both be above 0.")
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Updates the coefficient after a batch of `n_steps` sequences with mean KL `current_kl`."""
        error = current_kl / self.target - 1.0
        # the paper's bound, so that one batch far from the target changes the coefficient little
        bounded_error = min(max(error, -0.2), 0.2)
        self.value *= 1.0 + bounded_error * n_steps / self.horizon


class KLControlOptions(Protocol):
    """The options of `algorithm.kl_ctrl`."""

    @property
    def type(self) -> str: ...
    @property
    def kl_coef(self) -> float: ...
    @property
    def target_kl(self) -> float: ...
    @property
    def horizon(self) -> float: ...


def get_kl_controller(kl_ctrl: KLControlOptions) -> FixedKLController:
    """Returns the controller for `algorithm.kl_ctrl`. Raises ValueError for an unknown type."""
    match kl_ctrl.type:
        case "fixed":
            return FixedKLController(kl_ctrl.kl_coef)
        case "adaptive":
            return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
        case other:
            raise ValueError(f"algorithm.kl_ctrl.type={other!r}: expected fixed or adaptive.")


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Returns the entropy of softmax(logits) in nats: (..., V) -> (...), differentiable, in at least fp32.

    A logit of -inf (an impossible token) contributes 0.
    """
    log_probs = torch.log_softmax(at_least_fp32(logits), dim=-1)
    # 0 * -inf is NaN
    finite_log_probs = torch.where(log_probs.isneginf(), 0, log_probs)
    probs = log_probs.exp()
    return -(probs * finite_log_probs).sum(dim=-1)


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns log softmax(logits) at the labels: (..., V), (...) -> (...), differentiable, in at least fp32."""
    logits = at_least_fp32(logits)
    label_logits = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    # not log_softmax, whose result is as large as the logits
    normalizers = logits.logsumexp(dim=-1)
    return label_logits - normalizers


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Aggregates the entropy of softmax(logits), (B, T, V), over the valid tokens of a whole mini-batch."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)
