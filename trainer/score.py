"""`python -m trainer.score RUN_OR_FILE [reward=NAME] [key=value ...]`: rescores saved answers with a reward function,
without a model.

RUN_OR_FILE is a run folder, a folder given as trainer.rollout_data_dir or trainer.validation_data_dir, or a jsonl or
parquet file of answers, such as `trainer.main_generate` writes. reward=NAME applies a registered reward to all rows;
reward=FILE.py or FILE.py:FUNCTION applies your own function. All reward.* options work as in training. Without them, a
run is scored by its own reward, and the rows of a file by the reward of their data_source. The command prints a
comparison of saved and new scores and writes all of them to a parquet file next to the input (or to --out FILE).
`--help-config` lists the options.

Rewards run in supervised processes, as in training. The new score is that of the reward function alone, without reward
model and without the penalty for long answers. Exit status: 1 if the share of failed rewards exceeds
reward.max_error_rate; otherwise see `trainer.cli`.
"""

import sys
from pathlib import Path

from trainer.cli import command, out_as_word
from verl_lite.config import ScoreConfig, help_config
from verl_lite.errors import UserError

USAGE = "usage: python -m trainer.score RUN_OR_FILE [reward=NAME] [reward.KEY=VALUE ...] [--out FILE.parquet]"


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    if "--help-config" in argv:
        print(help_config(ScoreConfig))
        return 0
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        raise UserError(USAGE)
    from trainer.evaluate.scoring import score

    source = Path(argv[0]).expanduser()
    words = out_as_word(argv[1:], "out")
    return score(source, words)


if __name__ == "__main__":
    sys.exit(main())
