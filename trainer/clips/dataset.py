"""Clips and prompts for reward flow: metadata.csv -> checked clips -> the batch of each step, decoded ahead.

The noise of a sample is a function of the seed, the step and the row alone, as the rows of a step are (`EpochSteps`).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from trainer.clips.reading import ClipError, Frames, Header, choose_frames, fitted_size, read_frames, read_header
from trainer.clips.table import VideoRow, read_tables
from trainer.diffusion.loop import EpochSteps, fingerprint
from verl_lite.config.diffusion import VideoDataConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto

_SHOWN_PROBLEMS = 5
_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Clip:
    """video: uint8 (F, H, W, 3), not to be written to. row: in the dataset. extra: further columns of the csv."""

    video: Frames
    prompt: str
    row: int
    path: Path
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """What is taken of a file: the numbers of its frames, and the size that they are brought to."""

    header: Header
    numbers: list[int]
    height: int
    width: int


class VideoDataset:
    """The clips of data.train_files, by row, and after them those of data.val_files.

    Its length is the number of rows to train on. Decoded clips are kept until they take data.cache_gb; those that find
    no room are decoded again each time. May be read from several threads. Raises UserError for options or csv files
    that cannot be used.
    """

    def __init__(self, config: VideoDataConfig) -> None:
        if problems := list(config.check()):
            raise UserError("\n".join(problems))
        self.config = config
        trained = read_tables(config)
        self.rows: list[VideoRow] = trained + read_tables(config, "val")
        self._length = len(trained)
        self._selections: dict[Path, Selection] = {}
        self._cache: dict[Path, Frames] = {}
        self._cache_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._length

    @property
    def validation(self) -> range:
        """The rows of data.val_files, or where it is empty those of data.train_files."""
        return range(len(self) if self.config.val_files else 0, len(self.rows))

    def __getitem__(self, row: int) -> Clip:
        """Raises UserError for a file that cannot be decoded, and IndexError."""
        entry = self.rows[row]
        frames = self._cache.get(entry.path)
        if frames is None:
            try:
                frames = self.decode(row)
            except ClipError as error:
                raise UserError(self.sentence(row, error)) from error
            frames.setflags(write=False)
            with self._lock:
                if entry.path not in self._cache and self._cache_bytes + frames.nbytes <= self.config.cache_gb * 2**30:
                    self._cache[entry.path] = frames
                    self._cache_bytes += frames.nbytes
        return Clip(frames, entry.prompt, row % len(self.rows), entry.path, entry.extra)

    def decode(self, row: int) -> Frames:
        """The frames of a row, past the cache. Raises ClipError for a file that is no clip."""
        taken = self.selection(row)
        return read_frames(self.rows[row].path, taken.numbers, taken.height, taken.width)

    def selection(self, row: int) -> Selection:
        """What is taken of a row's file, from its header. Raises ClipError for one that is no clip."""
        path, config = self.rows[row].path, self.config
        if path not in self._selections:
            header = read_header(path)
            numbers = choose_frames(header, config.num_frames, config.fps)
            exact = None if config.height is None or config.width is None else (config.height, config.width)
            size = fitted_size(
                header.height, header.width, max_pixels=config.max_pixels, multiple=config.side_multiple, exact=exact
            )
            self._selections[path] = Selection(header, numbers, *size)
        return self._selections[path]

    def selections(self, decode: bool = False) -> list[Selection | ClipError]:
        """What is taken of every row, or what is wrong with it; with `decode` all frames are tried, not the first."""

        def look(row: int) -> Selection | ClipError:
            try:
                if decode:
                    self.decode(row)
                return self.selection(row)
            except ClipError as error:
                return error

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="video-check") as pool:
            return list(pool.map(look, range(len(self.rows))))

    def check(self) -> None:
        """Looks into every file. Raises UserError with the first few that cannot be used, or for clips of two sizes."""
        found = self.selections()
        problems = [self.sentence(row, taken) for row, taken in enumerate(found) if isinstance(taken, ClipError)]
        if len(problems) > _SHOWN_PROBLEMS:
            rest = f"... and {len(problems) - _SHOWN_PROBLEMS} more, of {len(self.rows)} rows."
            problems[_SHOWN_PROBLEMS:] = [f"{rest} `python -m trainer.video_data FILE.csv` lists all"]
        if problems := problems or list(filter(None, [self.size_problem(found)])):
            raise UserError("\n".join(problems))

    def size_problem(self, found: Sequence[Selection | ClipError]) -> str | None:
        """What is wrong where usable clips come to several sizes; None if they come to one."""
        sizes = {row: (taken.height, taken.width) for row, taken in enumerate(found) if isinstance(taken, Selection)}
        counted = Counter(sizes.values()).most_common()
        if len(counted) < 2:
            return None
        height, width = counted[0][0]
        odd = next(row for row, size in sizes.items() if size != (height, width))
        listed = ", ".join(f"{count} at {w} x {h}" for (h, w), count in counted[:_SHOWN_PROBLEMS])
        return (
            f"Clips come to {len(counted)} sizes (width x height) at data.max_pixels={self.config.max_pixels}: "
            f"{listed}; {self.rows[odd].place} is the first of another than the most frequent. All clips of a run have "
            f"one size: data.height={height} data.width={width} scales and crops them all to the most frequent one"
        )

    def sentence(self, row: int, error: Exception) -> str:
        """What is wrong with the file of a row, with its place."""
        return f"{self.rows[row].place}, {self.rows[row].path}: {error}"

    def fingerprint(self) -> str:
        """Changes with the rows to train on: their number, order and prompts, the names and sizes of their files."""
        rows = self.rows[: len(self)]
        sizes = [row.path.stat().st_size if row.path.is_file() else 0 for row in rows]
        return fingerprint(f"{row.path.name}\0{size}\0{row.prompt}" for row, size in zip(rows, sizes, strict=True))


def noise_seeds(step: int, rows: Sequence[int], seed: int, constant: int | None = None) -> list[int]:
    """A seed in [0, 2^63) for the noise of each sample, or `constant` for all.

    A hash of (seed, step, row, how often the row came before in the batch).
    """
    if constant is not None:
        return [constant] * len(rows)
    found, before = [], Counter[int]()
    for row in rows:
        text = f"{seed},{step},{row},{before[row]}"
        found.append(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1)
        before[row] += 1
    return found


def collate(clips: Sequence[Clip], noise_seeds: Sequence[int]) -> DataProto:
    """A batch of clips of one size.

    Returns:
        video (B, F, 3, H, W) float32 in [0, 1]; noise_seed and row (B,) int64; prompt and extra_info (B,).
    """
    frames, height, width, colours = clips[0].video.shape
    video = np.empty((len(clips), frames, colours, height, width), dtype=np.float32)
    for row, clip in enumerate(clips):
        for colour in range(colours):  # straight into place: a permuted copy of all takes twice the time and memory
            np.divide(clip.video[..., colour], np.float32(255.0), out=video[row, :, colour])
    columns = {
        "video": torch.from_numpy(video),
        "noise_seed": torch.tensor(list(noise_seeds), dtype=torch.int64),
        "row": torch.tensor([clip.row for clip in clips], dtype=torch.int64),
    }
    prompts, extra = np.empty(len(clips), dtype=object), np.empty(len(clips), dtype=object)
    prompts[:] = [clip.prompt for clip in clips]
    extra[:] = [clip.extra for clip in clips]
    return DataProto.from_dict(columns, non_tensors={"prompt": prompts, "extra_info": extra})


class VideoLoader:
    """The batch of each step, its clips decoded while the step before was trained; a context that ends the threads.

    noise_seed: sampler.noise_seed.
    """

    def __init__(self, data: VideoDataset, steps: EpochSteps, noise_seed: int | None) -> None:
        self.data, self.steps, self.noise_seed = data, steps, noise_seed
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="video-decode")
        self._coming: dict[int, dict[int, Future[Clip]]] = {}

    def __enter__(self) -> VideoLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def batch(self, step: int) -> DataProto:
        """The batch of a step, from 1, with meta_info["global_step"]; decoding of the next step's begins.

        Raises UserError for a file that cannot be decoded.
        """
        coming = self._coming.pop(step, None) or self._begin(step)
        self._coming = {step + 1: self._begin(step + 1)} if step < self.steps.total else {}
        rows = self.steps.rows_of(step)
        seeds = noise_seeds(step, rows, self.steps.seed, self.noise_seed)
        batch = collate([coming[row].result() for row in rows], seeds)
        batch.meta_info["global_step"] = step
        return batch

    def _begin(self, step: int) -> dict[int, Future[Clip]]:
        """By row: one that comes several times is decoded once."""
        return {row: self._pool.submit(self.data.__getitem__, row) for row in dict.fromkeys(self.steps.rows_of(step))}
