"""Three tasks of reasoning-gym at three levels each, mixed by weight, with a curriculum that opens levels as the model
learns.

`curriculum.py` is the sampler; `mixed.yaml` beside this file takes it away and draws all levels from the beginning.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recipes.embedded import cache_folder as folder_of
from recipes.embedded import make_where_wanted
from recipes.quickstart import recipe as quickstart
from recipes.reasoning_gym.start import NAME, build, made_from

if TYPE_CHECKING:
    from verl_lite.config import PPOConfig

RL_STEPS = 100


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    folder = cache_folder()
    return quickstart.overrides() | {
        "model.path": str(folder / "model"),
        "data.train_files": [str(folder / "data" / "train.parquet")],
        "data.val_files": [str(folder / "data" / "test.parquet")],
        "data.sampler.class_path": "pkg://recipes.reasoning_gym.curriculum",
        "data.sampler.class_name": "Curriculum",
        "data.train_batch_size": 64,
        "data.max_prompt_length": 80,
        "data.max_response_length": 12,
        "actor.ppo_mini_batch_size": 64,
        "actor.optim.lr_warmup_steps": 5,
        "trainer.total_training_steps": RL_STEPS,
        "trainer.test_freq": 20,
    }


def prepare(config: PPOConfig) -> None:
    """Makes what the run needs and the cache does not hold; a model or data of the user's own are left alone."""
    make_where_wanted(config, cache_folder(), NAME, build)


def cache_folder() -> Path:
    """The folder of this version of model, data and warm start."""
    return folder_of(NAME, made_from())
