"""`python -m trainer.main_sft data.train_files=FILE model.path=FOLDER key=value ...`: supervised fine-tuning.

Learns from parquet, json or jsonl with a `messages` column, or `prompt` and `response` columns; writes the model in
Hugging Face format to RUN/hf. RUN is a run folder like any other: checkpoints, metrics, config.yaml. `--help-config`
lists the options. Exit status: see `trainer.cli`.
"""

from trainer.cli import command


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from trainer.run import run
    from trainer.supervised.sft import SFTJob

    return run(SFTJob, argv)


if __name__ == "__main__":
    raise SystemExit(main())
