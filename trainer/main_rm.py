"""`python -m trainer.main_rm data.train_files=FILE model.path=FOLDER key=value ...`: training of a reward model.

Learns from pairs of answers in parquet, json or jsonl with the columns `prompt`, `chosen` and `rejected`; writes a
model to RUN/hf that can be used as reward_model.model.path. model.path: a causal language model with a chat template,
or a reward model to train further. `--help-config` lists the options. Exit status: see `trainer.cli`.
"""

from trainer.cli import command, leave
from trainer.launch.start import start
from verl_lite.config import RewardTrainingConfig


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    return start("trainer.supervised.reward_training:RewardTrainingJob", RewardTrainingConfig, argv)


if __name__ == "__main__":
    leave(main())
