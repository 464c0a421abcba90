"""Rollout correction on its way through a step: the stage on the driver, and what the workers are sent; whole runs with
an engine that says other log-probs than the trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.set_keys import set_keys
from tests.trainer import tiny_run
from tests.trainer.test_fit import PROMPTS, QUIET, Parts, make
from trainer.ppo.requirements import needs_old_log_prob
from trainer.ppo.roles import ActorRole
from verl_lite.config import PPOConfig, RolloutCorrectionConfig
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from workers.engines.base import Completion
from workers.engines.hf_engine import HFEngine

SHIFTS = torch.tensor([[0.5], [-0.1], [0.1]]).repeat(2, 1)  # of the rows of a step: trainer less rollout, per token


class Shifted(Parts):
    """A trainer that gives other log-probs than the rollout engine; says what the driver would send to its workers."""

    def __init__(self, correction: RolloutCorrectionConfig, **options: Any) -> None:
        self.config = PPOConfig()
        self.config.algorithm.rollout_correction = correction
        self.config.data.train_batch_size, self.config.rollout.n = PROMPTS, 2
        self.config.actor.ppo_mini_batch_size = PROMPTS
        set_keys(self.config.algorithm, **options)
        super().__init__(on_policy=not needs_old_log_prob(self.config))
        self.sent: list[Any] = []

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        columns = super().compute_log_prob(batch)
        columns.batch["old_log_probs"] += SHIFTS
        return columns

    def update_actor(self, data: DataProto) -> list[DataProto]:
        self.sent.append(data)
        return [DataProto(meta_info={"metrics": {}})]

    def update(self, batch: DataProto, step: int) -> dict[str, Metric]:
        group: Any = self
        return super().update(batch, step) | ActorRole(group, self.config).update(batch, step)

    def fit(self, tmp_path: Path) -> DataProto:
        """Trains; gives the batch of the last update."""
        config = self.config
        settings = {"algorithm": config.algorithm, "actor": config.actor, "data__train_batch_size": PROMPTS}
        make(tmp_path, self, **settings, **QUIET).fit()
        return self.batches["update"]


def test_a_rejected_answer_has_no_weight_anywhere(tmp_path: Path) -> None:
    parts = Shifted(RolloutCorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold="1.2"))
    batch = parts.fit(tmp_path)
    assert "old_log_prob" in parts.calls, "strictly on-policy, and yet the pass is needed"
    assert batch.batch["response_mask"].any(1).tolist() == [False, True, True, False, True, True]
    # scores 0, 1 of each prompt: the partners of the first prompt's and second prompt's rejected rows are alone, so
    # nothing remains that they could be compared with
    assert batch.batch["advantages"][:4].abs().sum() == 0
    # (1 - 0.5) / (standard deviation 0.70711 + 1e-6)
    assert batch.batch["advantages"][5, 0] == pytest.approx(0.70711, rel=1e-4)
    [*_, data] = parts.sent
    schedule = data.meta_info["schedule"][0]
    assert sum(step.num_sequences for step in schedule) == 4
    assert sum(step.num_tokens for step in schedule) == 2 * (2 + 3)
    assert "old_log_probs" not in data.batch.keys(), "one optimizer step: the ratio is 1 by construction"
    assert dict(parts.logged)[3]["critic/score/mean"] == 0.5, "the score is that of all answers"


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_the_reward_of_a_rejected_last_token_is_not_lost(tmp_path: Path, estimator: str) -> None:
    class LastTokenOff(Shifted):
        def compute_log_prob(self, batch: DataProto) -> DataProto:
            columns = Parts.compute_log_prob(self, batch)
            columns.batch["old_log_probs"][:, 2] += 1.0
            return columns

    correction = RolloutCorrectionConfig(rollout_rs="token_ratio", rollout_rs_threshold="2")
    batch = LastTokenOff(correction, adv_estimator=estimator).fit(tmp_path)
    assert batch.batch["response_mask"].sum(1).tolist() == [1, 2, 2] * 2
    scores = batch.batch["token_level_scores"].sum(1)
    assert batch.batch["token_level_rewards"].sum(1).tolist() == scores.tolist()
    rewards = torch.where(batch.batch["response_mask"] != 0, batch.batch["token_level_rewards"], 0)
    assert rewards.sum(1).tolist() == scores.tolist(), "it stands on a token that is left"
    assert batch.batch["returns"][5, 0] > batch.batch["returns"][2, 0], "the third prompt's second answer scored 1"


# ----------------------------------------------------------------------------------------------------------- whole runs

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
    engine = f"rollout.name={__name__}:ShiftedEngine"
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


@pytest.mark.slow
def test_bypass_takes_effect(folder: Path, plain: dict[str, float]) -> None:
    """The ratio is exp(0.3): plain PPO keeps the gradient of tokens it does not clip, REINFORCE weighs all of them."""
    weight = math.exp(-SHIFT)
    wide = step_of(folder, "wide", f"{CORRECTION}.bypass_mode=true", "actor.clip_ratio=0.5")
    assert "timing_s/old_log_prob" not in wide
    assert wide["actor/grad_norm"] == pytest.approx(weight * plain["actor/grad_norm"], rel=1e-3)
    assert wide["actor/ppo_kl"] == pytest.approx(SHIFT, abs=1e-4)
    late = step_of(folder, "late", "async_training.max_off_policy_threshold=1", "actor.clip_ratio=0.5")
    assert late["actor/grad_norm"] == wide["actor/grad_norm"], "it is the default if samples may be stale"
    weights = ["async_training.max_off_policy_threshold=1", f"{CORRECTION}.rollout_is=token"]
    assert "timing_s/old_log_prob" in step_of(folder, "late-weights", *weights), (
        "weights and bypass would correct twice"
    )
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
