"""The data of reward flow: reads metadata.csv, checks the clips and builds the batch of each step.

The noise of a sample depends only on the seed, the step and the row. The rows of a step depend only on the seed and the
step (`EpochSteps`).
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

from trainer.diffusion.clips.reading import ClipError, Frames, Header, fitted_size, read_frames, read_header
from trainer.diffusion.loop import fingerprint
from trainer.loop.steps import EpochSteps
from verl_lite.config.diffusion import VideoDataConfig
from verl_lite.errors import UserError, printable
from verl_lite.protocol import DataProto

TABLE_NAME = "metadata.csv"
_SHOWN_PROBLEMS = 5
_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class VideoRow:
    """One row of a csv file.

    Attributes:
        path: absolute path of the clip.
        prompt: the prompt.
        place: option, csv file and row, for messages.
    """

    path: Path
    prompt: str
    place: str


def read_tables(config: VideoDataConfig, split: str = "train") -> list[VideoRow]:
    """Reads the rows of data.train_files (at most data.train_max_samples), or of data.val_files with split="val".

    A folder means its metadata.csv.

    Raises:
        UserError: a file cannot be read, or a row is incomplete.
    """
    option = f"data.{split}_files"
    files = config.train_files if split == "train" else config.val_files
    rows: list[VideoRow] = []
    for name in files:
        file = Path(name).expanduser().absolute()
        if file.is_dir():
            file /= TABLE_NAME
        table = _read_csv(file, [config.video_key, config.prompt_key], option)
        if not table.num_rows:
            raise UserError(f"{option}: {file} has no rows; expected at least one clip")
        for row_number, entries in enumerate(table.to_pylist()):
            location = f"{option}: {file}, row {row_number}"
            name_of_clip = entries[config.video_key].strip()
            prompt = entries[config.prompt_key].strip()
            if not name_of_clip or not prompt:
                raise UserError(f"{location}: the video or the prompt is empty; remove the row or fill it in")
            # an absolute path stays as it is
            path = file.parent / Path(name_of_clip).expanduser()
            rows.append(VideoRow(path, prompt, location))

    if split == "train" and config.train_max_samples > 0:
        return rows[: config.train_max_samples]
    return rows


def _read_csv(file: Path, columns: list[str], option: str) -> pyarrow.Table:
    """Reads these columns of a csv file as texts. Raises UserError, which names `option`, if that is impossible."""
    # without a type, pyarrow would read a column of numbers as numbers
    types = dict.fromkeys(columns, pyarrow.string())
    conversion = ConvertOptions(include_columns=columns, column_types=types)
    # a prompt in double quotes can have several lines
    parsing = ParseOptions(newlines_in_values=True)
    try:
        return read_csv(file, parse_options=parsing, convert_options=conversion)
    except (pyarrow.ArrowException, KeyError, OSError) as error:
        raise UserError(
            f"{option}: {file} cannot be read ({error}); expected csv in UTF-8 with the columns {columns}, where a "
            'prompt with a comma is written in double quotes: a.mp4,"a cat, asleep"'
        ) from None


@dataclass(frozen=True)
class Selection:
    """The header of a clip's file, and the height and width of its frames in training."""

    header: Header
    height: int
    width: int


class VideoDataset:
    """The clips of data.train_files followed by those of data.val_files, indexed by row.

    Its length is the number of training rows. Several threads may read it at the same time.

    Raises:
        UserError: invalid options or csv files.
    """

    def __init__(self, config: VideoDataConfig) -> None:
        problems = list(config.check())
        if problems:
            raise UserError("\n".join(problems))
        self.config = config
        training_rows = read_tables(config)
        self.rows: list[VideoRow] = training_rows + read_tables(config, "val")
        self._length = len(training_rows)
        self._selections: dict[Path, Selection] = {}

    def __len__(self) -> int:
        return self._length

    @property
    def validation(self) -> range:
        """The rows of data.val_files, or those of data.train_files if data.val_files is empty."""
        first = len(self) if self.config.val_files else 0
        return range(first, len(self.rows))

    def frames(self, row: int) -> Frames:
        """Decodes the frames of a row, uint8 (F, H, W, 3). Raises UserError for a file that cannot be decoded."""
        path = self.rows[row].path
        try:
            selection = self.selection(row)
            return read_frames(path, self.config.num_frames, selection.height, selection.width)
        except ClipError as error:
            # a ClipError says what is wrong with the file, and the row says which file
            raise UserError(self.sentence(row, error)) from error

    def batch(self, rows: Sequence[int], noise_seeds: Sequence[int]) -> DataProto:
        """Returns video (B, F, 3, H, W) float32 in [0, 1], noise_seed and row (B,) int64, and prompt (B,).

        Raises:
            UserError: a file cannot be decoded.
        """
        # a batch can contain a row several times
        distinct_rows = list(set(rows))
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="video-decode") as pool:
            decoded = pool.map(self.frames, distinct_rows)
            clips = dict(zip(distinct_rows, decoded, strict=True))
        videos = []
        for row in rows:
            channels_first = np.moveaxis(clips[row], 3, 1)
            video = torch.from_numpy(channels_first.copy())
            videos.append(video)
        columns = {
            "video": torch.stack(videos) / 255,
            "noise_seed": torch.tensor(list(noise_seeds), dtype=torch.int64),
            "row": torch.tensor(list(rows), dtype=torch.int64),
        }
        prompts = [self.rows[row].prompt for row in rows]
        prompt_column = np.array(prompts, dtype=object)
        return DataProto.from_dict(columns, non_tensors={"prompt": prompt_column})

    def selection(self, row: int) -> Selection:
        """Reads the header of a row's file and computes its frame size. Raises ClipError for an invalid clip."""
        path = self.rows[row].path
        if path in self._selections:
            return self._selections[path]

        config = self.config
        header = read_header(path)
        if header.frames < config.num_frames:
            raise ClipError(f"it has {header.frames} frames, and data.num_frames={config.num_frames}")
        # without a configured size, the clip keeps its proportions as far as the multiple allows
        height = config.height
        width = config.width
        if not height or not width:
            height, width = fitted_size(
                header.height, header.width, max_pixels=config.max_pixels, multiple=config.side_multiple
            )
        self._selections[path] = Selection(header, height, width)
        return self._selections[path]

    def selections(self) -> list[Selection | ClipError]:
        """Returns each row's `selection`, or the ClipError that it raised. Decodes only one frame of each file."""

        def select(row: int) -> Selection | ClipError:
            try:
                return self.selection(row)
            except ClipError as error:
                return error

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="video-check") as pool:
            return list(pool.map(select, range(len(self.rows))))

    def check(self, list_all: bool = False) -> None:
        """Checks all files.

        Args:
            list_all: Whether the error lists every invalid row instead of the first few.

        Raises:
            UserError: a file cannot be used, or the clips have several sizes.
        """
        problems = self.problems(self.selections())
        if len(problems) > _SHOWN_PROBLEMS and not list_all:
            more = len(problems) - _SHOWN_PROBLEMS
            problems = problems[:_SHOWN_PROBLEMS]
            problems.append(f"... and {more} more, of {len(self.rows)} rows; trainer.dry_run=true lists all")
        if problems:
            raise UserError("\n".join(problems))

    def table(self) -> str:
        """Returns a table of all clips with their number of frames, their size, and their size in training.

        Raises:
            ClipError: a clip is invalid; `check` reports it with its row.
        """
        lines = [f"{'row':>5}  {'file':<32}{'frames':>7}  {'size':<12}in training"]
        for number, row in enumerate(self.rows):
            selection = self.selection(number)
            header = selection.header
            name = "/".join(row.path.parts[-2:])
            size = f"{header.width} x {header.height}"
            in_training = f"{selection.width} x {selection.height}"
            lines.append(f"{number:>5}  {name:<32}{header.frames:>7}  {size:<12}{in_training}")
        return printable("\n".join(lines))

    def problems(self, selections: Sequence[Selection | ClipError]) -> list[str]:
        """Returns one message per invalid row, or a single message if all rows are valid but their sizes differ."""
        # sizes are compared only if every clip has one
        sentences = []
        sizes = []
        for row, selection in enumerate(selections):
            if isinstance(selection, ClipError):
                sentences.append(self.sentence(row, selection))
            else:
                sizes.append((selection.height, selection.width))
        if sentences:
            return sentences

        counts = Counter(sizes).most_common()
        if len(counts) == 1:
            return []
        most_frequent, _ = counts[0]
        height, width = most_frequent
        other_row = 0
        while sizes[other_row] == most_frequent:
            other_row += 1
        descriptions = []
        for (clip_height, clip_width), count in counts[:_SHOWN_PROBLEMS]:
            descriptions.append(f"{count} at {clip_width} x {clip_height}")
        listed = ", ".join(descriptions)
        return [
            f"The clips have {len(counts)} sizes (width x height) at data.max_pixels={self.config.max_pixels}: "
            f"{listed}; the first clip without the most frequent size is {self.rows[other_row].place}. All clips of a "
            f"run need one size: data.height={height} data.width={width} scales and crops them to the most frequent one"
        ]

    def sentence(self, row: int, error: Exception) -> str:
        """Returns the message of `error` with the row's place and path."""
        return f"{self.rows[row].place}, {self.rows[row].path}: {error}"

    def fingerprint(self) -> str:
        """Returns a hash of the training rows: their number, order, prompts, and the names and sizes of their files."""
        entries = []
        for row in self.rows[: len(self)]:
            # 0 for a folder of pictures
            size = row.path.stat().st_size if row.path.is_file() else 0
            entries.append(f"{row.path.name}\0{size}\0{row.prompt}")
        return fingerprint(entries)


def noise_seeds(step: int, rows: Sequence[int], seed: int, constant: int | None = None) -> list[int]:
    """Returns the noise seed of each sample, in [0, 2^63), or `constant` for all samples.

    A seed is a hash of (seed, step, row, number of earlier occurrences of the row in the batch).
    """
    if constant is not None:
        return [constant] * len(rows)
    seeds = []
    for index, row in enumerate(rows):
        # a row that occurs again in the batch gets other noise
        earlier = rows[:index].count(row)
        text = f"{seed},{step},{row},{earlier}"
        digest = hashlib.blake2b(text.encode(), digest_size=8)
        number = int.from_bytes(digest.digest(), "little")
        # the shift makes it fit into int64
        seeds.append(number >> 1)
    return seeds


def batch_of_step(data: VideoDataset, steps: EpochSteps, step: int, noise_seed: int | None) -> DataProto:
    """Returns the batch of a step, with meta_info["global_step"].

    Args:
        data: the clips.
        steps: chooses the rows of a step.
        step: number of the step, from 1.
        noise_seed: value of sampler.noise_seed.

    Raises:
        UserError: a file cannot be decoded.
    """
    rows = steps.rows_of(step)
    seeds = noise_seeds(step, rows, steps.seed, noise_seed)
    batch = data.batch(rows, seeds)
    batch.meta_info["global_step"] = step
    return batch
