"""Time and error of the mathematics: every estimator, every policy loss, the value loss.

`python -m tests.bench algos [--rows 8192] [--width 1024] [--repeat 3] [--only NAME ...]`, one thread, CPU time, best of
`--repeat`; the contestants of a line take turns, so that noise on the machine hits all.

  ours       the whole batch in fp32; losses with their gradient
  loop       plain Python loops (those of the tests) over `--naive-rows` of the rows, extrapolated; a loss's value only
  x          loop / ours
  fp64 fp32  largest difference between the loops (in double precision) and ours on those rows, in that precision
  verl       verl's own function on the same batch, if verl is importable: time, verl / ours, largest difference in fp64
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.bench.frame import best_ms, options
from tests.verl_lite.naive_estimators import NAIVE_ESTIMATORS, naive_estimate
from tests.verl_lite.naive_losses import (
    NAIVE_ROW_LOSSES,
    NAIVE_TOKEN_LOSSES,
    naive_policy_loss,
    naive_value_loss,
)
from verl_lite import core_algos
from verl_lite.algos.covariance_losses import TOKEN_SELECTIONS
from verl_lite.config import ActorConfig, AlgorithmConfig, PolicyLossConfig

Columns = dict[str, Any]
Numbers = list[Any]

ROWS_PER_GROUP = 8
CONFIG = ActorConfig(clip_ratio_high=0.28, policy_loss=PolicyLossConfig(dro_beta=0.5))
MODE = "seq-mean-token-mean"
CLIPRANGE_VALUE = 0.5
REWARD_KEYS = ("correct", "short")


@dataclass(frozen=True)
class Case:
    """One line of the table. run: with a module of algorithms, ours or verl's, and the config of losses. Both give the
    numbers to compare: tensors or scalars, lists or floats."""

    kind: str
    name: str
    run: Callable[[Any, Any, Columns], Numbers]
    naive: Callable[[Columns], Numbers]


def batch(rows: int, width: int, seed: int = 0) -> Columns:
    """Every column that an estimator or a loss asks for, fp32: ragged answers, one score at the end of each."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return torch.randn(rows, width, generator=generator)

    lengths = torch.randint(width // 8, width + 1, (rows,), generator=generator)
    mask = (torch.arange(width) < lengths[:, None]).long()
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), lengths - 1] = torch.randn(rows, generator=generator)
    old = -draw().abs() - 0.05
    numbers, prompts = np.arange(rows), torch.ones(rows, 1, dtype=torch.long)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": draw(),
        "old_log_probs": old,
        "sum_pi_squared": old.exp() ** 2 + draw().sigmoid() * (1 - old.exp()) ** 2,
        "index": np.array([f"task-{row // ROWS_PER_GROUP}" for row in range(rows)], dtype=object),
        "reward_baselines": torch.randn(rows, generator=generator),
        "traj_id": numbers // 4,
        "step": numbers % 4,
        "state_hash": numbers % 3,
        "non_tensor_batch": {key: torch.randn(rows, generator=generator).double().numpy() for key in REWARD_KEYS},
        "batch": {"prompts": prompts, "attention_mask": torch.cat([prompts, mask], dim=1)},  # verl's gdpo reads these
        "gamma": 0.99,
        "lam": 0.95,
        "config": AlgorithmConfig(gamma=0.99, gdpo_reward_keys=list(REWARD_KEYS), gdpo_reward_weights=[1.0, 0.5]),
        "log_prob": (old + 0.2 * draw()).clamp(max=-0.01),
        "advantages": draw(),
        "selected": torch.rand(rows, width, generator=generator) < 0.01,
    }


# ---------------------------------------------------------------------------------------------------- the cases


def chosen(columns: Columns, names: dict[str, str], learnt: str = "") -> Columns:
    """Arguments by the columns that they come from; a gradient is asked of `learnt`."""
    given = {name: columns[source] for name, source in names.items()}
    return given | ({learnt: given[learnt].detach().requires_grad_()} if learnt else {})


def estimator(name: str) -> Case:
    def run(algos: Any, config: Any, columns: Columns) -> Numbers:
        function = algos.ADV_ESTIMATOR_REGISTRY[name]
        named = inspect.signature(function).parameters
        return list(function(**{key: value for key, value in columns.items() if key in named}))

    return Case("estimator", name, run, lambda c: list(naive_estimate(name, c)))


def policy_loss(name: str) -> Case:
    names = {"old_log_prob": "old_log_probs", **{key: key for key in ("log_prob", "advantages", "response_mask")}}
    names |= {"selected": "selected"} if name in TOKEN_SELECTIONS else {}

    def run(algos: Any, config: Any, columns: Columns) -> Numbers:
        given = chosen(columns, names, "log_prob")
        loss, _ = algos.get_policy_loss_fn(name)(**given, loss_agg_mode=MODE, config=config)
        loss.backward()
        return [loss]

    return Case("loss", name, run, lambda c: [naive_policy_loss(name, chosen(c, names), MODE, CONFIG)])


def value_loss() -> Case:
    names = {"vpreds": "log_prob", "returns": "advantages", "values": "values", "response_mask": "response_mask"}

    def run(algos: Any, config: Any, columns: Columns) -> Numbers:
        given = chosen(columns, names, "vpreds")
        loss, _ = algos.compute_value_loss(**given, cliprange_value=CLIPRANGE_VALUE, loss_agg_mode=MODE)
        loss.backward()
        return [loss]

    return Case(
        "value loss", "compute_value_loss", run, lambda c: [naive_value_loss(chosen(c, names), CLIPRANGE_VALUE, MODE)]
    )


CASES: list[Case] = [
    *(estimator(name) for name in core_algos.ADV_ESTIMATOR_REGISTRY if name in NAIVE_ESTIMATORS),
    *(policy_loss(n) for n in core_algos.POLICY_LOSS_REGISTRY if n in NAIVE_TOKEN_LOSSES or n in NAIVE_ROW_LOSSES),
    value_loss(),
]


# ---------------------------------------------------------------------------------------------------- measuring


class VerlConfig(SimpleNamespace):
    """Options with verl's way of asking for them."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def find_verl() -> tuple[Any, Any] | None:
    """verl's module of algorithms and a config for its losses, if verl is importable."""
    try:
        algos = importlib.import_module("verl.trainer.ppo.core_algos")
        config = object.__new__(importlib.import_module("verl.workers.config").ActorConfig)  # it wants a whole actor
    except ImportError:
        return None
    bounds = {"clip_ratio_low": CONFIG.clip_ratio, "clip_ratio_high": CONFIG.clip_ratio_high}
    more = {"policy_loss": VerlConfig(**vars(CONFIG.policy_loss)), "global_batch_info": {"dp_size": 1}}
    vars(config).update(vars(CONFIG) | bounds | more)
    return algos, config


def largest_difference(found: Numbers, expected: Numbers, mask: torch.Tensor) -> float:
    """Over all numbers, in double precision; of (B, T) ones over valid tokens."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        difference = (torch.as_tensor(a).detach().double() - torch.as_tensor(b, dtype=torch.float64).detach()).abs()
        worst = max(worst, float((difference[mask != 0] if difference.dim() else difference).max()))
    return worst


def one_line(case: Case, columns: Columns, small: Columns, verl: tuple[Any, Any] | None, repeat: int) -> str:
    """Measures one case and formats it. verl's call is tried on the small batch first, since its functions change."""
    mask = small["response_mask"]
    scale = len(columns["response_mask"]) / len(mask)
    double = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in small.items()}
    contestants = [lambda: case.run(core_algos, CONFIG, columns), lambda: case.naive(small)]
    loops, found = case.naive(small), case.run(core_algos, CONFIG, double)
    compared = ""
    if verl is not None:
        try:
            difference = largest_difference(found, case.run(*verl, double), mask)
            contestants.append(lambda: case.run(*verl, columns))
        except (AttributeError, TypeError, KeyError, ValueError, AssertionError, NotImplementedError) as error:
            compared = f"   {type(error).__name__}: {error}"[:60]
    ours, naive, *theirs = best_ms(repeat, *contestants)
    if theirs:
        compared = f"{theirs[0]:>8.1f} {theirs[0] / ours:>6.2f} {difference:>8.0e}"
    differences = [largest_difference(x, loops, mask) for x in (found, case.run(core_algos, CONFIG, small))]
    return (
        f"{case.kind:<10} {case.name:<28} {ours:>8.1f} {naive * scale / 1e3:>8.1f} "
        f"{naive * scale / ours:>7.0f} {differences[0]:>8.0e} {differences[1]:>8.0e} {compared}".rstrip()
    )


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    names = [case.name for case in CASES]
    args = options("algos", __doc__, argv, rows=8192, width=1024, naive_rows=32, repeat=3, only=names)
    torch.set_num_threads(1)
    verl, columns, small = find_verl(), batch(args.rows, args.width), batch(args.naive_rows, args.width)
    print(
        f"{args.rows} rows x {args.width} tokens, {columns['response_mask'].float().mean():.0%} of them valid, groups "
        f"of {ROWS_PER_GROUP}; one thread; loops over {args.naive_rows} rows, extrapolated; verl is "
        f"{'there' if verl else 'not importable'}"
    )
    head = f"{'kind':<10} {'name':<28} {'ours ms':>8} {'loop s':>8} {'x':>7} {'fp64':>8} {'fp32':>8}"
    print(head + (f" {'verl ms':>8} {'x':>6} {'fp64':>8}" if verl else ""))
    for case in CASES:
        if case.name in args.only:
            print(one_line(case, columns, small, verl, args.repeat), flush=True)
