"""The settings of every text recipe are sound, and those for real models beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.gsm8k import recipe as gsm8k
from recipes.quickstart import recipe as quickstart
from recipes.reasoning_gym import recipe as reasoning_gym
from recipes.reasoning_gym.data import WEIGHTS, source
from recipes.reward_model import recipe as reward_model
from trainer.recipe import recipe_overrides
from trainer.requirements import needs_reference
from verl_lite.config import PPOConfig, load_config
from verl_lite.config.checks import validate

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipes' caches, with files that are there and no more."""
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # then the name of a model is not looked up
    folders = [*(each.START.folder for each in (quickstart, gsm8k, reasoning_gym)), reward_model.cache_folder()]
    for folder in folders:
        for file in ("model/config.json", "model/tokenizer_config.json", "data/train.parquet", "data/test.parquet"):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("{}")
    return tmp_path


def config_of(*arguments: str) -> PPOConfig:
    config = load_config(list(arguments), recipe_loader=recipe_overrides).config
    config.trainer.n_gpus_per_node = 2
    validate(config, slots=2, available=2)
    return config


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
    assert config.reward_model.model.path == str(reward_model.cache_folder() / "model")
    reward_model.prepare(config)  # everything is there
