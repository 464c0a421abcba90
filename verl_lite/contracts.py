"""Checks for your own advantage estimators and policy losses, to be called in your tests.

    from verl_lite.contracts import check_adv_estimator, check_policy_loss
    check_adv_estimator(my_estimator)
    check_policy_loss(my_loss)

The project's tests run the checks on every registered function. A check calls the function on a small random batch with
rows of different lengths, masked tokens inside rows, rows without a valid token and a group of one. It raises
`BrokenPromise` (an AssertionError), which names the broken promise and its correction.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from verl_lite.algos.loss_inputs import Aggregation, LossConfig, LossInputs
from verl_lite.algos.masked import LOSS_AGG_MODES
from verl_lite.algos.policy_loss_registry import PolicyLoss, PolicyLossFn, policy_loss_of
from verl_lite.config import ActorConfig, AlgorithmConfig, PolicyLossConfig
from verl_lite.metrics import reduce_metrics

ROWS, WIDTH = 24, 7
EMPTY_ROWS = (3, 17)
T = TypeVar("T")
Columns = dict[str, object]
LossColumns = dict[str, torch.Tensor]
Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
_EMPTY_ROWS_PROMISE = "rows without a valid token have no weight: count only other rows"
_WHERE = (
    "apply torch.where(response_mask.bool(), x, 0) to each column, not a product with the mask, since 0 * NaN is NaN"
)


class BrokenPromise(AssertionError):
    """A function breaks a promise that the trainer relies on."""


def check_adv_estimator(function: Estimator, *, groups_of_one: bool = True, **columns: object) -> None:
    """Raises `BrokenPromise` unless an advantage estimator keeps all promises that the trainer relies on.

    Args:
        function: an estimator, as for `register_adv_est`.
        groups_of_one: True if the estimator accepts groups with one row.
        columns: arguments that extend or replace those of `estimator_batch`. Arrays and tensors with ROWS entries are
            permuted with the rows.
    """
    batch = estimator_batch(groups_of_one=groups_of_one) | columns
    mask = _mask_of(batch)
    result = _call_unchanged(function, batch)
    _require(isinstance(result, tuple) and len(result) == 2, "an estimator returns (advantages, returns)")
    for name, values in zip(("advantages", "returns"), result, strict=True):
        _require_valid_estimates(name, values, mask)

    # a number affects statistics over all tokens, and NaN also a product with the mask
    for hidden_value in (1.5, math.nan):
        result_with_hidden = function(**hide(batch, hidden_value))
        for values, expected in zip(result_with_hidden, result, strict=True):
            _require(torch.equal(values, expected), f"values under mask 0 do not affect the result: {_WHERE}")

    rows_with_tokens = mask.any(dim=1).nonzero().squeeze(1)
    _require_same_rows(function, batch, result, rows_with_tokens, _EMPTY_ROWS_PROMISE)
    _require_same_rows(function, batch, result, _shuffled(1), "the order of the rows does not matter: group by `index`")

    # the standard deviation of one value is NaN, and the mean of none
    for num_tokens in (0, 1):
        few_tokens = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
        few_tokens[0, :num_tokens] = 1
        promise = f"the result is finite for a batch with {num_tokens} tokens: no deviation of one value, no 0 / 0"
        for values in function(**batch | {"response_mask": few_tokens}):
            _require(_finite(values), promise)
    _require_own_device(lambda: function(**batch), result)


def _require_valid_estimates(name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
    """Checks shape and type of the advantages or returns, and that they are finite, not all 0, and 0 under mask 0."""
    shape = tuple(values.shape)
    is_shaped = shape == (ROWS, WIDTH) and values.dtype.is_floating_point
    _require(is_shaped, f"{name} are floating-point tensors (B, T), found {shape} of {values.dtype}")
    _require(_finite(values), f"{name} are finite, also with empty rows: clamp divisors to at least 1")
    _require(bool((values != 0).any()), f"{name} are not all zero")
    masked_values = values[mask == 0]
    _require(not bool(masked_values.any()), "the result is 0 under mask 0: end with torch.where on the mask")


def _require_same_rows(
    function: Estimator, batch: Columns, result: Sequence[torch.Tensor], rows: torch.Tensor, promise: str
) -> None:
    """Checks that the estimates of these rows alone are those of the whole batch."""
    estimates = function(**take_rows(batch, rows))
    for values, expected in zip(estimates, result, strict=True):
        _require(_close(values, expected[rows]), promise)


def check_policy_loss(function: PolicyLossFn, config: LossConfig | None = None, **columns: torch.Tensor) -> None:
    """Raises `BrokenPromise` unless a policy loss keeps all promises that the trainer relies on.

    Args:
        function: a loss, as for `register_policy_loss`.
        config: the loss's options; None = an ActorConfig.
        columns: tensors (ROWS, ...) of LOSS_COLUMNS that the loss reads.
    """
    # dro has no default for beta
    options = config or ActorConfig(policy_loss=PolicyLossConfig(dro_beta=0.5))
    case = _LossCase(policy_loss_of(function), options)
    batch = loss_batch() | columns
    mask = batch["response_mask"]
    num_tokens = int(mask.sum())
    num_sequences = int(mask.any(dim=1).sum())
    counts = (num_tokens, num_sequences)

    # with the mode that the checks without a mode of their own use
    def compute(**columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return case.compute("token-mean", counts, columns)

    loss, gradient = _call_unchanged(compute, batch)
    _require(bool((gradient != 0).any()), "the gradient is not all zero")
    _require_no_padding_in_metrics(case, counts, batch)
    for mode in LOSS_AGG_MODES:
        _require_additive(case, mode, counts, batch)
        _require_empty_part(case, mode, batch)

    # extreme log-ratios of both signs, for tokens with positive and for tokens with negative advantages: a clip bounds
    # only one of them; `compute` requires finite results, and exp(1400) is infinite in fp64, the dtype of the batch
    for sign in (1, -1):
        keeps_log_prob = batch["advantages"] * sign > 0
        extreme = torch.where(keeps_log_prob, batch["log_prob"], -1400.0)
        for name in ("log_prob", "old_log_prob"):
            compute(**batch | {name: extreme})
    _require_own_device(lambda: compute(**batch)[:1], (loss,))


@dataclass(frozen=True)
class _LossCase:
    """A policy loss that is checked, with its options."""

    policy_loss: PolicyLoss
    config: LossConfig

    def compute(self, mode: str, counts: tuple[int, int], columns: LossColumns) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss and its gradient. Checks that loss, gradient and metrics are finite and that the inputs do
        not change.

        Args:
            mode: one of LOSS_AGG_MODES.
            counts: numbers of tokens and of sequences of the mini-batch.
            columns: the columns of `LossInputs`.
        """
        log_prob = columns["log_prob"].clone().requires_grad_()
        inputs = self._inputs(mode, counts, columns | {"log_prob": log_prob})
        # `replace` masks the columns once more, into new tensors
        copy = replace(inputs)
        loss, metrics = self.policy_loss(inputs)
        for name in ("log_prob", "old_log_prob", "advantages", "rollout_is_weights"):
            is_same = torch.equal(getattr(inputs, name), getattr(copy, name))
            _require(is_same, f"the function does not modify its arguments: {name}; replace clamp_ by clamp")

        _require(loss.dim() == 0 and loss.requires_grad, "a loss is a scalar that depends on log_prob")
        loss.backward()
        gradient = log_prob.grad
        if gradient is None:
            gradient = torch.zeros_like(log_prob)
        promise = f"the loss is finite, also with empty rows and extreme log-ratios: use agg_loss and clamp ({mode})"
        _require(_finite(loss) and _finite(gradient), promise)
        for value in reduce_metrics(metrics).values():
            _require(math.isfinite(value), "metrics are finite numbers: clamp divisors to at least 1")
        return loss.detach(), gradient

    def metrics(self, counts: tuple[int, int], columns: LossColumns) -> dict[str, float]:
        """Returns the metrics of the loss."""
        inputs = self._inputs("token-mean", counts, columns)
        _, metrics = self.policy_loss(inputs)
        return reduce_metrics(metrics)

    def _inputs(self, mode: str, counts: tuple[int, int], columns: LossColumns) -> LossInputs:
        num_tokens, num_sequences = counts
        aggregation = Aggregation(mode, num_tokens, num_sequences, self.config.loss_scale_factor)
        return LossInputs(config=self.config, aggregation=aggregation, **columns)


def _require_additive(case: _LossCase, mode: str, counts: tuple[int, int], batch: LossColumns) -> None:
    """Checks that the losses of the parts of a mini-batch sum to the loss of the mini-batch."""
    whole_loss, whole_gradient = case.compute(mode, counts, batch)
    # the first part has only a row without tokens
    empty_row = torch.tensor(EMPTY_ROWS[:1])
    shuffled = _shuffled(2)
    other_rows = shuffled[shuffled != empty_row]
    order = torch.cat([empty_row, other_rows])
    # single rows, three uneven parts, and one row against the rest
    for sizes in ([1] * ROWS, [1, 9, ROWS - 10], [1, ROWS - 1]):
        losses = []
        gradients = []
        for rows in order.split(sizes):
            part = {name: column[rows] for name, column in batch.items()}
            loss, gradient = case.compute(mode, counts, part)
            losses.append(loss)
            gradients.append(gradient)
        promise = (
            f"the parts of a mini-batch sum to the whole ({mode}, {len(sizes)} parts): do not divide by counts of "
            "the micro-batch, but by batch_num_tokens and global_batch_size, as agg_loss does"
        )
        _require(_close(torch.stack(losses).sum(), whole_loss), promise)
        _require(_close(torch.cat(gradients), whole_gradient[order]), promise)


def _require_empty_part(case: _LossCase, mode: str, batch: LossColumns) -> None:
    """Checks that a mini-batch without tokens has loss 0 and gradient 0."""
    empty_mask = torch.zeros_like(batch["response_mask"])
    without_tokens = batch | {"response_mask": empty_mask}
    loss, gradient = case.compute(mode, (0, 0), without_tokens)
    is_zero = not loss.any() and not gradient.any()
    _require(is_zero, f"a part without a token has loss 0 ({mode}): clamp divisors to at least 1")


def _require_no_padding_in_metrics(case: _LossCase, counts: tuple[int, int], batch: LossColumns) -> None:
    """Checks that metrics do not change if a column of padding is added."""
    padded = dict(batch)
    for name, column in batch.items():
        if column.dim() == 2:
            padded[name] = torch.nn.functional.pad(column, (0, 1))
    expected = case.metrics(counts, batch)
    with_padding = case.metrics(counts, padded)
    for name, value in with_padding.items():
        is_close = math.isclose(value, expected[name], rel_tol=1e-9, abs_tol=1e-9)
        _require(is_close, f"metrics do not count tokens under mask 0: {name} changes with padding")


def estimator_batch(seed: int = 0, groups_of_one: bool = True) -> Columns:
    """Returns all arguments of the registered estimators, in fp64, for rows with masked tokens and `EMPTY_ROWS`."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    mask = _ragged_mask(generator)
    rewards = draw() * mask
    values = draw()
    old_log_probs = -draw().abs()
    # the square of the sampled token's probability, and a random share of the largest sum of squares that the other
    # tokens can have
    probs = old_log_probs.exp()
    sum_pi_squared = probs**2 + draw().sigmoid() * (1 - probs) ** 2

    # five groups of rows, two episodes for each of them, three states
    tasks = [f"task-{row % 5}" for row in range(ROWS)]
    if groups_of_one:
        tasks[-1] = "task-alone"
    trajectories = [f"{task}/{row % 2}" for row, task in enumerate(tasks)]
    states = [f"state-{row % 3}" for row in range(ROWS)]
    keys = ["correct", "short"]
    options = AlgorithmConfig(
        gamma=0.9, gdpo_reward_keys=keys, gdpo_reward_weights=[1.0, 0.5], norm_adv_by_std_in_grpo=True
    )
    return {
        "token_level_rewards": rewards,
        "values": values,
        "old_log_probs": old_log_probs,
        "sum_pi_squared": sum_pi_squared,
        "response_mask": mask,
        "index": np.array(tasks, dtype=object),
        "reward_baselines": torch.randn(ROWS, generator=generator, dtype=torch.float64),
        "traj_id": np.array(trajectories, dtype=object),
        # descending, because an episode's rows come in any order
        "step": np.arange(ROWS)[::-1].copy(),
        "state_hash": np.array(states, dtype=object),
        "non_tensor_batch": {key: torch.randn(ROWS, generator=generator).numpy() for key in keys},
        "gamma": 0.9,
        "lam": 0.8,
        "config": options,
    }


def loss_batch(seed: int = 0, spread: float = 0.6) -> LossColumns:
    """Returns the columns of a policy loss, in fp64. `spread`: deviation of the log-ratios, in nats per token."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    # a spread of log-ratios around 0, but no log-prob above 0
    old_log_prob = -draw().abs() - 0.7
    log_ratio = spread * draw()
    log_prob = (old_log_prob + log_ratio).clamp(max=-0.01)
    return {
        "old_log_prob": old_log_prob,
        "log_prob": log_prob,
        "advantages": draw(),
        "response_mask": _ragged_mask(generator),
        "rollout_is_weights": draw().exp(),
    }


def take_rows(columns: Columns, rows: torch.Tensor) -> Columns:
    """Selects rows (k,) from every column with ROWS entries."""
    selected: Columns = {}
    for name, value in columns.items():
        if isinstance(value, dict):
            value = take_rows(value, rows)
        elif isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == ROWS:
            value = value[rows]
        elif isinstance(value, np.ndarray) and value.ndim > 0 and len(value) == ROWS:
            value = value[rows.numpy()]
        selected[name] = value
    return selected


def hide(columns: Columns, value: float) -> Columns:
    """Writes `value` into every floating-point column (B, T) where the mask is 0."""
    is_hidden = _mask_of(columns) == 0
    changed = dict(columns)
    for name, column in columns.items():
        if isinstance(column, torch.Tensor) and column.dim() == 2 and column.dtype.is_floating_point:
            changed[name] = torch.where(is_hidden, value, column)
    return changed


def _mask_of(columns: Columns) -> torch.Tensor:
    mask = columns["response_mask"]
    assert isinstance(mask, torch.Tensor)
    return mask


def _ragged_mask(generator: torch.Generator) -> torch.Tensor:
    """Returns a mask (B, T) of rows with different lengths and with masked tokens inside, the last one full."""
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    is_in_row = torch.arange(WIDTH) < lengths[:, None]
    is_valid = torch.rand(ROWS, WIDTH, generator=generator) > 0.25
    mask = is_in_row & is_valid
    mask[list(EMPTY_ROWS)] = False
    # the row that can be alone in its group has tokens
    mask[-1] = True
    return mask.long()


def _shuffled(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(ROWS, generator=generator)


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise BrokenPromise(promise)


def _call_unchanged(function: Callable[..., T], columns: Mapping[str, object]) -> T:
    """Calls the function, and checks that it does not change a tensor."""
    tensors = {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    result = function(**columns)
    for name, tensor in tensors.items():
        is_same = torch.equal(tensor, copies[name])
        _require(is_same, f"the function does not modify its arguments: {name}; replace clamp_ by clamp")
    return result


def _require_own_device(call: Callable[[], Sequence[torch.Tensor]], expected: Sequence[torch.Tensor]) -> None:
    """Checks that new tensors are created on the device of the arguments, with a default device without data."""
    promise = "new tensors are created on the arguments' device: torch.zeros(..., device=x.device), torch.zeros_like"
    try:
        # a tensor that the function creates without `device=` lands there, and no GPU is needed to notice it
        with torch.device("meta"):
            results = call()
    except (RuntimeError, NotImplementedError) as error:
        raise BrokenPromise(f"{promise} ({error})") from error
    for result, tensor in zip(results, expected, strict=True):
        _require(result.device == tensor.device, promise)


def _finite(values: torch.Tensor) -> bool:
    return bool(values.isfinite().all())


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=1e-9, atol=1e-9)
