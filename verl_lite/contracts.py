"""What every advantage estimator and every policy loss promises, as checks for a function of your own.

    from verl_lite.contracts import check_adv_estimator, check_policy_loss
    check_adv_estimator(my_estimator)
    check_policy_loss(my_loss)

in a test of yours; the project's tests run them over every registered entry. Each calls the function on small random
batches with ragged rows, holes, rows without a valid token and a group of one, and raises `BrokenPromise` (an
AssertionError) that says which promise does not hold. The promises are the functions in `ESTIMATOR_PROMISES` and
`LOSS_PROMISES`; their first line states each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from verl_lite.algos.masked import LOSS_AGG_MODES
from verl_lite.algos.policy_losses import call_policy_loss
from verl_lite.config import ActorConfig, AlgorithmConfig, PolicyLossConfig
from verl_lite.metrics import Metric, reduce_metrics

ROWS, WIDTH = 24, 7
EMPTY_ROWS = (3, 17)
REWARD_KEYS = ("correct", "short")
Columns = dict[str, Any]
Estimator = Callable[[Columns], tuple[torch.Tensor, torch.Tensor]]
Loss = Callable[..., tuple[torch.Tensor, Mapping[str, Any]]]


class BrokenPromise(AssertionError):
    """An entry of a registry does not do what the rest of the code relies on."""


def check_adv_estimator(function: Callable[..., Any], *, groups_of_one: bool = True, **columns: Any) -> None:
    """Raises `BrokenPromise` unless the advantage estimator keeps every promise in `ESTIMATOR_PROMISES`.

    function: as for `register_adv_est`. columns: what it needs beyond `estimator_batch`, or in place of it; an array or
    tensor of ROWS entries moves with the rows. groups_of_one: whether it accepts a group of one row.
    """
    for promise in ESTIMATOR_PROMISES:
        promise(lambda given: function(**given), estimator_batch(groups_of_one=groups_of_one) | columns)


def check_policy_loss(function: Callable[..., Any], config: Any = None, **columns: torch.Tensor) -> None:
    """Raises `BrokenPromise` unless the policy loss keeps every promise in `LOSS_PROMISES`.

    function: as for `register_policy_loss`. config: the object with its options, null = an ActorConfig. columns:
    tensors (ROWS, ...) that it takes by keyword beyond the usual ones.
    """
    options = config or ActorConfig(policy_loss=PolicyLossConfig(dro_beta=0.5))

    def loss(given: Columns, mode: str = "token-mean", **counts: int) -> tuple[torch.Tensor, Mapping[str, Any]]:
        named = dict(given)
        usual = ("old_log_prob", "log_prob", "advantages", "response_mask", "rollout_is_weights")
        old, new, advantages, mask, weights = (named.pop(name) for name in usual)
        arguments = (old, new, advantages, mask, mode, options, weights)
        return call_policy_loss(function, *arguments, counts=counts, columns=named)

    for promise in LOSS_PROMISES:
        promise(loss, loss_batch() | columns)


# ---------------------------------------------------------------------------------------------------- batches


def _ragged_mask(generator: torch.Generator) -> torch.Tensor:
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    mask = (torch.arange(WIDTH) < lengths[:, None]) & (torch.rand(ROWS, WIDTH, generator=generator) > 0.25)
    mask[list(EMPTY_ROWS)] = False
    mask[-1] = True
    return mask.long()


def estimator_batch(seed: int = 0, groups_of_one: bool = True) -> Columns:
    """All columns that the registered estimators ask for, in fp64: ragged rows with holes, `EMPTY_ROWS` empty."""
    generator = torch.Generator().manual_seed(seed)
    mask = _ragged_mask(generator)
    names = ("token_level_rewards", "values", "old_log_probs", "sum_pi_squared")
    columns: Columns = {name: torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for name in names}
    columns["old_log_probs"] = -columns["old_log_probs"].abs()
    chosen = columns["old_log_probs"].exp()
    columns["sum_pi_squared"] = chosen**2 + columns["sum_pi_squared"].sigmoid() * (1 - chosen) ** 2
    columns["token_level_rewards"] *= mask
    alone = ROWS - 1 if groups_of_one else None
    index = np.array([f"task-{'alone' if row == alone else row % 5}" for row in range(ROWS)], dtype=object)
    return {
        **columns,
        "response_mask": mask,
        "index": index,
        "reward_baselines": torch.randn(ROWS, generator=generator, dtype=torch.float64),
        "traj_id": np.array([f"{index[row]}/{row % 2}" for row in range(ROWS)], dtype=object),
        "step": np.arange(ROWS)[::-1].copy(),
        "state_hash": np.array([f"state-{row % 3}" for row in range(ROWS)], dtype=object),
        "non_tensor_batch": {key: torch.randn(ROWS, generator=generator).numpy() for key in REWARD_KEYS},
        "gamma": 0.9,
        "lam": 0.8,
        "config": AlgorithmConfig(
            gamma=0.9, gdpo_reward_keys=list(REWARD_KEYS), gdpo_reward_weights=[1.0, 0.5], norm_adv_by_std_in_grpo=True
        ),
    }


def loss_batch(seed: int = 0, spread: float = 0.6) -> Columns:
    """The columns of a policy loss, fp64; the new policy is about `spread` nats per token away from the old one."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    old = -draw().abs() - 0.7
    return {
        "old_log_prob": old,
        "log_prob": (old + spread * draw()).clamp(max=-0.01),
        "advantages": draw(),
        "response_mask": _ragged_mask(generator),
        "rollout_is_weights": draw().exp(),
    }


def take_rows(columns: Columns, rows: torch.Tensor) -> Columns:
    """The batch with these rows (k,) of every column that has ROWS of them."""
    return {name: _take(value, rows) for name, value in columns.items()}


def _take(value: Any, rows: torch.Tensor) -> Any:
    if isinstance(value, dict):
        return take_rows(value, rows)
    if isinstance(value, torch.Tensor) and value.dim() and len(value) == ROWS:
        return value[rows]
    if isinstance(value, np.ndarray) and len(value) == ROWS:
        return value[rows.numpy()]
    return value


def hide(columns: Columns, value: float) -> Columns:
    """The batch with `value` at each place of a (B, T) column where the mask is 0."""
    hidden = columns["response_mask"] == 0
    return {
        name: torch.where(hidden, value, column) if _is_token_column(name, column) else column
        for name, column in columns.items()
    }


def _is_token_column(name: str, column: Any) -> bool:
    is_values = isinstance(column, torch.Tensor) and column.dtype.is_floating_point and column.dim() == 2
    return is_values and name != "response_mask"


def _require(holds: bool, promise: str, detail: str = "") -> None:
    if not holds:
        raise BrokenPromise(promise + (f" ({detail})" if detail else ""))


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


def _copied(columns: Columns) -> Columns:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in columns.items()}


def _unchanged(columns: Columns, before: Columns) -> Iterator[str]:
    for name, value in columns.items():
        if isinstance(value, torch.Tensor) and not torch.equal(value, before[name]):
            yield name


# ---------------------------------------------------------------------------------------------------- estimators


def gives_two_columns(estimator: Estimator, columns: Columns) -> None:
    """Gives (advantages, returns), floating-point (B, T), finite, not all zero; leaves its arguments as they were."""
    before = _copied(columns)
    result = estimator(columns)
    _require(isinstance(result, tuple) and len(result) == 2, "an estimator gives (advantages, returns)")
    for name, found in zip(("advantages", "returns"), result, strict=True):
        _require(tuple(found.shape) == (ROWS, WIDTH), f"{name} are (B, T)", f"found {tuple(found.shape)}")
        _require(found.dtype.is_floating_point, f"{name} are floating-point", str(found.dtype))
        _require(bool(torch.isfinite(found).all()), f"{name} are finite")
        _require(bool((found != 0).any()), f"{name} are not all zero")
    _require(not (changed := list(_unchanged(columns, before))), "arguments are not written to", ", ".join(changed))


def never_reads_under_mask_0(estimator: Estimator, columns: Columns) -> None:
    """Values under mask 0 never matter, not even NaN, and the result is 0 there."""
    for found, expected in zip(estimator(hide(columns, math.nan)), estimator(columns), strict=True):
        _require(torch.equal(found, expected), "values under mask 0 never matter")
        _require(bool((found[columns["response_mask"] == 0] == 0).all()), "the result is 0 under mask 0")


def gives_empty_rows_no_weight(estimator: Estimator, columns: Columns) -> None:
    """Rows without a valid token count in no statistic: the result is the same without them."""
    kept = columns["response_mask"].any(dim=1).nonzero().squeeze(1)
    for found, expected in zip(estimator(columns), estimator(take_rows(columns, kept)), strict=True):
        _require(_close(found[kept], expected), "rows without a valid token have no weight")


def ignores_row_order(estimator: Estimator, columns: Columns) -> None:
    """The order of the rows does not matter."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    for found, expected in zip(estimator(take_rows(columns, order)), estimator(columns), strict=True):
        _require(_close(found, expected[order]), "the order of the rows does not matter")


def survives_hardly_a_token(estimator: Estimator, columns: Columns) -> None:
    """A batch with one valid token, or with none, gives finite numbers."""
    for kept in (0, 1):
        mask = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
        mask[0, :kept] = 1
        for found in estimator(columns | {"response_mask": mask}):
            _require(bool(torch.isfinite(found).all()), "a batch with hardly a token is finite", f"{kept} tokens")


def stays_on_the_device(estimator: Estimator, columns: Columns) -> None:
    """New tensors are made where the arguments are: here the default device is one without data."""
    expected = estimator(columns)
    with torch.device("meta"):
        try:
            results = estimator(columns)
        except (RuntimeError, NotImplementedError) as error:
            raise BrokenPromise(f"new tensors are made on the device of the arguments ({error})") from error
    for found, wanted in zip(results, expected, strict=True):
        _require(
            found.device == wanted.device, "new tensors are made on the device of the arguments", str(found.device)
        )


ESTIMATOR_PROMISES: tuple[Callable[[Estimator, Columns], None], ...] = (
    gives_two_columns,
    never_reads_under_mask_0,
    gives_empty_rows_no_weight,
    ignores_row_order,
    survives_hardly_a_token,
    stays_on_the_device,
)

# ---------------------------------------------------------------------------------------------------- losses


def _with_gradient(
    loss: Loss, columns: Columns, mode: str = "token-mean", tokens: int | None = None, sequences: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, Any]]:
    """(loss, its gradient by log_prob, metrics); the counts are those of `columns` unless given."""
    mask, log_prob = columns["response_mask"], columns["log_prob"].clone().requires_grad_()
    value, metrics = loss(
        columns | {"log_prob": log_prob},
        mode,
        batch_num_tokens=int(mask.sum()) if tokens is None else tokens,
        global_batch_size=int(mask.any(dim=1).sum()) if sequences is None else sequences,
    )
    _require(value.dim() == 0 and value.requires_grad, "a loss is a scalar with a gradient by log_prob")
    value.backward()
    gradient = torch.zeros_like(log_prob) if log_prob.grad is None else log_prob.grad
    return value.detach(), gradient, metrics


def gives_a_scalar_and_metrics(loss: Loss, columns: Columns) -> None:
    """Gives (scalar, metrics by name); the gradient is not all zero; leaves its arguments as they were."""
    before = _copied(columns)
    value, gradient, metrics = _with_gradient(loss, columns)
    _require(bool(torch.isfinite(value)), "the loss is finite")
    _require(bool((gradient != 0).any()), "the gradient is not all zero")
    _require(all(isinstance(m, Metric | int | float) for m in metrics.values()), "metrics are Metric or numbers")
    _require(all(math.isfinite(x) for x in reduce_metrics(metrics).values()), "metrics are finite")
    _require(not (changed := list(_unchanged(columns, before))), "arguments are not written to", ", ".join(changed))


def never_trains_under_mask_0(loss: Loss, columns: Columns) -> None:
    """Values under mask 0, NaN included, reach neither loss nor gradient nor metrics."""
    for mode in LOSS_AGG_MODES:
        value, gradient, _ = _with_gradient(loss, columns, mode)
        found, found_gradient, metrics = _with_gradient(loss, hide(columns, math.nan), mode)
        _require(torch.equal(found, value), "values under mask 0 never reach the loss", mode)
        _require(torch.equal(found_gradient, gradient), "values under mask 0 never reach the gradient", mode)
        _require(bool((found_gradient[columns["response_mask"] == 0] == 0).all()), "no gradient under mask 0", mode)
        _require(all(math.isfinite(x) for x in reduce_metrics(metrics).values()), "metrics do not read under mask 0")


def does_not_depend_on_the_cut(loss: Loss, columns: Columns) -> None:
    """The sum over the parts of a mini-batch, rows in any order, is the loss of the whole; so is the gradient.

    Empty rows stand in some of the parts only; one part is nothing but an empty row.
    """
    mask = columns["response_mask"]
    counts = (int(mask.sum()), int(mask.any(dim=1).sum()))
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    order = torch.cat([torch.tensor(EMPTY_ROWS[:1]), order[order != EMPTY_ROWS[0]]])
    for mode in LOSS_AGG_MODES:
        whole, whole_gradient, _ = _with_gradient(loss, columns, mode, *counts)
        for cut in ([1] * ROWS, [1, 9, ROWS - 10], [1, ROWS - 1]):
            total, gradient = torch.zeros_like(whole), torch.zeros_like(whole_gradient)
            for rows in order.split(cut):
                value, part, _ = _with_gradient(loss, take_rows(columns, rows), mode, *counts)
                total += value
                gradient[rows] += part
            promise = "the parts of a mini-batch sum to the whole: divide by the counts that are given"
            _require(_close(total, whole) and _close(gradient, whole_gradient), promise, f"{mode}, {len(cut)} parts")


def survives_no_token(loss: Loss, columns: Columns) -> None:
    """A part without a valid token has loss 0 and gradient 0."""
    empty = columns | {"response_mask": torch.zeros(ROWS, WIDTH, dtype=torch.int64)}
    for mode in LOSS_AGG_MODES:
        for counts in ((0, 0), (9, 3)):
            value, gradient, metrics = _with_gradient(loss, empty, mode, *counts)
            _require(value.item() == 0 and not bool(gradient.any()), "a part without a token has loss 0", mode)
            _require(all(math.isfinite(x) for x in reduce_metrics(metrics).values()), "and finite metrics", mode)


def survives_far_policies(loss: Loss, columns: Columns) -> None:
    """Policies 700 nats apart, either way, give finite numbers."""
    for sign in (1, -1):
        moved = torch.where(columns["advantages"] * sign > 0, columns["log_prob"], -700.0)
        for pair in ({"log_prob": moved}, {"old_log_prob": moved}):
            value, gradient, _ = _with_gradient(loss, columns | pair)
            is_finite = bool(torch.isfinite(value)) and bool(torch.isfinite(gradient).all())
            _require(is_finite, "a log-ratio out of bounds stays finite", ", ".join(pair))


def trains_on_the_device(loss: Loss, columns: Columns) -> None:
    """New tensors are made where the arguments are: here the default device is one without data."""
    expected, *_ = _with_gradient(loss, columns)
    with torch.device("meta"):
        try:
            found, *_ = _with_gradient(loss, columns)
        except (RuntimeError, NotImplementedError) as error:
            raise BrokenPromise(f"new tensors are made on the device of the arguments ({error})") from error
    _require(found.device == expected.device, "new tensors are made on the device of the arguments", str(found.device))


LOSS_PROMISES: tuple[Callable[[Loss, Columns], None], ...] = (
    gives_a_scalar_and_metrics,
    never_trains_under_mask_0,
    does_not_depend_on_the_cut,
    survives_no_token,
    survives_far_policies,
    trains_on_the_device,
)
