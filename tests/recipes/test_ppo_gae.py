"""PPO with a critic on the quickstart's task: the recipe is valid, shares the quickstart's files, its command runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_main_job import metrics, run

SMALL = ["data.train_batch_size=32", "actor.ppo_mini_batch_size=32", "critic.ppo_mini_batch_size=16"]


@pytest.mark.long
def test_its_command_trains_both_networks_on_two_ranks(tmp_path: Path) -> None:
    options = ["trainer.total_training_steps=2", "trainer.critic_warmup=1", "data.val_max_samples=16"]
    folder = tmp_path / "run"
    done = run(tmp_path, "recipe=ppo_gae", *SMALL, *options, "rollout.name=hf", f"trainer.default_local_dir={folder}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "newly initialized" not in done.stdout + done.stderr
    first, second = (row for row in metrics(folder) if "critic/vf_loss" in row)
    assert "actor/pg_loss" not in first and "actor/pg_loss" in second
    assert first["critic/values/max"] == 0 and second["critic/values/max"] != 0
    assert {path.name for path in (folder / "global_step_2").iterdir()} >= {"actor", "critic", "data.pt"}
