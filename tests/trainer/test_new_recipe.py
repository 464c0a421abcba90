"""`python -m trainer.new_recipe`: what it writes is sound and runs; it writes over nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.quickstart.data import write_data
from recipes.quickstart.recipe import START
from tests.e2e.test_main_job import metrics
from trainer.new_recipe import main, write_recipe
from trainer.recipe import load_recipe, recipe_overrides
from verl_lite.config import load_config
from verl_lite.config.checks import validate
from verl_lite.contracts import check_adv_estimator
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY
from verl_lite.errors import UserError
from verl_lite.registry import load_object
from verl_lite.rewards import load_scorer
from workers.engines.base import engine_names

pytestmark = pytest.mark.usefixtures("nothing_stays")

ROOT = Path(__file__).resolve().parents[2]


def test_what_it_writes_is_a_sound_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path / "cache"))
    folder = write_recipe("my_idea", tmp_path / "my_idea")
    config = load_config([f"recipe={folder}"], recipe_loader=recipe_overrides).config
    for file in (*config.data.train_files, *config.data.val_files, f"{config.model.path}/config.json"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("{}")
    config.trainer.n_gpus_per_node = 1
    validate(config, engines=engine_names(), available=1)
    assert config.algorithm.adv_estimator == "my_idea"
    check_adv_estimator(ADV_ESTIMATOR_REGISTRY["my_idea"])
    assert load_scorer(config.reward) is not None
    path = config.reward.custom_reward_function.path or ""
    compute_score = load_object(path, "compute_score", "path", "name")
    assert compute_score("x", " 124 ", "123") == {"score": pytest.approx(2 / 3), "acc": 0.0, "has_right_length": 1.0}
    assert load_recipe(str(folder)).prepare is not None


@pytest.mark.parametrize("name", ["my-idea", "Mine", "1st", "../up", "class", "grpo", "json"])
def test_a_name_that_cannot_work_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"NAME='{name}' in .*as in my_recipe"):
        write_recipe(name, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["my_idea", "--out", str(tmp_path / "my_idea")]) == 0
    assert f"python -m trainer.main_ppo recipe={tmp_path / 'my_idea'}" in capsys.readouterr().out
    (tmp_path / "my_idea" / "recipe.py").write_text("mine")
    assert main(["my_idea", "--to", str(tmp_path / "my_idea")]) == 2
    assert "already exists and is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "my_idea" / "recipe.py").read_text() == "mine"
    assert main(["my_idea", "--to", str(tmp_path / "nowhere" / "mine")]) == 2
    assert "does not exist; create it first" in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs_as_it_was_written(tmp_path: Path) -> None:
    """From another folder, by the command that it names; an untrained model in place of the warm start."""
    START.write_random_model(tmp_path / "model")
    write_data(tmp_path / "data", seed=1)
    folder = write_recipe("my_idea", tmp_path / "my_idea")
    data = {"train": tmp_path / "data" / "train.parquet", "val": tmp_path / "data" / "test.parquet"}
    command = [
        *("bash", str(folder / "run.sh"), f"model.path={tmp_path / 'model'}"),
        *(f"data.{split}_files=[{file}]" for split, file in data.items()),
        *("trainer.backend=inline", "trainer.device=cpu", "rollout.name=hf", "trainer.total_training_steps=2"),
        *("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "data.val_max_samples=8", "trainer.logger=[jsonl]"),
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = [row for row in metrics(tmp_path / "run") if "actor/pg_loss" in row]
    assert len(rows) == 2
    assert any(name.startswith("val-aux") and "has_right_length" in name for row in rows for name in row)
