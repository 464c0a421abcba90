"""Grade-school word problems whose answer after `####` is checked.

By default, a model of 0.2 million parameters learns on generated problems, so that the recipe runs without downloads.
`real_model.yaml` has the settings for GSM8K itself and an instruct model on GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recipes.embedded import Start
from recipes.gsm8k import problems
from recipes.quickstart import recipe as quickstart

if TYPE_CHECKING:
    from verl_lite.config import PPOConfig

START = Start(
    "gsm8k",
    problems,
    hidden=64,
    steps=360,
    max_length=64,
    lr=4e-3,
    words=problems.WORDS,
)
RL_STEPS = 60

REAL = (
    "gsm8k: this is a model of 0.2 million parameters on generated problems. For GSM8K and a real model:\n"
    "  python -m recipes.gsm8k.prepare --from openai/gsm8k --out FOLDER    (--from also takes a folder)\n"
    "  python -m trainer.main_ppo recipe=gsm8k --config recipes/gsm8k/real_model.yaml model.path=MODEL \\\n"
    "      data.train_files=FOLDER/train.parquet data.val_files=FOLDER/test.parquet"
)


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return (
        quickstart.overrides()
        | START.settings()
        | {
            "data.train_batch_size": 64,
            "data.max_prompt_length": 40,
            "data.max_response_length": 32,
            "actor.ppo_mini_batch_size": 64,
            "actor.optim.lr_warmup_steps": 5,
            "trainer.total_training_steps": RL_STEPS,
            "trainer.test_freq": 15,
        }
    )


def prepare(config: PPOConfig) -> None:
    """Builds the missing files of the run in the cache. The user's own model and data are not changed."""
    path = Path(config.model.path or "")
    # not for the user's own model
    if path.is_relative_to(START.folder):
        print(REAL, flush=True)
    START.prepare(config)
