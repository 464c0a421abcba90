"""`python -m trainer.video_data FILE.csv [data.KEY=VALUE ...]`: what becomes of each clip, and what cannot be used.

Takes the data options of `trainer.main_reward_flow`; `decode=true` tries every frame. Exit status: 0 if every row can
be used and all come to one size, else 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.cli import WRONG_INPUT, command
from trainer.clips.dataset import Selection, VideoDataset
from trainer.clips.reading import ClipError
from verl_lite.config import ConfigError, help_config, load_schema
from verl_lite.config.checks import section_problems
from verl_lite.config.diffusion import VideoDataConfig
from verl_lite.config.fields import opt, section


@dataclass
class VideoReportConfig:
    """Options beside the file."""

    data: VideoDataConfig = section(VideoDataConfig, "clips and prompts, as for training")
    decode: bool = opt(False, "decode all frames that training would take, not only each clip's first")


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status. Raises UserError for options or csv files that cannot be used."""
    if argv[:1] == ["--help-config"]:
        print(help_config(VideoReportConfig))
        return 0
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        print("usage: python -m trainer.video_data FILE.csv [data.KEY=VALUE ...] [decode=true]", file=sys.stderr)
        return WRONG_INPUT
    config = load_schema([item for item in argv if "=" in item], VideoReportConfig).config
    config.data.train_files = [*(item for item in argv if "=" not in item), *config.data.train_files]
    if problems := list(section_problems(config)):
        raise ConfigError(problems)
    data = VideoDataset(config.data)
    found = data.selections(config.decode)
    print(f"{'row':>5}  {'file':<32}{'frames':>7}{'a second':>10}  {'size':<12}{'taken':<18}becomes")
    for row, taken in enumerate(found):
        print(f"{row:>5}  {'/'.join(data.rows[row].path.parts[-2:]):<32}{described(taken)}")
    problems = data.problems(found)
    print("", *problems, summary(data, found), sep="\n")
    return int(bool(problems))


def described(taken: Selection | ClipError) -> str:
    """What a clip has, what is taken of it, and the size it comes to."""
    if isinstance(taken, ClipError):
        return "cannot be used"
    header, numbers = taken.header, taken.numbers
    rate = "" if header.rate is None else f"{header.rate:.4g}"
    listed = " ".join(map(str, numbers)) if len(numbers) < 6 else f"{numbers[0]} {numbers[1]} ... {numbers[-1]}"
    sizes = [f"{size.width} x {size.height}" for size in (header, taken)]
    return f"{header.frames:>7}{rate:>10}  {sizes[0]:<12}{listed:<18}{sizes[1]}"


def summary(data: VideoDataset, found: Sequence[Selection | ClipError]) -> str:
    """How many rows can be used, the steps of an epoch over those to train on, and the memory of the clips."""
    usable = [taken for taken in found if isinstance(taken, Selection)]
    line = f"{len(usable)} of {len(found)} rows can be used"
    if not usable:
        return line
    trained, batch = len(data) * data.config.repeat, data.config.train_batch_size
    clip = max(len(taken.numbers) * taken.height * taken.width * 3 for taken in usable)
    return (
        f"{line}: steps of an epoch {-(-trained // batch)}, samples of a step {min(batch, trained)}\n"
        f"memory: {clip / 2**20:.1f} MiB a decoded clip, "
        f"{min(batch, trained) * clip * 4 / 2**20:.0f} MiB a batch"
    )


if __name__ == "__main__":
    sys.exit(main())
