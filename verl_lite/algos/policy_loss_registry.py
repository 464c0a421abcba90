"""The registry of policy losses, and the two directions between `LossInputs` and verl's signature.

`register_policy_loss` registers a function of `LossInputs`, or a function with verl's arguments. `get_policy_loss`
returns it as a `PolicyLoss`, which the trainer calls with `LossInputs`. `VerlPolicyLoss` is the other direction: it
calls a function of `LossInputs` with verl's arguments.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from torch import Tensor

from verl_lite.algos.loss_inputs import Aggregation, LossConfig, LossInputs, LossResult
from verl_lite.algos.masked import Count
from verl_lite.metrics import Metric, Part, declared
from verl_lite.registry import Registry, accepts, takes

LOSS_COLUMNS = ("selected", "scores", "staleness")
"""The columns that a registration can request; see `LossInputs`."""
_NUM_VERL_ARGUMENTS = 7  # from old_log_prob to rollout_is_weights

DeclaredMetrics = Mapping[str, Metric | Part]
PolicyLossFn = Callable[..., tuple[Tensor, DeclaredMetrics]]
"""A policy loss of `LossInputs` or with verl's arguments, whose metrics can be plain numbers."""
Registered = TypeVar("Registered", bound=PolicyLossFn)

POLICY_LOSS_REGISTRY: Registry[PolicyLossFn] = Registry("policy loss")


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss as the trainer calls it, and the columns of LOSS_COLUMNS that it reads."""

    function: PolicyLossFn
    columns: tuple[str, ...] = ()

    def __call__(self, inputs: LossInputs) -> LossResult:
        """Computes the loss and its metrics. Metrics that are plain numbers are converted by `declared`."""
        if has_verl_signature(self.function):
            loss, metrics = self._call_with_verl_arguments(inputs)
        else:
            loss, metrics = self.function(inputs)

        with_reduction = {name: metric for name, metric in metrics.items() if isinstance(metric, Metric)}
        if len(with_reduction) == len(metrics):
            return loss, with_reduction
        # only plain numbers need the count of tokens, which costs operations on the device
        num_tokens = inputs.response_mask.bool().sum().double()
        return loss, declared(metrics, num_tokens, inputs.aggregation.batch_num_tokens)

    def _call_with_verl_arguments(self, inputs: LossInputs) -> tuple[Tensor, DeclaredMetrics]:
        aggregation = inputs.aggregation
        keywords: dict[str, object] = {}
        for name in self.columns:
            column = getattr(inputs, name)
            if column is not None:
                keywords[name] = column
        for name in ("batch_num_tokens", "global_batch_size"):
            if accepts(self.function, name):
                keywords[name] = getattr(aggregation, name)

        config: LossConfig | _VerlConfig = inputs.config
        if "batch_num_tokens" not in keywords:
            # verl's own losses pass **config.global_batch_info to agg_loss
            config = _VerlConfig(inputs.config, aggregation)

        return self.function(
            inputs.old_log_prob,
            inputs.log_prob,
            inputs.advantages,
            inputs.response_mask,
            aggregation.loss_agg_mode,
            config,
            inputs.rollout_is_weights,
            **keywords,
        )


def register_policy_loss(
    name: str | Enum,
    *,
    columns: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    loss_agg_mode: str | None = None,
    bounds_ratio: bool = False,
) -> Callable[[Registered], Registered]:
    """Returns a decorator that registers a policy loss as `actor.policy_loss.loss_mode=name`.

    The loss is a function f(inputs: LossInputs) -> (loss, metrics), or a function with verl's arguments
    f(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights). The latter finds
    the denominators of the mini-batch in config.global_batch_info, or gets them as batch_num_tokens and
    global_batch_size if it accepts these keywords.

    Args:
        columns: the columns of LOSS_COLUMNS that the loss reads. A function with verl's arguments gets them by keyword,
            and also those that it names as parameters.
        needs: options of `actor.policy_loss` that must not be null.
        loss_agg_mode: the only aggregation mode that the loss supports; None = all modes.
        bounds_ratio: True if the weight of a token is bounded however much the policy has changed since it was sampled.
            async_training.max_off_policy_threshold above 0 requires it.

    Raises:
        ValueError: if another loss has the name, or a column is not one of LOSS_COLUMNS.
    """
    for column in columns:
        if column not in LOSS_COLUMNS:
            raise ValueError(
                f"policy loss {name}: found the column {column!r}, expected some of {', '.join(LOSS_COLUMNS)}"
            )

    def register(function: Registered) -> Registered:
        declare = POLICY_LOSS_REGISTRY.register(
            name,
            columns=(*columns, *_named_columns(function)),
            needs=needs,
            loss_agg_mode=loss_agg_mode,
            bounds_ratio=bounds_ratio,
        )
        declare(function)
        return function

    return register


def get_policy_loss(name: str | Enum) -> PolicyLoss:
    """Returns the policy loss by name or path pkg.module:function. Raises UserError if there is none."""
    return policy_loss_of(POLICY_LOSS_REGISTRY.get_fn(name))


def policy_loss_of(function: PolicyLossFn) -> PolicyLoss:
    """Returns a loss with the columns that its registration declares."""
    # a loss under verl's name has the columns of its function
    if isinstance(function, VerlPolicyLoss):
        return policy_loss_of(function.function)
    for name, facts in POLICY_LOSS_REGISTRY.facts.items():
        if POLICY_LOSS_REGISTRY.get(name) is function:
            columns = facts["columns"]
            assert isinstance(columns, tuple)
            return PolicyLoss(function, columns)
    return PolicyLoss(function, _named_columns(function))


def get_policy_loss_fn(name: str | Enum) -> PolicyLossFn:
    """Returns the policy loss by name or path pkg.module:function as a function with verl's arguments. Raises UserError
    if there is none."""
    function = POLICY_LOSS_REGISTRY.get_fn(name)
    if has_verl_signature(function):
        return function
    return VerlPolicyLoss(function)


def has_verl_signature(function: Callable[..., object]) -> bool:
    """Returns True if a policy loss accepts verl's arguments by position. A function of `LossInputs` does not."""
    try:
        # bind_partial, because a loss may require further keywords
        inspect.signature(function).bind_partial(*range(_NUM_VERL_ARGUMENTS))
    except TypeError:
        return False
    return True


def _named_columns(function: Callable[..., object]) -> tuple[str, ...]:
    return tuple(column for column in LOSS_COLUMNS if takes(function, column))


class VerlPolicyLoss:
    """A policy loss of `LossInputs` as a function with verl's arguments.

    The tensors are (B, T), and the call returns (loss, metrics).
    """

    def __init__(self, function: PolicyLossFn) -> None:
        self.function = function
        self.__name__ = f"compute_policy_loss_{function.__name__}"
        self.__doc__ = function.__doc__

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: LossConfig | None = None,
        rollout_is_weights: Tensor | None = None,
        *,
        batch_num_tokens: Count | None = None,
        global_batch_size: Count | None = None,
        **columns: Tensor | None,
    ) -> LossResult:
        """Computes the loss and its metrics.

        Args:
            loss_agg_mode, batch_num_tokens, global_batch_size: see `agg_loss`. Without the counts, the arguments are
                treated as the whole mini-batch.
            config: an object with the loss's options as attributes, such as ActorConfig.
            rollout_is_weights: (B, T) factors of the token losses, or None.
            columns: columns of LOSS_COLUMNS that the loss reads.

        Raises:
            ValueError: if `config` is missing or a tensor has another shape than `response_mask`.
        """
        if config is None:  # optional only in the signature, as in verl
            raise ValueError(f"{self.__name__}: config is missing; an ActorConfig or its like is expected.")
        aggregation = Aggregation(loss_agg_mode, batch_num_tokens, global_batch_size, config.loss_scale_factor)
        inputs = LossInputs(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            config=config,
            aggregation=aggregation,
            rollout_is_weights=rollout_is_weights,
            **columns,
        )
        return PolicyLoss(self.function)(inputs)


class _VerlConfig:
    """An actor's config with the denominators of the mini-batch in global_batch_info, where verl's losses read them."""

    def __init__(self, config: LossConfig, aggregation: Aggregation) -> None:
        self._config = config
        self.global_batch_info = {
            # the names are those of agg_loss's arguments
            "dp_size": aggregation.dp_size,
            "loss_scale_factor": aggregation.loss_scale_factor,
            "batch_num_tokens": aggregation.batch_num_tokens,
            "global_batch_size": aggregation.global_batch_size,
        }

    # called only for names that are not set above
    def __getattr__(self, name: str) -> object:
        return getattr(self._config, name)
