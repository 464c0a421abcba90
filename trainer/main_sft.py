"""`python -m trainer.main_sft data.train_files=FILE model.path=FOLDER key=value ...`: supervised fine-tuning.

Learns from parquet, json or jsonl with a `messages` column, or `prompt` and `response` columns; writes the model in
Hugging Face format to trainer.default_local_dir/hf, with metrics.jsonl and config.yaml beside it. `--help-config` lists
the options. Exit status: see `trainer.cli`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.cli import command
from verl_lite.config import SFTConfig

if TYPE_CHECKING:
    from trainer.supervised.loop import Trained


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from trainer.supervised.command import run

    return run(argv, SFTConfig, train)


def train(config: SFTConfig, report: Callable[[str], None]) -> Trained:
    """Trains; only now is torch imported."""
    from trainer.supervised.sft import run_sft

    return run_sft(config, report)


if __name__ == "__main__":
    sys.exit(main())
