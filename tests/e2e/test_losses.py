"""Losses that read more than ratios and advantages, through the whole trainer: two steps in one process each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_main_job import trained
from tests.workers.test_losses import SEED_METRICS

pytestmark = pytest.mark.slow

INLINE = ["rollout.name=hf", "trainer.backend=inline"]
OFF_POLICY = ["actor.ppo_mini_batch_size=8"]
COV = "actor.policy_loss.clip_cov_"


def steps(tmp_path: Path, loss_mode: str, *options: str) -> list[dict[str, float]]:
    """Metrics of both training steps."""
    rows = trained(tmp_path, "run", *INLINE, f"actor.policy_loss.loss_mode={loss_mode}", *options)
    found = [row for row in rows if "actor/grad_norm" in row]
    assert len(found) == 2 and all(row["actor/grad_norm"] > 0 for row in found)
    return found


def test_clip_cov_drops_the_share_of_tokens_that_it_is_told_to(tmp_path: Path) -> None:
    """Strictly on-policy, and still with log-probs of before the update."""
    for row in steps(tmp_path, "clip_cov", f"{COV}ratio=0.05", f"{COV}lb=-100", f"{COV}ub=100"):
        assert row["actor/pg_clipfrac"] == pytest.approx(0.05, abs=0.01)
        assert row["timing_s/old_log_prob"] > 0
        assert row["actor/ratio_min"] == row["actor/ratio_max"] == 1.0


def test_kl_cov(tmp_path: Path) -> None:
    for row in steps(tmp_path, "kl_cov", *OFF_POLICY, "actor.policy_loss.kl_cov_ratio=0.1"):
        assert row["actor/ppo_kl"] > 0 and row["actor/ratio_max"] > 1.0 > row["actor/ratio_min"]


@pytest.mark.parametrize(("loss_mode", "option"), [("topr", "ratio_type=segment"), ("cispo", "ratio_type=token")])
def test_scores_and_the_unified_mask(tmp_path: Path, loss_mode: str, option: str) -> None:
    unified = ["actor.policy_loss.cispo_unified_mask=true"] if loss_mode == "cispo" else []
    rows = steps(tmp_path, loss_mode, *OFF_POLICY, *unified, f"actor.{option}", "actor.use_kl_loss=true")
    assert {f"actor/{name}" for name in SEED_METRICS} <= rows[0].keys()


def test_a_loss_of_verl_by_its_path(tmp_path: Path) -> None:
    rows = steps(tmp_path, "tests.workers.test_losses:verl_style", *OFF_POLICY)
    assert all(0 <= row["actor/pg_clipfrac"] <= 1 for row in rows)
