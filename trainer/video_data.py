"""`python -m trainer.video_data FILE.csv [data.KEY=VALUE ...]`: what becomes of each clip, and what cannot be used.

Takes the data options of `trainer.main_reward_flow`; `decode=true` tries every frame, `out=FILE.csv` writes the rows
that can be used. Exit status: 0 if every row can be used and all come to one size, else 1.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from trainer.cli import WRONG_INPUT, command
from trainer.clips.dataset import Selection, VideoDataset
from trainer.clips.reading import ClipError
from trainer.console import Console
from verl_lite.config import ConfigError, help_config, load_schema
from verl_lite.config.checks import section_problems
from verl_lite.config.diffusion import VideoDataConfig
from verl_lite.config.fields import at_least, opt, section
from verl_lite.errors import UserError

USAGE = "usage: python -m trainer.video_data FILE.csv [data.KEY=VALUE ...] [decode=true] [out=USABLE.csv]"


@dataclass
class VideoReportConfig:
    """Options beside the file."""

    data: VideoDataConfig = section(VideoDataConfig, "clips and prompts, as for training")
    decode: bool = opt(False, "decode all frames that training would take, not only each clip's first")
    shown: int = opt(20, "clips to list; those that cannot be used are listed all", at_least(0))
    out: str | None = opt(None, "csv file to write, of the rows of train_files that can be used, with absolute paths")


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status. Raises UserError for options or csv files that cannot be used."""
    if argv[:1] == ["--help-config"]:
        print(help_config(VideoReportConfig))
        return 0
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        print(USAGE, file=sys.stderr)
        return WRONG_INPUT
    config = load_schema([item for item in argv if "=" in item], VideoReportConfig).config
    config.data.train_files = [*(item for item in argv if "=" not in item), *config.data.train_files]
    if problems := list(section_problems(config)):
        raise ConfigError(problems)
    out = None if config.out is None else Path(config.out).expanduser()
    if out is not None and out.exists():
        raise UserError(f"out={out}: the name of a new file is expected")
    data, console = VideoDataset(config.data), Console()
    found = data.selections(config.decode)
    console.print(table(data, found, config.shown))
    for row, taken in enumerate(found):
        if isinstance(taken, ClipError):
            console.print(data.sentence(row, taken))
    console.print(summary(data, found))
    if sizes := data.size_problem(found):
        console.note(sizes)
    usable = [row for row, taken in enumerate(found) if isinstance(taken, Selection)]
    if out is not None:
        written = write_usable(out, data, [row for row in usable if row < len(data)])
        console.print(f"{written} rows in {out}")
    return int(len(usable) < len(found) or sizes is not None)


def table(data: VideoDataset, found: Sequence[Selection | ClipError], shown: int) -> Table:
    """A line for each of the first `shown` clips and for each that cannot be used."""
    lines = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("row", "file", "frames", "per second", "size", "taken", "becomes"):
        is_text = title in ("file", "taken", "becomes")
        lines.add_column(title, justify="left" if is_text else "right", overflow="fold")
    for row, taken in enumerate(found):
        name = Text("/".join(data.rows[row].path.parts[-2:]))
        if isinstance(taken, ClipError):
            lines.add_row(str(row), name, "", "", "", "", Text("cannot be used", style="red"))
        elif row < shown:
            header, numbers = taken.header, taken.numbers
            rate = "" if header.rate is None else f"{header.rate:.4g}"
            listed = " ".join(map(str, numbers)) if len(numbers) < 6 else f"{numbers[0]} {numbers[1]} ... {numbers[-1]}"
            sizes = [f"{size.width} x {size.height}" for size in (header, taken)]
            lines.add_row(str(row), name, str(header.frames), rate, sizes[0], listed, sizes[1])
    return lines


def summary(data: VideoDataset, found: Sequence[Selection | ClipError]) -> str:
    """How many rows can be used, the steps of an epoch over those to train on, and the memory of the clips."""
    usable = [taken for taken in found if isinstance(taken, Selection)]
    trained = sum(isinstance(taken, Selection) for taken in found[: len(data)])
    config, line = data.config, f"{len(usable)} of {len(found)} rows can be used"
    if not trained:
        return line
    clip = max(len(taken.numbers) * taken.height * taken.width * 3 for taken in usable)
    steps = -(-trained * config.repeat // config.train_batch_size)
    samples = min(config.train_batch_size, trained * config.repeat)
    return (
        f"{line}: steps of an epoch {steps}, samples of a step {samples}\n"
        f"memory: {clip / 2**20:.1f} MiB a decoded clip, {len(usable) * clip / 2**30:.2f} GiB all of them "
        f"(kept: data.cache_gb={config.cache_gb:g}), {samples * clip * 4 / 2**20:.0f} MiB a batch"
    )


def write_usable(path: Path, data: VideoDataset, rows: Sequence[int]) -> int:
    """Writes a csv of these rows, with absolute paths; returns their number."""
    entries = [data.rows[row] for row in rows]
    extra = list(dict.fromkeys(name for entry in entries for name in entry.extra))
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow([data.config.video_key, data.config.prompt_key, *extra])
        lines.writerows([entry.path, entry.prompt, *(entry.extra.get(name, "") for name in extra)] for entry in entries)
    return len(rows)


if __name__ == "__main__":
    sys.exit(main())
