"""The guide, recipes/README.md: each of its examples is executed, as a recipe in a folder of its own."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from recipes.quickstart.data import write_data
from recipes.quickstart.recipe import START
from tests.e2e.test_main_job import metrics
from trainer.recipe import load_recipe
from verl_lite.config import ActorConfig, load_config
from verl_lite.contracts import check_adv_estimator, check_policy_loss
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, get_policy_loss_fn
from verl_lite.envs import env_templates
from verl_lite.group_filters import make_group_filter
from verl_lite.protocol import DataProto
from workers.agents.env_pool import EnvPool

GUIDE = Path(__file__).resolve().parents[2] / "recipes" / "README.md"
EXAMPLES = dict(re.findall(r"`my_recipe/(\w+\.py)`:\n\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path, nothing_stays: None) -> Path:
    """my_recipe/, as the guide has it."""
    folder = tmp_path / "my_recipe"
    folder.mkdir()
    for file, code in EXAMPLES.items():
        (folder / file).write_text(code)
    return folder


def module(folder: Path, name: str) -> ModuleType:
    """One of the guide's files, imported as part of the recipe."""
    load_recipe(str(folder))
    return importlib.import_module(f"my_recipe.{name}")


def test_every_example_is_here_and_as_short_as_it_says() -> None:
    assert set(EXAMPLES) == {f"{name}.py" for name in (
        "reward", "estimator", "loss", "recipe", "stages", "group_filter", "world",
    )}  # fmt: skip
    for title, most, file in re.findall(
        r"## (Your own \w+) in (\d+) lines\n\n`my_recipe/(\w+\.py)`", GUIDE.read_text()
    ):
        code = [line for line in EXAMPLES[file].splitlines() if line.strip()]
        assert len(code) <= int(most), title


def test_the_reward(folder: Path) -> None:
    compute_score = module(folder, "reward").compute_score
    assert compute_score("x", "124\n", "123") == {"score": pytest.approx(2 / 3), "acc": 0.0, "length": 3.0}
    assert compute_score("x", "123", "123")["acc"] == 1.0


def test_the_estimator_and_the_loss_keep_their_promises(folder: Path) -> None:
    check_adv_estimator(module(folder, "estimator").good_news)
    check_policy_loss(module(folder, "loss").truncated)
    rewards, mask = torch.tensor([[0.0, 3.0], [1.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    advantages, _ = ADV_ESTIMATOR_REGISTRY["good_news"](
        token_level_rewards=rewards, response_mask=mask, index=["a", "a"]
    )
    assert advantages.tolist() == [[1, 1], [-0.5, 0]]  # the mean of 3 and 1 is 2
    new = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -5.0]])  # ratios 1 and e^3, which is held at 2
    loss, _ = get_policy_loss_fn("truncated")(
        old, new, torch.ones(1, 2), torch.ones(1, 2), "token-mean", ActorConfig(), None, batch_num_tokens=2
    )
    loss.backward()
    assert new.grad is not None and new.grad.tolist() == [[-0.5, -1.0]]


def test_the_filter_drops_groups_without_success(folder: Path) -> None:
    module(folder, "group_filter")
    config = load_config(["recipe=agentic_sokoban", "agentic.train_env_manager.group_filter_cls=some_success"]).config
    found = make_group_filter(config.agentic, config.agentic.train_env_manager, "train")
    assert found is not None

    def group(*scores: float) -> list[DataProto]:
        return [DataProto.from_dict({"episode_scores": torch.tensor([score])}) for score in scores]

    assert found.filter(0, 0, group(0, 0)) and not found.filter(0, 0, group(0, 1))


def test_the_environment_can_be_played(folder: Path) -> None:
    world = module(folder, "world").WhichDoor(doors=4)
    assert world.reset(seed=1) == world.reset(seed=1)
    told, reward, ended, cut, info = world.step(f"<answer>{world.secret}</answer>")
    assert (told, reward, ended, cut, info) == ("Gold!", 1.0, True, False, {"metrics": {"success": True}})
    world.secret = 2
    assert world.step("<answer>1</answer>")[0] == "Higher." and world.step("what?")[:2] == ("Lower.", 0.0)
    found = re.search(r"agentic\.custom_envs\.doors='(.*?)'", GUIDE.read_text())
    assert found is not None
    settings = load_config(["model.path=x", f"agentic.custom_envs.doors={found[1]}"]).config
    settings.agentic.env_pool.num_workers = 0
    pool = EnvPool(settings.agentic.env_pool, env_templates(settings.agentic.custom_envs))
    pool.dry_run(["doors"])
    pool.close()


@pytest.mark.slow
def test_the_recipe_runs(folder: Path, tmp_path: Path) -> None:
    """One step on an untrained model, under Ray: the worker knows the registered loss."""
    START.write_random_model(tmp_path / "model")
    write_data(tmp_path / "data", seed=1)
    command = [
        *(sys.executable, "-m", "trainer.main_ppo", "recipe=./my_recipe", f"model.path={tmp_path / 'model'}"),
        *(f"data.train_files=[{tmp_path / 'data' / 'train.parquet'}]", "data.val_files=[]", "rollout.name=hf"),
        *("trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=1", "rollout.n=2"),
        *("trainer.val_before_train=false", "trainer.test_freq=0", "trainer.logger=[jsonl]", "reward.num_workers=1"),
        *("data.train_batch_size=4", "actor.ppo_mini_batch_size=4", f"trainer.default_local_dir={tmp_path / 'run'}"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (row,) = (row for row in metrics(tmp_path / "run") if "actor/pg_loss" in row)
    assert "my_recipe/good_tokens_frac" in row
    assert any(name.startswith("reward/length") for name in row)
