"""`python -m trainer.main_rm data.train_files=FILE model.path=FOLDER key=value ...`: training of a reward model.

Learns from pairs of answers in parquet, json or jsonl with the columns `prompt`, `chosen` and `rejected`; writes a
model that reward_model.model.path takes to trainer.default_local_dir/hf, with metrics.jsonl and config.yaml beside it.
model.path: a causal language model with a chat template, or a reward model to go on with. `--help-config` lists the
options. Exit status: see `trainer.ending`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.environment import prepare_driver


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    prepare_driver()
    from trainer.ending import run_command

    return run_command(lambda: run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """The whole command; returns the exit status."""
    from verl_lite.config_loader import help_config, load_schema, print_config, save_config
    from verl_lite.options.reward_training import RewardTrainingConfig

    loaded = load_schema(argv, RewardTrainingConfig)
    if loaded.action == "help":
        print(help_config(RewardTrainingConfig))
        return 0
    if loaded.action == "print":
        print(print_config(loaded))
        return 0
    from trainer.console import Console
    from trainer.log_follower import following
    from trainer.reward_training import run_reward_training

    console, folder = Console(verbosity=loaded.verbosity), Path(loaded.config.trainer.default_local_dir).expanduser()
    with following(folder / "logs", console):
        result = run_reward_training(loaded.config, console.progress)
    save_config(loaded, folder / "config.yaml")
    shown = "".join(f", validation {name} {value:.3f}" for name, value in result.val.items())
    print(f"wrote {result.folder} after {result.steps} steps, loss {result.loss:.3f}{shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
