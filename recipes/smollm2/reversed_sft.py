"""Supervised fine-tuning of SmolLM2 on reversed texts, the first stage of `sft_then_rl.py` (`trainer.main_sft`)."""

from __future__ import annotations

from recipes.smollm2 import model
from recipes.smollm2.recipe import made_tasks, prepare

__all__ = ["overrides", "prepare"]


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return {
        "model.path": str(model.folder()),
        "data.train_files": [str(made_tasks().folder / "reversed_text" / "demonstrations.parquet")],
        "data.train_batch_size": 16,
        "data.max_length": 160,
        "optim.lr": 2e-5,
        "trainer.total_training_steps": 100,
        "trainer.log_freq": 10,
    }
