"""The settings of every recipe are sound, those for real models beside them, and its page's commands are accepted; what
is compared differs in what makes the algorithm alone."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from recipes import common_task
from recipes.gsm8k import recipe as gsm8k
from recipes.quickstart import recipe as quickstart
from recipes.reasoning_gym import recipe as reasoning_gym
from recipes.reasoning_gym.data import WEIGHTS, source
from recipes.reward_model import recipe as reward_model
from trainer.checkpoint.resume import flat_config
from trainer.ppo.requirements import needs_critic, needs_greedy_baseline, needs_reference
from trainer.recipe import load_recipe, recipe_overrides
from trainer.sweeps.study_spec import combinations, read_options
from trainer.sweeps.sweep_checks import load
from verl_lite.config import PPOConfig, load_config
from verl_lite.config.checks import validate
from verl_lite.envs import env_templates
from workers.engines.base import engine_names

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.parent.name: page.read_text(encoding="utf-8") for page in ROOT.glob("recipes/*/README.md")}
AGENTIC = ("agentic_frozen_lake", "agentic_sokoban")
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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipes' caches, with files that are there and no more."""
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # then the name of a model is not looked up
    folders = [*(each.START.folder for each in (quickstart, gsm8k, reasoning_gym)), reward_model.made().folder]
    for folder in folders:
        for file in ("model/config.json", "model/tokenizer_config.json", "data/train.parquet", "data/test.parquet"):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("{}")
    return tmp_path


def config_of(*arguments: str) -> PPOConfig:
    config = load_config(list(arguments), recipe_loader=recipe_overrides).config
    config.trainer.n_gpus_per_node = 2
    validate(config, engines=engine_names(), slots=2, available=2)
    return config


def samples_of(config: PPOConfig) -> int:
    """Answers that a step samples."""
    return config.data.train_batch_size * (config.rollout.n + needs_greedy_baseline(config))


def test_gsm8k_says_what_a_real_run_takes_and_makes_nothing_for_one(cache: Path, capsys: Any) -> None:
    gsm8k.prepare(config_of("recipe=gsm8k"))
    told = capsys.readouterr().out
    assert "python -m recipes.gsm8k.prepare --from" in told and "recipes/gsm8k/real_model.yaml" in told
    files = [f"data.{split}_files={cache}/mine.parquet" for split in ("train", "val")]
    (cache / "mine.parquet").write_text("")
    real = ["--config", str(ROOT / "recipes/gsm8k/real_model.yaml"), "model.path=a/model", *files]
    config = config_of("recipe=gsm8k", *real)
    assert config.trainer.total_training_steps is None and config.data.max_response_length == 1024
    gsm8k.prepare(config)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("file", [None, "real_model", "mixed"])
def test_reasoning_gym_has_a_curriculum_or_shares(file: str | None) -> None:
    more = ["--config", str(ROOT / f"recipes/reasoning_gym/{file}.yaml")] if file else []
    config = config_of("recipe=reasoning_gym", *more)
    assert (config.data.sampler.class_path is None) == (file == "mixed")
    if file == "mixed":
        weights = {name: entry["weight"] for name, entry in config.data.sources.items()}
        assert weights == {source(task): weight for task, weight in WEIGHTS.items()}


@pytest.mark.parametrize("kl", [True, False])
def test_the_reward_models_score_counts_and_the_truth_is_only_logged(kl: bool) -> None:
    config = config_of("recipe=reward_model", *([] if kl else ["actor.use_kl_loss=false", "actor.kl_loss_coef=0.001"]))
    assert needs_reference(config) == kl
    assert config.reward.functions == {"truth": {"weight": 0.0}}
    assert config.reward_model.model.path == str(reward_model.made().folder / "model")
    reward_model.prepare(config)  # everything is there


def commands_of(page: str) -> list[list[str]]:
    """The arguments of the page's commands for the main job, each a paragraph of its own or cut over lines."""
    lines = [line.strip() for line in page.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True)[3:] for line in lines if line.startswith("python -m trainer.main_ppo")]


@pytest.mark.parametrize("name", sorted(name for name in PAGES if commands_of(PAGES[name])))
def test_the_commands_of_its_page_are_accepted(name: str) -> None:
    for words in commands_of(PAGES[name]):
        config = load_config(words, recipe_loader=recipe_overrides).config
        env_templates(config.agentic.custom_envs)
    if name != "launch":  # its page shows commands for several machines
        assert f"main_ppo recipe={name} " in (ROOT / "recipes" / name / "run.sh").read_text()


@pytest.mark.parametrize("name", OWN)
def test_it_differs_from_the_common_task_in_its_algorithm_alone(name: str) -> None:
    config = config_of(f"recipe={name}")
    assert samples_of(config) == common_task.SAMPLES and not needs_critic(config)
    assert config.data.train_batch_size // config.actor.ppo_mini_batch_size == common_task.MINI_BATCHES
    base = flat_config(load_config([], recipe_loader=lambda _: common_task.settings()).config)
    differing = {key for key, value in flat_config(config).items() if value != base[key]} - SPENT
    assert {key for key in differing if not key.startswith("trainer.")} == OWN[name]
    assert load_recipe(name).prepare is common_task.prepare is quickstart.prepare
    titles = [line for line in PAGES[name].splitlines() if line.startswith("## ")]
    assert titles[:3] == ["## Settings", "## Result", "## A real model on GPUs"]
    assert (ROOT / "recipes" / name / "curve.png").exists()


def test_all_that_are_compared_have_the_same_budget() -> None:
    asked = read_options(["--file", str(ROOT / "recipes" / "comparison.yaml")]).spec
    assert asked is not None and asked.seeds == [1, 2, 3]
    for values in combinations(asked.space):
        config = load(asked, values)
        validate(config, engines=engine_names())
        assert samples_of(config) == common_task.SAMPLES, values
        assert config.data.train_batch_size == common_task.MINI_BATCHES * config.actor.ppo_mini_batch_size
        assert (config.actor.optim.lr, config.trainer.total_training_steps, config.trainer.test_freq) == (2e-4, 40, 10)
        if needs_critic(config):
            assert config.critic.ppo_mini_batch_size == config.actor.ppo_mini_batch_size


@pytest.mark.parametrize("name", AGENTIC)
def test_agents_are_validated_on_worlds_that_they_have_not_seen(name: str) -> None:
    config = load_config([f"recipe={name}"], recipe_loader=recipe_overrides).config
    templates = env_templates(config.agentic.custom_envs)
    assert set(config.agentic.train_env_manager.tags) < set(templates)
    splits = {tag: template.env_config.get("split") for tag, template in templates.items()}
    trained = {splits[tag] for tag in config.agentic.train_env_manager.tags}
    validated = {splits[tag] for tag in config.agentic.val_env_manager.tags}
    assert trained <= {"train", None} and "test" in validated and "train" not in validated
