"""What `python -m tests.bench algos` measures: batches, and for every registered entry our call and the plain loops.

The loops are those of the tests, `tests/verl_lite/naive_estimators.py` and `naive_losses.py`. An entry that is
registered is measured if it has a plain loop there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.verl_lite.naive_estimators import NAIVE_ESTIMATORS, naive_estimate
from tests.verl_lite.naive_losses import (
    NAIVE_ROW_LOSSES,
    NAIVE_TOKEN_LOSSES,
    naive_aggregate,
    naive_policy_loss,
    naive_value_loss,
)
from verl_lite.algos.covariance_losses import TOKEN_SELECTIONS
from verl_lite.config import ActorConfig, AlgorithmConfig, PolicyLossConfig
from verl_lite.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    LOSS_AGG_MODES,
    POLICY_LOSS_REGISTRY,
    agg_loss,
    compute_value_loss,
    kl_penalty,
)

Columns = dict[str, Any]
Numbers = list[Any]

LOSS_CONFIG = ActorConfig(clip_ratio_high=0.28, policy_loss=PolicyLossConfig(dro_beta=0.5))
MODE = "seq-mean-token-mean"
CLIPRANGE_VALUE = 0.5
REWARD_KEYS = ("correct", "short")
KL_NAMES = ("k1", "abs", "k2", "k3", "k3+")


@dataclass(frozen=True)
class Case:
    """One line of the table. Both give the numbers to compare: tensors or scalars, lists or floats."""

    kind: str
    name: str
    ours: Callable[[Columns], Numbers]
    naive: Callable[[Columns], Numbers]


def batch(rows: int, width: int, rows_per_group: int, seed: int = 0) -> Columns:
    """Every column that an estimator or a loss asks for, fp32: ragged answers, one score at the end of each."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return torch.randn(rows, width, generator=generator)

    lengths = torch.randint(width // 8, width + 1, (rows,), generator=generator)
    mask = torch.arange(width) < lengths[:, None]
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), lengths - 1] = torch.randn(rows, generator=generator)
    old = -draw().abs() - 0.05
    numbers = torch.arange(rows)
    index = np.array([f"task-{row // rows_per_group}" for row in range(rows)], dtype=object)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask.long(),
        "values": draw(),
        "old_log_probs": old,
        "sum_pi_squared": old.exp() ** 2 + draw().sigmoid() * (1 - old.exp()) ** 2,
        "index": index,
        "reward_baselines": torch.randn(rows, generator=generator),
        "traj_id": (numbers // 4).numpy(),
        "step": (numbers % 4).numpy(),
        "state_hash": (numbers % 3).numpy(),
        "non_tensor_batch": {key: torch.randn(rows, generator=generator).double().numpy() for key in REWARD_KEYS},
        "gamma": 0.99,
        "lam": 0.95,
        "config": AlgorithmConfig(gamma=0.99, gdpo_reward_keys=list(REWARD_KEYS), gdpo_reward_weights=[1.0, 0.5]),
        "log_prob": (old + 0.2 * draw()).clamp(max=-0.01),
        "advantages": draw(),
        "selected": torch.rand(rows, width, generator=generator) < 0.01,
    }


def in_precision(columns: Columns, dtype: torch.dtype) -> Columns:
    """The floating-point columns in another precision."""
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in columns.items()
    }


def largest_difference(found: Numbers, expected: Numbers, mask: torch.Tensor) -> float:
    """Over all numbers, in double precision; of (B, T) ones over valid tokens."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        difference = (torch.as_tensor(a).detach().double() - torch.as_tensor(b, dtype=torch.float64).detach()).abs()
        worst = max(worst, float((difference[mask != 0] if difference.dim() else difference).max()))
    return worst


# ---------------------------------------------------------------------------------------------------- the cases


def estimator_case(name: str) -> Case:
    function = ADV_ESTIMATOR_REGISTRY[name]
    return Case("estimator", name, lambda c: list(function(**c)), lambda c: list(naive_estimate(name, c)))


def loss_columns(columns: Columns, name: str) -> Columns:
    """The columns of the plain loops of a policy loss."""
    chosen = {"selected": columns["selected"]} if name in TOKEN_SELECTIONS else {}
    names = ("log_prob", "advantages", "response_mask")
    return {"old_log_prob": columns["old_log_probs"], **{key: columns[key] for key in names}, **chosen}


def loss_case(name: str) -> Case:
    function = POLICY_LOSS_REGISTRY[name]

    def ours(columns: Columns) -> Numbers:
        given = loss_columns(columns, name)
        old, new, *rest = (given.pop(key) for key in ("old_log_prob", "log_prob", "advantages", "response_mask"))
        leaf = new.detach().requires_grad_()
        loss, _metrics = function(old, leaf, *rest, MODE, LOSS_CONFIG, None, **given)
        loss.backward()
        return [loss]

    return Case("loss", name, ours, lambda c: [naive_policy_loss(name, loss_columns(c, name), MODE, LOSS_CONFIG)])


def value_case() -> Case:
    def ours(columns: Columns) -> Numbers:
        leaf = columns["log_prob"].detach().requires_grad_()
        given = (columns["advantages"], columns["values"], columns["response_mask"], CLIPRANGE_VALUE)
        loss, _clipfrac = compute_value_loss(leaf, *given, MODE)
        loss.backward()
        return [loss]

    def naive(columns: Columns) -> Numbers:
        names = {"vpreds": "log_prob", "returns": "advantages", "values": "values", "response_mask": "response_mask"}
        given = {name: columns[source] for name, source in names.items()}
        return [naive_value_loss(given, CLIPRANGE_VALUE, MODE)]

    return Case("value loss", "compute_value_loss", ours, naive)


def aggregation_case(mode: str) -> Case:
    def naive(columns: Columns) -> Numbers:
        rows = zip(columns["advantages"].tolist(), columns["response_mask"].tolist(), strict=True)
        losses = [[x for x, m in zip(values, mask, strict=True) if m] for values, mask in rows]
        return [naive_aggregate(losses, mode, columns["advantages"].shape[1])]

    return Case("agg_loss", mode, lambda c: [agg_loss(c["advantages"], c["response_mask"], mode)], naive)


def kl_case(name: str) -> Case:
    """With the mask, and its gradient."""

    def ours(columns: Columns) -> Numbers:
        leaf = columns["log_prob"].detach().requires_grad_()
        values = kl_penalty(leaf, columns["old_log_probs"], name, columns["response_mask"])
        agg_loss(values, columns["response_mask"], MODE).backward()
        return [values]

    def naive(columns: Columns) -> Numbers:
        names = ("log_prob", "old_log_probs", "response_mask")
        formula = NAIVE_KL[name.removesuffix("+")]
        rows = zip(*(columns[key].tolist() for key in names), strict=True)
        return [[[formula(a - b) if m else 0.0 for a, b, m in zip(*row, strict=True)] for row in rows]]

    return Case("kl_penalty", name, ours, naive)


NAIVE_KL: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: float(np.exp(-d)) + d - 1,
}

CASES: list[Case] = [
    *(estimator_case(name) for name in ADV_ESTIMATOR_REGISTRY if name in NAIVE_ESTIMATORS),
    *(loss_case(name) for name in POLICY_LOSS_REGISTRY if name in NAIVE_TOKEN_LOSSES or name in NAIVE_ROW_LOSSES),
    value_case(),
    *(aggregation_case(mode) for mode in LOSS_AGG_MODES),
    *(kl_case(name) for name in KL_NAMES),
]
