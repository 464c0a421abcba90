"""The agentic recipes through the main command: an untrained model plays, is trained and validated for two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.agentic_frozen_lake.data import write_model
from trainer.build import run_ppo
from trainer.tracking import read_metrics

pytestmark = pytest.mark.slow

SMALL = [
    "trainer.backend=inline", "trainer.device=cpu", "trainer.logger=[jsonl]", "trainer.save_freq=0", "rollout.name=hf",
    "trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.val_before_train=false",
    "rollout.val_kwargs.greedy_too=false", "agentic.env_pool.num_workers=0", "agentic.rollout_batch_size=4",
    "agentic.train_env_manager.num_env_groups=2", "agentic.train_env_manager.group_size=2",
    "agentic.val_env_manager.num_env_groups=4", "agentic.val_batch_size=4",
]  # fmt: skip
LAKES = ["agentic.train_env_manager.num_groups_partition=[1,1]", "agentic.val_env_manager.num_groups_partition=[2,2]"]


@pytest.mark.parametrize(
    ("recipe", "options", "tags"),
    [("agentic_frozen_lake", LAKES, ["lake_4x4", "lake_unseen"]), ("agentic_sokoban", [], ["sokoban_unseen"])],
)
def test_two_steps_of_a_recipe(recipe: str, options: list[str], tags: list[str], tmp_path: Path) -> None:
    write_model(tmp_path / "model", seed=1, layers=1, hidden=32)
    run_dir = tmp_path / "run"
    places = [f"recipe={recipe}", f"model.path={tmp_path / 'model'}", f"trainer.default_local_dir={run_dir}"]
    assert run_ppo([*places, *SMALL, *options]) == 0
    steps = read_metrics(run_dir / "metrics.jsonl")
    assert {1, 2} <= set(steps)
    assert steps[1]["env/error_rate"] == 0 and steps[1]["env/num_actions"] == 10  # nonsense, until the turns are over
    assert steps[1]["env/action_is_valid"] < 1
    for tag in tags:
        assert 0 <= steps[2][f"val/env/{tag}/success"] <= 1
