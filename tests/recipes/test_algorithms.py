"""Recipes of single algorithms: valid, on one task with one budget, different only in what makes the algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import common_task
from recipes.quickstart import recipe as quickstart
from trainer.recipe import load_recipe, recipe_overrides
from trainer.requirements import needs_critic, needs_greedy_baseline
from trainer.resume import flat_config
from trainer.sweeps.checks import load
from trainer.sweeps.question import read_options
from trainer.sweeps.space import combinations
from verl_lite.config import PPOConfig, load_config
from verl_lite.config.checks import validate

OWN = {
    "grpo": {"actor.loss_agg_mode"},
    "dr_grpo": {"actor.loss_agg_mode", "algorithm.norm_adv_by_std_in_grpo"},
    "rloo": {"actor.loss_agg_mode", "algorithm.adv_estimator"},
    "reinforce_pp": {"algorithm.adv_estimator"},
    "gspo": {"actor.loss_agg_mode", "actor.policy_loss.loss_mode", "actor.clip_ratio_low", "actor.clip_ratio_high"},
    "cispo": {"actor.policy_loss.loss_mode", "actor.clip_ratio_low", "actor.clip_ratio_high"},
    "remax": {"actor.loss_agg_mode", "algorithm.adv_estimator"},
}
"""By recipe: the options in which it differs from the common task, beside how the samples are spent."""

SPENT = {"data.train_batch_size", "rollout.n", "actor.ppo_mini_batch_size", "recipe"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The quickstart's cache, with files that are there and no more."""
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path))
    folder = quickstart.START.folder
    for file in ("model/config.json", "data/train.parquet", "data/test.parquet"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("{}")
    return folder


def config_of(*arguments: str) -> PPOConfig:
    config = load_config(list(arguments), recipe_loader=recipe_overrides).config
    config.trainer.n_gpus_per_node = 2
    validate(config, available=2)
    return config


def samples_of(config: PPOConfig) -> int:
    """Answers that a step samples."""
    return config.data.train_batch_size * (config.rollout.n + needs_greedy_baseline(config))


@pytest.mark.parametrize("name", sorted(OWN))
def test_it_differs_from_the_common_task_in_its_algorithm_alone(name: str, cache: Path) -> None:
    config = config_of(f"recipe={name}")
    assert samples_of(config) == common_task.SAMPLES and not needs_critic(config)
    per_step = config.data.train_batch_size // config.actor.ppo_mini_batch_size
    assert per_step == common_task.MINI_BATCHES
    base = flat_config(load_config([], recipe_loader=lambda _: common_task.settings()).config)
    differing = {
        key for key, value in flat_config(config).items() if value != base[key] and not key.startswith("trainer.")
    }
    assert differing - SPENT == OWN[name]
    assert load_recipe(name).prepare is common_task.prepare is quickstart.prepare


def test_all_that_are_compared_have_the_same_budget(cache: Path) -> None:
    file = Path(common_task.__file__).with_name("comparison.yaml")
    asked = read_options(["--file", str(file)]).question
    assert asked is not None and asked.seeds == [1, 2, 3]
    for values in combinations(asked.space):
        config = load(asked, values)
        validate(config)
        assert samples_of(config) == common_task.SAMPLES, values
        assert config.data.train_batch_size == common_task.MINI_BATCHES * config.actor.ppo_mini_batch_size
        assert (config.actor.optim.lr, config.trainer.total_training_steps, config.trainer.test_freq) == (2e-4, 40, 10)
        if needs_critic(config):
            assert config.critic.ppo_mini_batch_size == config.actor.ppo_mini_batch_size


@pytest.mark.parametrize("name", sorted(OWN))
def test_each_page_has_the_same_form_and_its_commands_are_accepted(name: str, cache: Path, tmp_path: Path) -> None:
    folder = Path(load_recipe(name).__file__ or "").parent
    page = (folder / "README.md").read_text()
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles[:3] == ["## What makes it", "## Result", "## A real model on GPUs"]
    assert f"recipe={name}" in (folder / "run.sh").read_text() and (folder / "curve.png").exists()
    commands = [line.strip() for line in page.replace("\\\n", " ").splitlines() if "trainer.main_ppo" in line]
    assert len(commands) >= 2
    for command in commands:
        words = command.split("main_ppo", 1)[1].split("#")[0].split()
        load_config(words, recipe_loader=recipe_overrides)
