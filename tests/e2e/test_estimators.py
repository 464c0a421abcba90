"""Estimators that need more than scores, through the whole trainer: two steps in this machine's one process each."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from tests.e2e.test_main_job import trained

pytestmark = pytest.mark.slow

INLINE = ["rollout.name=hf", "trainer.backend=inline"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["algorithm.adv_estimator=remax"], ["critic/reward_baselines/mean", "reward/baseline_error_rate"]),
        (["algorithm.adv_estimator=optimal_token_baseline"], ["timing_s/old_log_prob"]),
        (["algorithm.adv_estimator=tir_optimal_token_baseline"], ["timing_s/old_log_prob"]),
        (
            ["algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true", "actor.ppo_epochs=2"],
            ["pf_ppo/distinct_rows_frac", "critic/vf_loss"],
        ),
        (
            [
                "algorithm.adv_estimator=reinforce", "algorithm.norm_mean_type=running",
                "algorithm.norm_std_type=group", "algorithm.reward_clip=1.0",
                "algorithm.advantage_clip=2.0", "algorithm.whiten_advantages=true",
                "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive",
            ],
            ["critic/advantage_clip_frac", "critic/token_reward_clip_frac", "critic/kl", "critic/kl_coef"],
        ),
    ],
    ids=["remax", "otb", "tir_otb", "pf_ppo", "shaped"],
)  # fmt: skip
def test_two_steps(tmp_path: Path, options: list[str], expected: list[str]) -> None:
    rows = [row for row in trained(tmp_path, "run", *INLINE, *options) if "actor/grad_norm" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["actor/grad_norm"] > 0
        for name in expected:
            assert name in row, name


def test_remax_samples_what_grpo_samples_beside_what_greedy_validation_answers(tmp_path: Path) -> None:
    """The first step over 16 prompts, which are the validation set too: the same prompts, seeds and weights."""
    same = [*INLINE, "trainer.total_training_steps=1", "data.train_max_samples=16"]
    grpo = trained(tmp_path, "grpo", *same)
    files = OmegaConf.load(tmp_path / "grpo" / "config.yaml").data.train_files
    pq.write_table(pq.read_table(files[0]).slice(0, 16), tmp_path / "sixteen.parquet")
    remax = trained(
        tmp_path, "remax", *same, "algorithm.adv_estimator=remax", f"data.val_files={tmp_path}/sixteen.parquet",
        "data.val_max_samples=-1", "rollout.val_kwargs.do_sample=false", "rollout.val_kwargs.temperature=0.0",
        "rollout.val_kwargs.n=1", "rollout.val_kwargs.greedy_too=false", f"trainer.validation_data_dir={tmp_path}/val",
    )  # fmt: skip
    first, second = (next(row for row in rows if "actor/grad_norm" in row) for rows in (remax, grpo))
    for name in ("critic/score/mean", "response_length/mean", "prompt_length/mean"):
        assert first[name] == second[name], name
    greedy = [json.loads(line)["score"] for line in (tmp_path / "val" / "0.jsonl").read_text().splitlines()]
    assert len(greedy) == 16
    assert first["critic/reward_baselines/mean"] == pytest.approx(sum(greedy) / 16) != first["critic/score/mean"]
