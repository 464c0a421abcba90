"""Supervised fine-tuning of a random model on the quickstart's demonstrations, then DPO on pairs of its own answers.

`python -m trainer.main_sft recipe=sft` is the first stage; run.sh runs all stages. The settings fit both losses.
`python -m recipes.sft.recipe` builds the files and prints their folder.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from recipes import embedded, made_data
from recipes.quickstart.recipe import START

SEED = 1


def overrides() -> dict[str, object]:
    """Returns the settings of the first stage by dotted key; options on the command line override them."""
    folder = made().folder
    return {
        "model.path": str(folder / "model"),
        # a small model fits into memory without recomputing activations
        "model.enable_gradient_checkpointing": False,
        "data.train_files": [str(folder / "demonstrations.parquet")],
        # the right answers, while about half of the demonstrated ones are wrong
        "data.val_files": [str(folder / "answers.parquet")],
        "data.max_length": 32,
        "optim.lr": 2e-3,
        "optim.betas": [0.9, 0.99],
        "optim.lr_warmup_steps": 10,
        "optim.lr_scheduler_type": "cosine",
        "optim.min_lr_ratio": 0.1,
        "fsdp_config.wrap_policy.min_num_params": embedded.ONE_GROUP,
        "fsdp_config.reshard_after_forward": False,
        "trainer.total_training_steps": 390,
        "trainer.test_freq": 65,
        "trainer.save_freq": 0,
        "trainer.log_freq": 13,
    }


def prepare(config: object) -> None:
    """Builds the files in the cache if they do not exist."""
    made().make()


def made() -> embedded.Made:
    """Returns the cached files of this version of model and data."""
    code = [
        Path(__file__),
        Path(START.data.__file__ or ""),
        Path(made_data.__file__),
    ]
    return embedded.Made("sft", build, code, str(START.hidden))


def build(folder: Path) -> None:
    """Writes the random model, the quickstart's data, and answers.parquet: the right answers to the test questions."""
    START.write_random_model(folder / "model")
    START.data.write_data(folder, SEED)

    right = []
    for row in pq.read_table(folder / "test.parquet").to_pylist():
        truth = row["reward_model"]["ground_truth"]
        right.append({"prompt": row["prompt"], "completion": truth})
    made_data.write_parquet(right, folder / "answers.parquet")


def main() -> None:
    """Builds the files and prints their folder."""
    made().make()
    print(made().folder)


if __name__ == "__main__":
    main()
