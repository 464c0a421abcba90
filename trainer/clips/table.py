"""metadata.csv of clips: which file and which prompt a row names, with a sentence for all that can be wrong with it."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.clips.reading import nearest_file
from verl_lite.config.diffusion import VideoDataConfig
from verl_lite.errors import UserError

TABLE_NAME = "metadata.csv"
_SYNONYMS = {
    "video_key": ("video", "video_path", "videos", "file_name", "file", "path", "clip"),
    "prompt_key": ("prompt", "text", "caption", "description"),
}
_REST = "\0rest"


@dataclass(frozen=True)
class VideoRow:
    """One line of a csv. path: absolute, not opened yet. place: option, row, line and csv, for messages. extra: further
    columns."""

    path: Path
    prompt: str
    place: str
    extra: dict[str, str] = field(default_factory=dict)


def read_tables(config: VideoDataConfig, split: str = "train") -> list[VideoRow]:
    """The rows of data.train_files, data.train_max_samples at most, or those of data.val_files (split="val").

    A folder stands for its metadata.csv. Raises UserError for a file or row that cannot be used.
    """
    option, places = f"data.{split}_files", config.train_files if split == "train" else config.val_files
    rows = [row for place in places for row in _read(_find(place, option), option, config)]
    return rows[: config.train_max_samples] if split == "train" and config.train_max_samples > 0 else rows


def _find(place: str, option: str) -> Path:
    given = Path(place).expanduser().absolute()
    file = given / TABLE_NAME if given.is_dir() else given
    if not file.is_file():
        raise UserError(
            f"{option}={place}: there is no file {file}{nearest_file(file)}; give a csv file with the columns video "
            f"and prompt, or a folder with such a {TABLE_NAME}"
        )
    return file


def _read(file: Path, option: str, config: VideoDataConfig) -> list[VideoRow]:
    rows: list[VideoRow] = []
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines, restkey=_REST, strict=True)
            _check_columns(f"{option}: {file}", reader.fieldnames or [], config)
            for cells in reader:
                place = f"{option}: row {len(rows)} (line {reader.line_num}) of {file}"
                rows.append(_row(file.parent, place, cells, config))
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise UserError(f"{option}: {file} cannot be read as csv in UTF-8 ({error})") from None
    if not rows:
        raise UserError(f"{option}: {file} has a line of column names and no rows; expected at least one clip")
    return rows


def _check_columns(place: str, found: Sequence[str], config: VideoDataConfig) -> None:
    expected = f"{config.video_key},{config.prompt_key}"
    if len(set(found)) < len(found):
        raise UserError(f"{place} names a column twice, in {', '.join(found)}: rename one of them")
    for key, synonyms in _SYNONYMS.items():
        name = getattr(config, key)
        if name in found:
            continue
        others = [column for column in found if column not in expected.split(",")]
        near = [column for column in others if column.strip().lower() in synonyms]
        near += difflib.get_close_matches(name, others, n=1, cutoff=0.5)
        hint = f"Did you mean data.{key}={near[0]!r}? " if near else ""
        raise UserError(
            f"{place} has no column {name!r} (data.{key}); its first line gives {', '.join(found) or 'nothing'}. "
            f"{hint}It should name the columns, separated by commas: {expected}"
        )


def _row(folder: Path, place: str, cells: dict[str, str | None], config: VideoDataConfig) -> VideoRow:
    if _REST in cells or None in cells.values():
        columns = [name for name in cells if name != _REST]
        given = sum(cells[name] is not None for name in columns) + len(cells.get(_REST) or ())
        raise UserError(
            f"{place} has {given} values for the {len(columns)} columns {', '.join(columns)}; a prompt with "
            'a comma is written in double quotes: a.mp4,"a cat, asleep"'
        )
    texts = {name: (text or "").strip() for name, text in cells.items()}
    for key in (config.video_key, config.prompt_key):
        if not texts[key]:
            raise UserError(f"{place}: the column {key!r} is empty; remove the row or fill it in")
    path = folder / Path(texts.pop(config.video_key)).expanduser()
    return VideoRow(path, texts.pop(config.prompt_key), place, texts)
