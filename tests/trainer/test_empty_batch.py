"""A step in which no sample has weight, because every reward failed: it runs, is visible, and teaches nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.trainer.test_fit import Parts, make

QUIET = {"trainer__val_before_train": False, "trainer__test_freq": 0}


@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo", "reinforce_plus_plus"])
def test_a_step_whose_rewards_all_failed(tmp_path: Path, estimator: str) -> None:
    parts = Parts(on_policy=False, failing=("/0", "/1"))
    settings = {"reward__max_error_rate": 1.0, "algorithm__adv_estimator": estimator}
    kl = {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"}
    trainer = make(tmp_path, parts, ref=True, critic=estimator == "gae", **settings, **kl, **QUIET)
    before = trainer.kl_ctrl.value
    trainer.fit()
    batch = parts.batches["update"].batch
    assert not batch["response_mask"].any()
    assert not batch["advantages"].any() and not batch["returns"].any()
    assert trainer.kl_ctrl.value == before, "no sequence was measured, so the coefficient has nothing to react to"
    logged = dict(parts.logged)[1]
    assert logged["reward/error_rate"] == 1.0
    assert all(math.isfinite(value) for value in logged.values())
    assert "critic/score/mean" not in logged, "a mean over nothing is left out"


def test_such_a_step_is_an_error_unless_it_is_allowed(tmp_path: Path) -> None:
    parts = Parts(failing=("/0", "/1"))
    with pytest.raises(RuntimeError, match=r"reward\.max_error_rate=0\.1 allows 2"):
        make(tmp_path, parts, **QUIET).fit()
