"""What `python -m trainer.video_data FILE.csv` prints: each clip, what becomes of it, and what cannot be used.

Takes the data options of a training, given as for it; gives a table, the sizes and the memory of clips, and with
out=FILE.csv a csv of the rows that can be used.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from trainer.clips.reading import ClipError, read_frames
from trainer.console import Console
from trainer.video_data import Plan, VideoDataset, steps_per_epoch
from verl_lite.config import ConfigError, at_least, help_config, load_schema, opt, section
from verl_lite.config.checks import ranges
from verl_lite.config.diffusion import VideoDataConfig
from verl_lite.errors import UserError

USAGE = "usage: python -m trainer.video_data FILE.csv [data.KEY=VALUE ...] [decode=true] [out=USABLE.csv]"


@dataclass
class VideoReportConfig:
    """Options beside the file."""

    data: VideoDataConfig = section(VideoDataConfig, "clips and prompts, as for training")
    decode: bool = opt(False, "decode all frames that training would take, not only each clip's first")
    shown: int = opt(20, "clips to list; those that cannot be used are listed all", at_least(0))
    out: str | None = opt(None, "csv file to write, of the rows of train_files that can be used, with absolute paths")


def show(argv: Sequence[str]) -> int:
    """The whole command; 0 if every row can be used and all come to one size, else 1. Raises UserError for options or
    csv files that cannot be used."""
    if argv[0] == "--help-config":
        print(help_config(VideoReportConfig))
        return 0
    places = [item for item in argv if "=" not in item]
    config = load_schema([item for item in argv if "=" in item], VideoReportConfig).config
    config.data.train_files = [*places, *config.data.train_files]
    if problems := list(ranges(config)):
        raise ConfigError(problems)
    if config.out is not None and Path(config.out).expanduser().exists():
        raise UserError(f"out={config.out}: the name of a new file is expected")
    data, console = VideoDataset(config.data), Console()
    plans = [_decoded(data, row, plan) if config.decode else plan for row, plan in enumerate(data.plans())]
    usable = [row for row, plan in enumerate(plans) if isinstance(plan, Plan)]
    console.print(table(data, plans, config.shown))
    for row, plan in enumerate(plans):
        if isinstance(plan, ClipError):
            console.print(data.sentence(row, plan))
    for line in summary(data, plans):
        console.print(line)
    sizes = data.size_problem(plans)
    if sizes:
        console.note(sizes)
    if config.out is not None:
        rows = [row for row in usable if row < len(data)]
        console.print(f"{write_usable(Path(config.out).expanduser(), data, rows)} rows in {config.out}")
    return int(len(usable) < len(plans) or sizes is not None)


def table(data: VideoDataset, plans: Sequence[Plan | ClipError], shown: int) -> Table:
    """A line for each of the first `shown` clips and for each that cannot be used."""
    lines = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("row", "file", "frames", "per second", "size", "taken", "becomes"):
        is_text = name in ("file", "taken", "becomes")
        lines.add_column(name, justify="left" if is_text else "right", overflow="fold")
    listed = 0
    for row, plan in enumerate(plans):
        name = "/".join(data.rows[row].path.parts[-2:])
        if isinstance(plan, ClipError):
            lines.add_row(str(row), Text(name), "", "", "", "", Text("cannot be used", style="red"))
        elif listed < shown:
            listed += 1
            header = plan.header
            count = f"{header.frames}{'' if header.is_whole else ' +'}"
            rate = "" if header.rate is None else f"{header.rate:.4g}"
            size, becomes = f"{header.width} x {header.height}", f"{plan.width} x {plan.height}"
            lines.add_row(str(row), Text(name), count, rate, size, _taken(plan.numbers), becomes)
    return lines


def summary(data: VideoDataset, plans: Sequence[Plan | ClipError]) -> list[str]:
    """How many rows can be used, the steps of an epoch over those to train on, and the memory of the clips."""
    usable = [plan for plan in plans if isinstance(plan, Plan)]
    trained = sum(isinstance(plan, Plan) for plan in plans[: len(data)])
    config = data.config
    lines = [f"{len(usable)} of {len(plans)} rows can be used"]
    if not trained:
        return lines
    clip = max(len(plan.numbers) * plan.height * plan.width * 3 for plan in usable)
    samples = min(config.train_batch_size, trained * config.repeat)
    steps = steps_per_epoch(trained, config)
    lines[0] += f": an epoch has {steps} step{'s' * (steps != 1)} of {samples} sample{'s' * (samples != 1)}"
    lines.append(
        f"memory: {clip / 2**20:.1f} MiB a decoded clip, {len(usable) * clip / 2**30:.2f} GiB all of them "
        f"(kept: data.cache_gb={config.cache_gb:g}), {samples * clip * 4 / 2**20:.0f} MiB a batch"
    )
    return lines


def write_usable(path: Path, data: VideoDataset, rows: Sequence[int]) -> int:
    """Writes a csv of these rows, with absolute paths; their number."""
    entries = [data.rows[row] for row in rows]
    extra = list(dict.fromkeys(name for entry in entries for name in entry.extra))
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow([data.config.video_key, data.config.prompt_key, *extra])
        lines.writerows([entry.path, entry.prompt, *(entry.extra.get(name, "") for name in extra)] for entry in entries)
    return len(rows)


def _decoded(data: VideoDataset, row: int, plan: Plan | ClipError) -> Plan | ClipError:
    """The plan, if the frames that it takes can be decoded."""
    if isinstance(plan, ClipError):
        return plan
    try:
        read_frames(data.rows[row].path, plan.numbers, plan.height, plan.width)
    except ClipError as error:
        return error
    return plan


def _taken(numbers: Sequence[int]) -> str:
    """`0 ... 16`, or with gaps `0 2 3 5 ... 24`."""
    if list(numbers) == list(range(len(numbers))):
        return "0" if len(numbers) == 1 else f"0 ... {numbers[-1]}"
    return f"{' '.join(map(str, numbers[:4]))} ... {numbers[-1]}" if len(numbers) > 5 else " ".join(map(str, numbers))
