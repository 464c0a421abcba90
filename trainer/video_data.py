"""`python -m trainer.video_data FILE.csv [data.KEY=VALUE ...]`: lists each clip's size in training, and all problems.

Takes the data options of `trainer.main_reward_flow`. Exit status: 0 if every row can be used and all clips get one
size, else 1.
"""

import sys
from dataclasses import dataclass

from trainer.cli import WRONG_INPUT, command
from trainer.clips.dataset import Selection, VideoDataset
from verl_lite.config import ConfigError, help_config, load_schema
from verl_lite.config.checks import section_problems
from verl_lite.config.diffusion import VideoDataConfig
from verl_lite.config.fields import section
from verl_lite.errors import printable


@dataclass
class VideoReportConfig:
    """Options of the command, in addition to the csv files."""

    data: VideoDataConfig = section(VideoDataConfig, "clips and prompts, as for training")


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status. Raises UserError for invalid options or csv files."""
    if argv[:1] == ["--help-config"]:
        print(help_config(VideoReportConfig))
        return 0
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        print("usage: python -m trainer.video_data FILE.csv [data.KEY=VALUE ...]", file=sys.stderr)
        return WRONG_INPUT
    config = load_schema([item for item in argv if "=" in item], VideoReportConfig).config
    config.data.train_files = [*(item for item in argv if "=" not in item), *config.data.train_files]
    if problems := list(section_problems(config)):
        raise ConfigError(problems)
    data = VideoDataset(config.data)
    found = data.selections()
    print(f"{'row':>5}  {'file':<32}{'frames':>7}  {'size':<12}becomes")
    for row, taken in enumerate(found):
        columns = "cannot be used"
        if isinstance(taken, Selection):
            original, becomes = (f"{size.width} x {size.height}" for size in (taken.header, taken))
            columns = f"{taken.header.frames:>7}  {original:<12}{becomes}"
        print(printable(f"{row:>5}  {'/'.join(data.rows[row].path.parts[-2:]):<32}{columns}"))
    problems = data.problems(found)
    summary = f"{sum(isinstance(taken, Selection) for taken in found)} of {len(found)} rows can be used"
    print("", *map(printable, problems), summary, sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
