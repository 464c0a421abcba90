"""`python -m trainer.main_sft data.train_files=FILE model.path=FOLDER key=value ...`: supervised fine-tuning.

Learns from parquet, json or jsonl with a `messages` column, or `prompt` and `response` columns; writes the model in
Hugging Face format to trainer.default_local_dir/hf, with metrics.jsonl and config.yaml beside it. `--help-config` lists
the options. Exit status: see `trainer.ending`.
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
    from verl_lite.config import SFTConfig
    from verl_lite.config_loader import help_config, load_schema, print_config, save_config

    loaded = load_schema(argv, SFTConfig)
    if loaded.action == "help":
        print(help_config(SFTConfig))
        return 0
    if loaded.action == "print":
        print(print_config(loaded))
        return 0
    from trainer.console import Console
    from trainer.log_follower import following
    from trainer.sft import run_sft

    console, folder = Console(verbosity=loaded.verbosity), Path(loaded.config.trainer.default_local_dir).expanduser()
    with following(folder / "logs", console):
        result = run_sft(loaded.config, console.progress)
    save_config(loaded, folder / "config.yaml")
    print(f"wrote {result.folder} after {result.steps} steps, loss {result.loss:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
