"""PPO with a critic on the quickstart's task: the recipe is valid, shares the quickstart's files, its command runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.ppo_gae import recipe
from recipes.quickstart import recipe as quickstart
from tests.e2e.test_main_job import metrics, run
from trainer.recipe import recipe_overrides
from trainer.requirements import needs_critic
from verl_lite.config import load_config
from verl_lite.config.checks import validate

SMALL = ["data.train_batch_size=32", "actor.ppo_mini_batch_size=32", "critic.ppo_mini_batch_size=16"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The quickstart's cache, empty."""
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path / "cache"))
    return quickstart.START.folder


def test_it_is_valid_and_takes_model_and_data_from_the_quickstart(cache: Path) -> None:
    config = load_config(["recipe=ppo_gae"], recipe_loader=recipe_overrides).config
    for file in ("model/config.json", "data/train.parquet", "data/test.parquet"):
        (cache / file).parent.mkdir(parents=True, exist_ok=True)
        (cache / file).write_text("{}")
    config.trainer.n_gpus_per_node = 2
    validate(config, available=2)
    assert needs_critic(config)
    assert config.model.path == str(cache / "model") and config.critic.model.path is None
    assert recipe.prepare is quickstart.prepare
    # as many samples a step as the quickstart, so that the two compare
    grpo = quickstart.overrides()
    assert config.data.train_batch_size * config.rollout.n == grpo["data.train_batch_size"] * grpo["rollout.n"]  # type: ignore[operator]


@pytest.mark.slow
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
