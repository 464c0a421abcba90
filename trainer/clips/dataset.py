"""Clips and prompts for reward flow: metadata.csv -> checked clips -> the batch of each step.

The noise of a sample is a function of the seed, the step and the row alone, as the rows of a step are (`EpochSteps`).
"""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import torch
from pyarrow.csv import ConvertOptions, ParseOptions, read_csv

from trainer.clips.reading import ClipError, Frames, Header, fitted_size, read_frames, read_header
from trainer.diffusion.loop import fingerprint
from trainer.steps import EpochSteps
from verl_lite.config.diffusion import VideoDataConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto

TABLE_NAME = "metadata.csv"
_SHOWN_PROBLEMS = 5
_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class VideoRow:
    """One line of a csv. path: absolute, not opened yet. place: option, csv and row, for messages."""

    path: Path
    prompt: str
    place: str


def read_tables(config: VideoDataConfig, split: str = "train") -> list[VideoRow]:
    """The rows of data.train_files, data.train_max_samples at most, or those of data.val_files (split="val").

    A folder stands for its metadata.csv. Raises UserError for a file or row that cannot be used.
    """
    option, rows = f"data.{split}_files", list[VideoRow]()
    names = [config.video_key, config.prompt_key]
    columns = ConvertOptions(include_columns=names, column_types=dict.fromkeys(names, pyarrow.string()))
    for place in config.train_files if split == "train" else config.val_files:
        given = Path(place).expanduser().absolute()
        file = given / TABLE_NAME if given.is_dir() else given
        try:
            table = read_csv(file, parse_options=ParseOptions(newlines_in_values=True), convert_options=columns)
        except (pyarrow.ArrowException, KeyError, OSError) as error:
            raise UserError(
                f"{option}: {file} cannot be read ({error}); expected csv in UTF-8 with the columns {names}, where a "
                'prompt with a comma is written in double quotes: a.mp4,"a cat, asleep"'
            ) from None
        for row in table.to_pylist():
            at = f"{option}: {file}, row {len(rows)}"
            path, prompt = (row[name].strip() for name in names)
            if not path or not prompt:
                raise UserError(f"{at}: the video or the prompt is empty; remove the row or fill it in")
            rows.append(VideoRow(file.parent / Path(path).expanduser(), prompt, at))
        if not table.num_rows:
            raise UserError(f"{option}: {file} has no rows; expected at least one clip")
    return rows[: config.train_max_samples] if split == "train" and config.train_max_samples > 0 else rows


@dataclass(frozen=True)
class Selection:
    """A file, and the size that its frames are brought to."""

    header: Header
    height: int
    width: int


class VideoDataset:
    """The clips of data.train_files, by row, and after them those of data.val_files.

    Its length is the number of rows to train on. May be read from several threads.

    Raises:
        UserError: options or csv files that cannot be used.
    """

    def __init__(self, config: VideoDataConfig) -> None:
        if problems := list(config.check()):
            raise UserError("\n".join(problems))
        self.config = config
        trained = read_tables(config)
        self.rows: list[VideoRow] = trained + read_tables(config, "val")
        self._length = len(trained)
        self._selections: dict[Path, Selection] = {}

    def __len__(self) -> int:
        return self._length

    @property
    def validation(self) -> range:
        """The rows of data.val_files, or where it is empty those of data.train_files."""
        return range(len(self) if self.config.val_files else 0, len(self.rows))

    def frames(self, row: int) -> Frames:
        """uint8 (F, H, W, 3). Raises UserError for a file that cannot be decoded."""
        try:
            taken = self.selection(row)
            return read_frames(self.rows[row].path, self.config.num_frames, taken.height, taken.width)
        except ClipError as error:
            raise UserError(self.sentence(row, error)) from error

    def batch(self, rows: Sequence[int], noise_seeds: Sequence[int]) -> DataProto:
        """video (B, F, 3, H, W) float32 in [0, 1]; noise_seed and row (B,) int64; prompt (B,).

        Raises UserError for a file that cannot be decoded.
        """
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="video-decode") as pool:
            clips = dict(zip(set(rows), pool.map(self.frames, set(rows)), strict=True))
        columns = {
            "video": torch.stack([torch.from_numpy(np.moveaxis(clips[row], 3, 1).copy()) for row in rows]) / 255,
            "noise_seed": torch.tensor(list(noise_seeds), dtype=torch.int64),
            "row": torch.tensor(list(rows), dtype=torch.int64),
        }
        prompts = np.array([self.rows[row].prompt for row in rows], dtype=object)
        return DataProto.from_dict(columns, non_tensors={"prompt": prompts})

    def selection(self, row: int) -> Selection:
        """What is taken of a row's file, from its header. Raises ClipError for one that is no clip."""
        path, config = self.rows[row].path, self.config
        if path not in self._selections:
            header = read_header(path)
            if header.frames < config.num_frames:
                raise ClipError(f"it has {header.frames} frames, and data.num_frames={config.num_frames}")
            high, wide = config.height, config.width
            if not high or not wide:
                limits = {"max_pixels": config.max_pixels, "multiple": config.side_multiple}
                high, wide = fitted_size(header.height, header.width, **limits)
            self._selections[path] = Selection(header, high, wide)
        return self._selections[path]

    def selections(self) -> list[Selection | ClipError]:
        """What is taken of every row, or what is wrong with it; of a file no more than the first frame is decoded."""

        def look(row: int) -> Selection | ClipError:
            try:
                return self.selection(row)
            except ClipError as error:
                return error

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="video-check") as pool:
            return list(pool.map(look, range(len(self.rows))))

    def check(self) -> None:
        """Looks into every file. Raises UserError with the first few that cannot be used, or for clips of two sizes."""
        problems = self.problems(self.selections())
        if len(problems) > _SHOWN_PROBLEMS:
            rest = f"... and {len(problems) - _SHOWN_PROBLEMS} more, of {len(self.rows)} rows."
            problems[_SHOWN_PROBLEMS:] = [f"{rest} `python -m trainer.video_data FILE.csv` lists all"]
        if problems:
            raise UserError("\n".join(problems))

    def problems(self, found: Sequence[Selection | ClipError]) -> list[str]:
        """A sentence for each row that cannot be used; where all can, one if they come to several sizes."""
        if broken := [self.sentence(row, taken) for row, taken in enumerate(found) if isinstance(taken, ClipError)]:
            return broken
        sizes = [(taken.height, taken.width) for taken in found if isinstance(taken, Selection)]
        counted = Counter(sizes).most_common()
        if len(counted) == 1:
            return []
        height, width = counted[0][0]
        odd = next(row for row, size in enumerate(sizes) if size != (height, width))
        listed = ", ".join(f"{count} at {w} x {h}" for (h, w), count in counted[:_SHOWN_PROBLEMS])
        return [
            f"Clips come to {len(counted)} sizes (width x height) at data.max_pixels={self.config.max_pixels}: "
            f"{listed}; {self.rows[odd].place} is the first of another than the most frequent. All clips of a run have "
            f"one size: data.height={height} data.width={width} scales and crops them all to the most frequent one"
        ]

    def sentence(self, row: int, error: Exception) -> str:
        """What is wrong with the file of a row, with its place."""
        return f"{self.rows[row].place}, {self.rows[row].path}: {error}"

    def fingerprint(self) -> str:
        """Changes with the rows to train on: their number, order and prompts, the names and sizes of their files."""
        rows = self.rows[: len(self)]
        sizes = [row.path.stat().st_size if row.path.is_file() else 0 for row in rows]
        return fingerprint(f"{row.path.name}\0{size}\0{row.prompt}" for row, size in zip(rows, sizes, strict=True))


def noise_seeds(step: int, rows: Sequence[int], seed: int, constant: int | None = None) -> list[int]:
    """A seed in [0, 2^63) for the noise of each sample: a hash of (seed, step, row, how often the row came before in
    the batch); or `constant` for all."""
    if constant is not None:
        return [constant] * len(rows)
    found = []
    for place, row in enumerate(rows):
        text = f"{seed},{step},{row},{rows[:place].count(row)}"
        found.append(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1)
    return found


def batch_of_step(data: VideoDataset, steps: EpochSteps, step: int, noise_seed: int | None) -> DataProto:
    """The batch of a step, from 1, with meta_info["global_step"]. noise_seed: sampler.noise_seed.

    Raises UserError for a file that cannot be decoded.
    """
    rows = steps.rows_of(step)
    batch = data.batch(rows, noise_seeds(step, rows, steps.seed, noise_seed))
    batch.meta_info["global_step"] = step
    return batch
