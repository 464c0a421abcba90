"""Whole runs in this process with a rollout engine that says log-probs other than the trainer's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.tiny_model import tiny_qwen2
from trainer.build import run_ppo
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
    folder = tmp_path_factory.mktemp("run")
    tiny_qwen2(folder / "policy", hidden=32, layers=1)
    rows = [
        {
            "data_source": "talk",
            "prompt": [{"role": "user", "content": f"{i}+{i}="}],
            "reward_model": {"ground_truth": "1"},
        }
        for i in range(4)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "function.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(map(ord, solution_str)) % 7 / 7\n"
    )
    return folder


def step_of(folder: Path, name: str, *options: str) -> dict[str, float]:
    """The metrics of one training step."""
    argv = [
        f"model.path={folder}/policy", f"data.train_files={folder}/prompts.jsonl", "data.train_batch_size=4",
        "data.max_prompt_length=24", "data.max_response_length=6", "actor.ppo_mini_batch_size=4", "rollout.n=3",
        "rollout.name=tests.trainer.test_rollout_correction_run:ShiftedEngine", "reward.num_workers=0",
        f"reward.custom_reward_function.path={folder}/function.py", "trainer.backend=inline", "trainer.device=cpu",
        "trainer.n_gpus_per_node=1", "trainer.total_training_steps=1", "trainer.save_freq=0", "trainer.logger=jsonl",
        f"trainer.default_local_dir={folder}/{name}", *options,
    ]  # fmt: skip
    assert run_ppo(argv) == 0
    [row] = [json.loads(line)["data"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
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
