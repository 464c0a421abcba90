"""`LossInputs`, the only argument of a policy loss, with the two methods that every loss ends with.

    @register_policy_loss("mine")
    def mine(inputs: LossInputs) -> LossResult:
        losses = -inputs.advantages * inputs.log_ratio.exp()
        return inputs.aggregate(losses), inputs.token_means()

Losses do not count tokens. The denominators are counted over the whole mini-batch before it is split and travel in an
`Aggregation`, so that the losses of all parts sum to the loss of the mini-batch.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from verl_lite.algos.masked import (
    LOG_RATIO_BOUND,
    Count,
    agg_loss,
    bounded_log_ratio,
    check_shapes,
    compute_segment_masked_mean,
    masked_sum,
    masked_values,
)
from verl_lite.metrics import Metric

LossResult = tuple[Tensor, dict[str, Metric]]
"""The loss, a scalar, and the metrics of the micro-batch by name."""


class PolicyLossOptions(Protocol):
    """The parameters of single policy losses, as in `PolicyLossConfig`."""

    clip_cov_ratio: float
    clip_cov_lb: float
    clip_cov_ub: float
    kl_cov_ratio: float
    ppo_kl_coef: float
    dro_beta: float | None
    tis_lower_bound: float
    tis_upper_bound: float
    topr_positive_weight: float
    topr_negative_weight: float
    kimi15_tau: float


class LossConfig(Protocol):
    """The options that policy losses read, as in `ActorConfig`."""

    clip_ratio: float
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    clip_ratio_c: float | None
    loss_scale_factor: float | None
    tau_pos: float
    tau_neg: float

    @property
    def policy_loss(self) -> PolicyLossOptions: ...


@dataclass(frozen=True)
class Aggregation:
    """How values of tokens become a scalar: the arguments of `agg_loss`, which are the same for all parts of a
    mini-batch.

    Attributes:
        loss_agg_mode: one of LOSS_AGG_MODES.
        batch_num_tokens: number of valid tokens of the whole mini-batch, on all ranks. None: counted from the mask,
            which is correct only for a whole mini-batch.
        global_batch_size: number of sequences with a valid token in the whole mini-batch. None: counted, too.
        loss_scale_factor: divisor of seq-mean-token-sum-norm; None = the width of the mask.
        dp_size: factor that cancels a mean of gradients over ranks; 1 if gradients are summed.
    """

    loss_agg_mode: str = "token-mean"
    batch_num_tokens: Count | None = None
    global_batch_size: Count | None = None
    loss_scale_factor: float | None = None
    dp_size: int = 1

    def __call__(self, values: Tensor, mask: Tensor) -> Tensor:
        """Aggregates values (b, R) under a mask (b, R)."""
        return agg_loss(
            values,
            mask,
            self.loss_agg_mode,
            self.dp_size,
            self.batch_num_tokens,
            self.global_batch_size,
            self.loss_scale_factor,
        )


@dataclass(kw_only=True)
class LossInputs:
    """What a policy loss reads: columns of a micro-batch, options, and how the losses of tokens are aggregated.

    b is the number of rows, R the number of response tokens. Log-probs, advantages and weights are converted to at
    least fp32, and are 0 where `response_mask` is 0, so that a formula cannot read what is there, not even NaN.

    Attributes:
        log_prob: (b, R) log-probs of the response's tokens under the current policy, with gradient.
        old_log_prob: (b, R) log-probs under the policy that the ratio compares with: before the update, or that of the
            rollout with algorithm.rollout_correction.bypass_mode.
        advantages: (b, R).
        response_mask: (b, R), nonzero at the policy's tokens.
        config: the options of `actor`.
        aggregation: the aggregation mode and the denominators.
        rollout_is_weights: (b, R) importance weights of the rollout correction, which multiply the losses of the
            tokens. None = no weights.
        selected: (b, R) bool, the tokens that were chosen over the whole batch.
        scores: (b,) the score of each response.
        staleness: (b, R) weight updates since each token was sampled.

    The last three are None unless the loss is registered with their name in `columns`.

    Raises:
        ValueError: if a column has another shape than response_mask. The message names the column.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    config: LossConfig
    aggregation: Aggregation
    rollout_is_weights: Tensor | None = None
    selected: Tensor | None = None
    scores: Tensor | None = None
    staleness: Tensor | None = None

    def __post_init__(self) -> None:
        # response_mask first, because the others are compared with the first one
        check_shapes(
            "policy loss",
            response_mask=self.response_mask,
            old_log_prob=self.old_log_prob,
            log_prob=self.log_prob,
            advantages=self.advantages,
        )
        for name in ("rollout_is_weights", "selected", "staleness"):
            column: Tensor | None = getattr(self, name)
            if column is not None:
                check_shapes("policy loss", response_mask=self.response_mask, **{name: column})

        # once here, so that no loss has to do it
        self.log_prob = masked_values(self.log_prob, self.response_mask)
        self.old_log_prob = masked_values(self.old_log_prob, self.response_mask)
        self.advantages = masked_values(self.advantages, self.response_mask)
        if self.rollout_is_weights is not None:
            self.rollout_is_weights = masked_values(self.rollout_is_weights, self.response_mask)

    @property
    def log_ratio(self) -> Tensor:
        """The log-ratio of each token (b, R), log_prob - old_log_prob clamped to +-20."""
        return bounded_log_ratio(self.log_prob, self.old_log_prob)

    @property
    def importance_log_ratio(self) -> Tensor:
        """The log-ratio (b, R) by actor.ratio_type: that of the token, or with `segment` its mean over each run of
        valid tokens (ROLL).

        A config without ratio_type, such as verl's, is treated as ratio_type=token.
        """
        if getattr(self.config, "ratio_type", "token") != "segment":
            return self.log_ratio
        segment_means = compute_segment_masked_mean(self.log_prob - self.old_log_prob, self.response_mask)
        return segment_means.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def aggregate(
        self, token_losses: Tensor, *, loss_agg_mode: str | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """Weighs the losses of the tokens and aggregates them to the loss, a scalar.

        Args:
            token_losses: (b, R).
            loss_agg_mode: replaces `actor.loss_agg_mode` for a loss that is defined with a mode.
            weights: (b, R) or (b, 1), replace `rollout_is_weights`.
        """
        # weighted here and not in each loss, so that every loss works with the rollout correction
        if weights is None:
            weights = self.rollout_is_weights
        if weights is not None:
            token_losses = token_losses * weights

        aggregation = self.aggregation
        if loss_agg_mode is not None:
            aggregation = replace(aggregation, loss_agg_mode=loss_agg_mode)
        return aggregation(token_losses, self.response_mask)

    def token_means(self, **values: Tensor) -> dict[str, Metric]:
        """Returns metrics: the means of values (b, R) over the valid tokens, and the mean of -log_ratio as ppo_kl
        unless `values` has that name."""
        values = {"ppo_kl": -self.log_ratio} | values
        # the count of the micro-batch: a `Metric` divides once all micro-batches are combined
        num_tokens = self.response_mask.bool().sum()
        metrics = {}
        for name, column in values.items():
            total = masked_sum(column.detach(), self.response_mask)
            metrics[name] = Metric.mean(total, num_tokens)
        return metrics


def clip_range(config: LossConfig) -> tuple[float, float]:
    """Returns the clip ranges (low, high) of an actor's config; each falls back to clip_ratio if it is null.

    Raises:
        ValueError: if a range is negative, because [1 - low, 1 + high] would not contain the ratio 1.
    """
    # in verl both have a default of 0.2, and clip_ratio alone has no effect
    low = config.clip_ratio_low
    high = config.clip_ratio_high
    if low is None:
        low = config.clip_ratio
    if high is None:
        high = config.clip_ratio
    require_clip_range("clip_ratio", low, high)
    return low, high


def require_clip_range(name: str, low: float, high: float) -> None:
    """Raises ValueError if a clip range is negative.

    name: the option or argument to which both fall back, for the message.
    """
    if low < 0 or high < 0:
        raise ValueError(
            f"{name}_low={low}, {name}_high={high} (each is {name} where it is not given): both are expected to be at "
            "least 0, or the clip range [1 - low, 1 + high] would not hold the ratio 1."
        )
