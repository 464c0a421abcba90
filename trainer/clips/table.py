"""metadata.csv of clips: which file and which prompt a row names.

Takes the places of data.train_files or data.val_files; gives `VideoRow`s, whose files nobody has opened yet. All that
can be wrong with a csv is said here, with file and line.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    """One line of a csv. path: absolute. place: option, row, line and csv, for messages. extra: the columns beyond clip
    and prompt."""

    path: Path
    prompt: str
    place: str
    extra: dict[str, str] = field(default_factory=dict)


def read_tables(config: VideoDataConfig, split: str = "train") -> list[VideoRow]:
    """The rows of data.train_files, data.train_max_samples at most, or those of data.val_files (split="val").

    A folder stands for its metadata.csv. Raises UserError for a file that is not there, cannot be read as csv, lacks a
    column or has no rows, and for a row without clip or prompt.
    """
    option, places = (
        ("data.val_files", config.val_files) if split == "val" else ("data.train_files", config.train_files)
    )
    rows = [row for place in places for row in _read(_find(place, option), option, config)]
    return rows[: config.train_max_samples] if split == "train" and config.train_max_samples > 0 else rows


def _find(place: str, option: str) -> Path:
    given = Path(place).expanduser().absolute()
    file = given / TABLE_NAME if given.is_dir() else given
    if file.is_file():
        return file
    if given.is_dir():
        tables = sorted(path.name for path in given.glob("*.csv"))
        inside = f"it holds {', '.join(tables)}: name one of them" if tables else "nor any other csv file"
        raise UserError(f"{option}={place}: the folder {given} has no {TABLE_NAME}, {inside}")
    raise UserError(
        f"{option}={place}: there is no file {given}{nearest_file(given)}; give a csv file with the columns video and "
        "prompt, or its folder"
    )


def nearest_file(missing: Path) -> str:
    """`, did you mean NAME?` for the file beside a missing one that has nearly its name; else empty."""
    if not missing.parent.is_dir():
        return ""
    near = difflib.get_close_matches(missing.name, [path.name for path in missing.parent.iterdir()], n=1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def _read(file: Path, option: str, config: VideoDataConfig) -> list[VideoRow]:
    rows: list[VideoRow] = []
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines, restkey=_REST, strict=True)
            _check_columns(f"{option}: {file}", reader.fieldnames or [], config)
            for cells in reader:
                place = f"{option}: row {len(rows)} (line {reader.line_num}) of {file}"
                rows.append(_row(file.parent, place, cells, config))
    except UnicodeDecodeError as error:
        raise UserError(f"{option}: {file} is not UTF-8 text ({error}); save it as csv in UTF-8") from None
    except csv.Error as error:
        raise UserError(
            f"{option}: {file} is not csv after line {reader.line_num} ({error}); a text in double quotes ends with "
            "one, and those inside it are doubled"
        ) from None
    except OSError as error:
        raise UserError(f"{option}: {file} cannot be read ({error})") from None
    if not rows:
        raise UserError(f"{option}: {file} has a line of column names and no rows; expected at least one clip")
    return rows


def _check_columns(place: str, found: Sequence[str], config: VideoDataConfig) -> None:
    if not found:
        raise UserError(f"{place} is empty; its first line should be {config.video_key},{config.prompt_key}")
    for key in ("video_key", "prompt_key"):
        name = getattr(config, key)
        if name in found:
            continue
        start = f"{place} has no column {name!r} (data.{key}); its first line gives {', '.join(found)}"
        if len(found) == 1 and any(mark in found[0] for mark in ";\t"):
            raise UserError(f"{start}. Columns are separated by commas in a csv: save the file so")
        near = [column for column in found if column.strip().lower() in _SYNONYMS[key]]
        near += difflib.get_close_matches(name, found, n=1, cutoff=0.5)
        taken = config.prompt_key if key == "video_key" else config.video_key
        near = [column for column in near if column != taken]
        hint = f"Did you mean data.{key}={near[0]!r}? " if near else ""
        raise UserError(
            f"{start}. {hint}The first line should name the columns: {config.video_key},{config.prompt_key}"
        )
    doubled = next((name for name in found if found.count(name) > 1), None)
    if doubled is not None:
        raise UserError(f"{place} has the column {doubled!r} twice: rename one of them")


def _row(folder: Path, place: str, cells: dict[str, str | None], config: VideoDataConfig) -> VideoRow:
    columns = [name for name in cells if name != _REST]
    if _REST in cells or None in cells.values():
        given = sum(cells[name] is not None for name in columns) + len(cells.get(_REST) or ())
        raise UserError(
            f"{place} has {given} values for the {len(columns)} columns {', '.join(columns)}; a prompt with "
            'a comma is written in double quotes: a.mp4,"a cat, asleep"'
        )
    texts = {name: (cells[name] or "").strip() for name in columns}
    for key in (config.video_key, config.prompt_key):
        if not texts[key]:
            raise UserError(f"{place}: the column {key!r} is empty; remove the row or fill it in")
    path = folder / Path(texts.pop(config.video_key)).expanduser()
    return VideoRow(path, texts.pop(config.prompt_key), place, texts)
