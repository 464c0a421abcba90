"""Every advantage estimator against plain loops, wrong arguments, and the parts that estimators are made of.

What every estimator promises is in test_contracts.py.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.verl_lite.naive_estimators import naive_estimate
from verl_lite.algos.masked import group_ids
from verl_lite.contracts import ROWS, WIDTH, estimator_batch
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, compute_segment_masked_mean

NAMES = sorted(ADV_ESTIMATOR_REGISTRY)
GROUPED = sorted(
    {"grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized", "opo", "gpg", "gigpo"}
    | {"reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline", "step_reinforce"}
)


def batch(name: str, seed: int = 0) -> dict[str, Any]:
    return estimator_batch(seed, groups_of_one=name != "grpo_passk")


def said(name: str) -> str:
    """The name in its errors: that of the kin that does the work."""
    return "grpo" if name == "grpo_vectorized" else name.removeprefix("tir_")


def estimate(name: str, columns: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return ADV_ESTIMATOR_REGISTRY[name](**columns)


def assert_equals_loops(name: str, columns: dict[str, Any]) -> None:
    for found, expected in zip(estimate(name, columns), naive_estimate(name, columns), strict=True):
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_estimators_equal_plain_loops(name: str, seed: int) -> None:
    """Also where two of three rows have score 0, so that counts of rows are divided."""
    columns = batch(name, seed)
    assert_equals_loops(name, columns)
    columns["token_level_rewards"] = columns["token_level_rewards"] * (torch.arange(ROWS)[:, None] % 3 == 0)
    assert_equals_loops(name, columns)


IS_WEIGHTS = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gae", {"gamma": 1.0, "lam": 1.0}),
        ("gae", {"gamma": 0.5, "lam": 0.0}),
        ("grpo", {"norm_adv_by_std_in_grpo": False}),
        *((name, {"gamma": 1.0}) for name in ("reinforce_plus_plus", "reinforce", "agentic_reinforce")),
        *((name, {"handle_zero_tail": False}) for name in ("optimal_token_baseline", "tir_optimal_token_baseline")),
        *((name, {"rollout_is_weights": IS_WEIGHTS}) for name in NAMES if name.endswith("optimal_token_baseline")),
        ("step_reinforce", {"norm_mean_type": "batch", "norm_std_type": "group", "step_reward_gamma": 0.5}),
        ("step_reinforce", {"norm_mean_type": "group", "norm_std_type": "batch", "gamma": 1.0}),
        ("gigpo", {"step_reward_weight": 0.5, "episode_reward_weight": 2.0}),
        ("gigpo", {"norm_mean_type": "group", "norm_std_type": None}),
    ],
)
def test_options_equal_plain_loops(name: str, options: dict[str, Any]) -> None:
    columns = batch(name, seed=5) | options
    assert_equals_loops(name, columns)
    changed = any(
        not torch.equal(a, b) for a, b in zip(estimate(name, columns), estimate(name, batch(name, seed=5)), strict=True)
    )
    assert changed, "the option has an effect on this batch"


@pytest.mark.parametrize("name", ["grpo", "rloo", "gigpo", "step_reinforce"])
def test_labels_may_come_as_arrays_lists_or_tensors(name: str) -> None:
    """A list of tensors too: two tensors of one number are one label, though Python tells them apart."""
    columns = batch(name)
    labels = ("index", "traj_id", "step", "state_hash")
    for label in labels:
        _, columns[label] = np.unique(np.asarray(columns[label]), return_inverse=True)
    expected = estimate(name, columns)[0]
    for make in (list, torch.as_tensor, lambda values: list(torch.as_tensor(values))):
        assert torch.equal(estimate(name, columns | {label: make(columns[label]) for label in labels})[0], expected)
    assert group_ids([torch.tensor(7), torch.tensor(7)], torch.device("cpu"))[1] == 1


LABELS = [
    *((name, "index") for name in GROUPED),
    *((name, column) for name in ("step_reinforce", "gigpo") for column in ("traj_id", "step")),
    ("gigpo", "state_hash"),
]
TOKENS = [("gae", "values")]
TOKENS += [(n, c) for n in NAMES if n.endswith("token_baseline") for c in ("old_log_probs", "sum_pi_squared")]


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_of_another_shape_is_named(name: str) -> None:
    columns = batch(name)
    columns["response_mask"] = columns["response_mask"][:, :-1]
    with pytest.raises(ValueError, match=rf"mask has shape \({ROWS}, {WIDTH - 1}\), expected .*\({ROWS}, {WIDTH}\)"):
        estimate(name, columns)


@pytest.mark.parametrize(("name", "column"), [*LABELS, *TOKENS, ("remax", "reward_baselines")])
def test_what_is_missing_or_of_another_size_is_named(name: str, column: str) -> None:
    columns = batch(name)
    columns[column] = torch.zeros(ROWS, 1) if (name, column) in TOKENS else columns[column][:-1]
    with pytest.raises(ValueError, match=rf"{column} (has|is of) shape"):
        estimate(name, columns)
    del columns[column]
    with pytest.raises(ValueError, match=rf"{said(name)}: {column} is missing.*expected"):
        estimate(name, columns)


def test_other_wrong_arguments_are_named() -> None:
    columns = batch("gdpo")
    with pytest.raises(ValueError, match=r"grpo: index has shape \[24, 2\], expected one label"):
        estimate("grpo", columns | {"index": np.zeros((ROWS, 2))})
    for name in ("step_reinforce", "gigpo"):
        with pytest.raises(ValueError, match="norm_std_type='running' needs running and domains"):
            estimate(name, columns | {"norm_std_type": "running"})


def test_gdpo_names_what_is_wrong_with_its_rewards() -> None:
    columns = batch("gdpo")

    def config(**options: Any) -> dict[str, Any]:
        return {"config": SimpleNamespace(**{"gdpo_reward_keys": ["correct"], "gdpo_reward_weights": None} | options)}

    for rewards in (np.array([None] * ROWS, dtype=object), np.full(ROWS, math.nan)):
        with pytest.raises(ValueError, match=f"gdpo: reward 'correct' is no finite number in {ROWS - 2} rows"):
            estimate("gdpo", columns | config() | {"non_tensor_batch": {"correct": rewards}})
    with pytest.raises(ValueError, match=r"gdpo: correct has shape \[3\], expected one label for each of 24 rows"):
        estimate("gdpo", columns | config() | {"non_tensor_batch": {"correct": np.zeros(3)}})
    with pytest.raises(ValueError, match=r"gdpo_reward_weights=\[1.0, 2.0\]: one for each of \['correct'\]"):
        estimate("gdpo", columns | config(gdpo_reward_weights=[1.0, 2.0]))
    with pytest.raises(ValueError, match=r"gdpo_reward_keys=\['c'\].*\['correct', 'short'\]"):
        estimate("gdpo", columns | config(gdpo_reward_keys=["c"]))


def test_a_failed_rewards_missing_value_does_not_matter_to_gdpo() -> None:
    columns = batch("gdpo")
    expected = estimate("gdpo", columns)[0]
    holes = {key: values.astype(object) for key, values in columns["non_tensor_batch"].items()}
    for values in holes.values():
        values[[3, 17]] = None  # rows without a token
    assert torch.equal(estimate("gdpo", columns | {"non_tensor_batch": holes})[0], expected)


def test_segment_means_by_hand_and_gradient() -> None:
    values = torch.tensor([[1.0, 3.0, math.nan, 5.0, math.nan], [math.nan] * 5], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0] * 5])
    assert compute_segment_masked_mean(values, mask).tolist() == [[2.0, 2.0, 0.0, 5.0, 0.0], [0.0] * 5]
    values.requires_grad_()
    (compute_segment_masked_mean(values, mask) * torch.tensor([2.0, 4.0, 8.0, 16.0, 32.0])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [[3.0, 3.0, 0.0, 16.0, 0.0], [0.0] * 5]


def test_a_reward_of_reinforce_plus_plus_reaches_the_turns_before_it() -> None:
    """The token under mask 0 belongs to an environment. verl 0.9.1 returns the same."""
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    mask = torch.tensor([[1, 1, 0, 1]])
    for gamma, expected in ((1.0, [1.0, 1.0, 0.0, 1.0]), (0.5, [0.25, 0.5, 0.0, 1.0])):
        _, returns = ADV_ESTIMATOR_REGISTRY["reinforce_plus_plus"](rewards, mask, gamma=gamma)
        assert returns.tolist() == [expected]
