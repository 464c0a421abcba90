"""`python -m trainer.main_rm data.train_files=FILE model.path=FOLDER key=value ...`: training of a reward model.

Learns from pairs of answers in parquet, json or jsonl with the columns `prompt`, `chosen` and `rejected`; writes a
model that reward_model.model.path takes to trainer.default_local_dir/hf, with metrics.jsonl and config.yaml beside it.
model.path: a causal language model with a chat template, or a reward model to go on with. `--help-config` lists the
options. Exit status: see `trainer.cli`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.cli import command
from verl_lite.config import RewardTrainingConfig

if TYPE_CHECKING:
    from trainer.supervised.loop import Trained


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from trainer.supervised.command import run

    return run(argv, RewardTrainingConfig, train)


def train(config: RewardTrainingConfig, report: Callable[[str], None]) -> Trained:
    """Trains; only now is torch imported."""
    from trainer.supervised.reward_training import run_reward_training

    return run_reward_training(config, report)


if __name__ == "__main__":
    sys.exit(main())
