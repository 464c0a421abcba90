"""Estimators, losses and rewards that need more than scores and ratios, through the whole trainer: two steps each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_exact_resume import GAE, KL
from tests.forked_runs import Runs
from tests.workers.test_losses import SEED_METRICS
from trainer.observe.tracking import read_metrics

pytestmark = pytest.mark.slow

ON_POLICY = ["actor.ppo_mini_batch_size=-1"]
LOSS = "actor.policy_loss.loss_mode="
COV = "actor.policy_loss.clip_cov_"
SHAPED = [
    "algorithm.adv_estimator=reinforce", "algorithm.norm_mean_type=running", "algorithm.norm_std_type=group",
    "algorithm.reward_clip=1.0", "algorithm.advantage_clip=2.0", "algorithm.whiten_advantages=true", *KL,
]  # fmt: skip
CASES: dict[str, tuple[list[str], list[str]]] = {
    "otb": (["algorithm.adv_estimator=optimal_token_baseline"], ["timing_s/old_log_prob"]),
    "tir_otb": (["algorithm.adv_estimator=tir_optimal_token_baseline"], ["timing_s/old_log_prob"]),
    "pf_ppo": (
        [*GAE, "algorithm.use_pf_ppo=true", "actor.ppo_epochs=2"],
        ["pf_ppo/distinct_rows_frac", "critic/vf_loss"],
    ),
    "shaped": (SHAPED, ["critic/advantage_clip_frac", "critic/token_reward_clip_frac", "critic/kl", "critic/kl_coef"]),
    "kl": (
        [*KL, "actor.use_kl_loss=true", "actor.ppo_epochs=2", "actor.shuffle=true"],
        ["actor/kl_loss", "actor/ppo_kl", "timing_s/old_log_prob", "timing_s/ref", "actor/reward_kl_penalty"],
    ),
    "topr": ([f"{LOSS}topr", "actor.ratio_type=segment"], [f"actor/{name}" for name in SEED_METRICS[:1]]),
    "cispo": (
        [f"{LOSS}cispo", "actor.policy_loss.cispo_unified_mask=true", "actor.use_kl_loss=true"],
        [f"actor/{name}" for name in SEED_METRICS],
    ),
    "a loss of verl": ([f"{LOSS}tests.workers.test_losses:verl_style"], ["actor/pg_clipfrac"]),
}


def two_steps(folder: Path, *options: str, rows: int = 16) -> list[dict[str, float]]:
    """Metrics of both training steps of 8 prompts each."""
    runs = Runs(folder, rows, 8, ["trainer.total_training_steps=2", "trainer.save_freq=0", *options])
    found = list(read_metrics(runs.finish("run") / "metrics.jsonl").values())
    assert len(found) == 2 and all(row["actor/grad_norm"] > 0 for row in found)
    return found


def test_a_base_model_without_a_chat_template_learns_from_plain_text(tmp_path: Path) -> None:
    runs = Runs(tmp_path, 0, 8, ["trainer.total_training_steps=1", "trainer.save_freq=0"])
    (tmp_path / "model" / "chat_template.jinja").unlink()
    rows = [{"prompt": f"{row}+{row}=", "data_source": "sums", "ground_truth": str(2 * row)} for row in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (nothing,), (none,) = (
        list(read_metrics(runs.finish(name, *more) / "metrics.jsonl").values())
        for name, more in (("nothing", []), ("none", ["actor_rollout_ref.model.custom_chat_template=none"]))
    )
    assert nothing["actor/grad_norm"] == none["actor/grad_norm"] > 0 and nothing["prompt_length/max"] == 4


@pytest.mark.parametrize("name", CASES)
def test_it_trains_and_logs_what_it_is_known_by(name: str, tmp_path: Path) -> None:
    options, expected = CASES[name]
    for row in two_steps(tmp_path, *options):
        assert not set(expected) - row.keys()


def test_clip_cov_drops_the_share_of_tokens_that_it_is_told_to(tmp_path: Path) -> None:
    """Strictly on-policy, and still with log-probs of before the update."""
    for row in two_steps(tmp_path, *ON_POLICY, f"{LOSS}clip_cov", f"{COV}ratio=0.1", f"{COV}lb=-100", f"{COV}ub=100"):
        assert row["actor/pg_clipfrac"] == pytest.approx(0.1, abs=0.02)
        assert row["timing_s/old_log_prob"] > 0
        assert row["actor/ratio_min"] == row["actor/ratio_max"] == 1.0


def test_kl_cov(tmp_path: Path) -> None:
    row = two_steps(tmp_path, f"{LOSS}kl_cov", "actor.policy_loss.kl_cov_ratio=0.1")[-1]
    assert row["actor/ppo_kl"] != 0 and row["actor/ratio_max"] > 1.0 > row["actor/ratio_min"]


def test_remax_samples_what_grpo_samples_beside_what_greedy_validation_answers(tmp_path: Path) -> None:
    """The first step over 8 prompts, which are the validation set too: the same prompts, seeds and weights."""
    first = {}
    for name in ("grpo", "remax"):
        (folder := tmp_path / name).mkdir()
        options = [
            f"algorithm.adv_estimator={name}", f"data.val_files={folder}/train.jsonl",
            "trainer.val_before_train=true", "rollout.val_kwargs.do_sample=false",
            "rollout.val_kwargs.temperature=0.0", "rollout.val_kwargs.n=1", "rollout.val_kwargs.greedy_too=false",
            f"trainer.validation_data_dir={folder}/val",
        ]  # fmt: skip
        runs = Runs(folder, 8, 8, ["trainer.total_training_steps=1", "trainer.save_freq=0", *options])
        rows = read_metrics(runs.finish("run") / "metrics.jsonl")
        first[name] = next(row for row in rows.values() if "actor/grad_norm" in row)
    for metric in ("critic/score/mean", "response_length/mean", "prompt_length/mean"):
        assert first["remax"][metric] == first["grpo"][metric], metric
    greedy = [json.loads(line)["score"] for line in (tmp_path / "remax/val/0.jsonl").read_text().splitlines()]
    assert len(greedy) == 8
    assert first["remax"]["reward/baseline_error_rate"] == 0
    baseline = first["remax"]["critic/reward_baselines/mean"]
    assert baseline == pytest.approx(sum(greedy) / 8) != first["remax"]["critic/score/mean"]
