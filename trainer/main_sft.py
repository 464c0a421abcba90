"""`python -m trainer.main_sft data.train_files=FILE model.path=FOLDER key=value ...`: supervised fine-tuning.

Learns from parquet, json or jsonl with a `messages` column, or `prompt` and `response` columns; with loss=dpo from the
columns `prompt`, `chosen` and `rejected`. Writes the model in Hugging Face format to RUN/hf. RUN is a run folder with
checkpoints, metrics and config.yaml. `--help-config` lists the options. Exit status: see `trainer.cli`.
"""

from trainer.cli import command, leave
from trainer.launch.start import start
from verl_lite.config import SFTConfig


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    return start("trainer.supervised.sft:SFTJob", SFTConfig, argv)


if __name__ == "__main__":
    leave(main())
