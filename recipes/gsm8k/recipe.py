"""Grade-school word problems with a checked answer behind `####`.

Without a model and data of the user's own, a model of 0.2 million parameters learns on problems made by rule, so that
the recipe runs anywhere at once; `real_model.yaml` has the settings for GSM8K itself and an instruct model on GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recipes.embedded import ONE_GROUP, make_where_wanted
from recipes.embedded import cache_folder as folder_of
from recipes.gsm8k.start import NAME, build, made_from

if TYPE_CHECKING:
    from verl_lite.config import PPOConfig

RL_STEPS = 60

REAL = (
    "gsm8k: this is a model of 0.2 million parameters on problems made by rule. For GSM8K and a real model:\n"
    "  python -m recipes.gsm8k.prepare --from openai/gsm8k --to FOLDER    (--from also takes a folder)\n"
    "  python -m trainer.main_ppo recipe=gsm8k --config recipes/gsm8k/real_model.yaml model.path=MODEL \\\n"
    "      data.train_files=FOLDER/train.parquet data.val_files=FOLDER/test.parquet"
)


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    folder = cache_folder()
    return {
        "model.path": str(folder / "model"),
        "model.enable_gradient_checkpointing": False,
        "data.train_files": [str(folder / "data" / "train.parquet")],
        "data.val_files": [str(folder / "data" / "test.parquet")],
        "data.train_batch_size": 64,
        "data.max_prompt_length": 40,
        "data.max_response_length": 32,
        "rollout.n": 8,
        "rollout.kv_cache_memory_mb": 128,
        "rollout.max_num_seqs": 512,
        "rollout.val_kwargs.do_sample": True,
        "rollout.val_kwargs.temperature": 1.0,
        "rollout.val_kwargs.greedy_too": True,
        "actor.ppo_mini_batch_size": 64,
        "actor.calculate_entropy": True,
        "actor.optim.lr": 3e-4,
        "actor.optim.lr_warmup_steps": 5,
        "actor.optim.betas": [0.9, 0.95],
        "actor.fsdp_config.wrap_policy.min_num_params": ONE_GROUP,
        "actor.fsdp_config.reshard_after_forward": False,
        "trainer.total_epochs": 100,
        "trainer.total_training_steps": RL_STEPS,
        "trainer.val_before_train": True,
        "trainer.test_freq": 15,
    }


def prepare(config: PPOConfig) -> None:
    """Makes what the run needs and the cache does not hold; a model or data of the user's own are left alone."""
    if Path(config.model.path or "").is_relative_to(cache_folder()):
        print(REAL, flush=True)
    make_where_wanted(config, cache_folder(), NAME, build)


def cache_folder() -> Path:
    """The folder of this version of model, data and warm start."""
    return folder_of(NAME, made_from())
