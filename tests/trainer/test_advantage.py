"""Every estimator that a configuration may name works on the columns that the trainer has."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainer.advantage import compute_advantage
from verl_lite.algorithm_checks import NOT_PROVIDED
from verl_lite.config import AlgorithmConfig
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY
from verl_lite.protocol import DataProto


def batch() -> DataProto:
    return DataProto.from_dict(
        tensors={
            "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0], [0.0, 0.0]]),
            "response_mask": torch.tensor([[1, 1], [1, 1], [1, 0], [0, 0]]),
        },
        non_tensors={
            "uid": np.array(["a", "a", "b", "b"], dtype=object),
            "reward/correct": np.array([1.0, 0.0, 2.0, None], dtype=object),
        },
    )


@pytest.mark.parametrize("name", sorted(set(ADV_ESTIMATOR_REGISTRY) - set(NOT_PROVIDED)))
def test_estimators_that_pass_the_checks_work_on_the_trainers_columns(name: str) -> None:
    config = AlgorithmConfig(adv_estimator=name)
    if name == "gdpo":
        config.gdpo_reward_keys = ["correct"]
    advantages = compute_advantage(batch(), config).batch["advantages"]
    assert bool(torch.isfinite(advantages).all()) and bool((advantages[3] == 0).all()) and advantages[2, 1] == 0
    assert advantages[0, 1] > advantages[1, 1]


@pytest.mark.parametrize("name", sorted(NOT_PROVIDED))
def test_estimators_that_are_refused_do_need_more(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: .* is missing"):
        compute_advantage(batch(), AlgorithmConfig(adv_estimator=name))


def test_gdpo_reads_the_values_of_the_reward_function() -> None:
    config = AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=["correct"])
    advantages = compute_advantage(batch(), config).batch["advantages"]
    # group a: +-1/sqrt(2); group b has one row that counts: 2 (mean 0, std 1); whitened over five tokens
    raw = np.array([math.sqrt(0.5)] * 2 + [-math.sqrt(0.5)] * 2 + [2.0])
    expected = (raw - raw.mean()) / raw.std(ddof=1)
    assert advantages.flatten()[:5].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
