"""Whole runs in this process with a rollout engine that says log-probs other than the trainer's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.trainer import tiny_run
from workers.rollout.base import Completion
from workers.rollout.hf_engine import HFEngine

SHIFT = -0.3
CORRECTION = "algorithm.rollout_correction"


class ShiftedEngine(HFEngine):
    """Says of each sampled token that it was less likely than it was."""

    def step(self) -> list[Completion]:
        finished = super().step()
        for completion in finished:
            completion.log_probs[:] = [log_prob + SHIFT for log_prob in completion.log_probs]
        return finished


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    questions = [f"{i}+{i}=" for i in range(4)]
    return tiny_run.write_files(tmp_path_factory.mktemp("run"), questions, hidden=32, layers=1)


def step_of(folder: Path, name: str, *options: str) -> dict[str, float]:
    """The metrics of one training step."""
    engine = "rollout.name=tests.trainer.test_rollout_correction_run:ShiftedEngine"
    [row] = tiny_run.run(folder, name, engine, "rollout.n=3", "trainer.total_training_steps=1", *options)
    return row


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, float]:
    """Without correction: strictly on-policy, and the workers see the distance in the update."""
    return step_of(folder, "plain")


def test_the_distance_is_logged_without_any_option(plain: dict[str, float]) -> None:
    assert "timing_s/old_log_prob" not in plain
    assert plain["rollout_corr/kl"] == pytest.approx(SHIFT, abs=1e-4)
    assert plain["rollout_corr/ppl_ratio"] == pytest.approx(math.exp(SHIFT), rel=1e-3)


def test_weights_reach_the_loss(folder: Path, plain: dict[str, float]) -> None:
    row = step_of(folder, "weights", f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=5")
    assert "timing_s/old_log_prob" in row
    weight = math.exp(-SHIFT)
    assert row["rollout_corr/rollout_is_mean"] == pytest.approx(weight, rel=1e-3)
    assert row["actor/grad_norm"] == pytest.approx(weight * plain["actor/grad_norm"], rel=1e-3)
    truncated = step_of(folder, "cut", f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=1.1")
    assert truncated["actor/grad_norm"] == pytest.approx(1.1 * plain["actor/grad_norm"], rel=1e-3)
    assert truncated["rollout_corr/rollout_is_ratio_fraction_high"] == 1


def test_bypass_takes_effect(folder: Path, plain: dict[str, float]) -> None:
    """The ratio is exp(0.3): plain PPO keeps the gradient of tokens it does not clip, REINFORCE weighs all of them."""
    weight = math.exp(-SHIFT)
    wide = step_of(folder, "wide", f"{CORRECTION}.bypass_mode=true", "actor.clip_ratio=0.5")
    assert "timing_s/old_log_prob" not in wide
    assert wide["actor/grad_norm"] == pytest.approx(weight * plain["actor/grad_norm"], rel=1e-3)
    assert wide["actor/ppo_kl"] == pytest.approx(SHIFT, abs=1e-4)
    narrow = step_of(folder, "narrow", f"{CORRECTION}.bypass_mode=true", "actor.clip_ratio=0.1")
    assert 0 < narrow["actor/pg_clipfrac"] < 1
    assert narrow["actor/grad_norm"] < wide["actor/grad_norm"]
    reinforce = step_of(
        folder, "reinforce", f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce",
        f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_threshold=1.2", "actor.clip_ratio=0.1",
    )  # fmt: skip
    assert reinforce["actor/grad_norm"] == pytest.approx(1.2 * plain["actor/grad_norm"], rel=1e-3)
    assert reinforce["rollout_corr/rollout_is_mean"] == pytest.approx(1.2, rel=1e-3)
    rejected = step_of(
        folder, "bypassed-out", f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_rs=token_ratio",
        f"{CORRECTION}.rollout_rs_threshold=1.2",
    )  # fmt: skip
    assert rejected["actor/grad_norm"] == 0 and rejected["rollout_corr/rollout_rs_masked_fraction"] == 1
