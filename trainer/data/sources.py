"""Data sources: files, folders of files, folders saved by `datasets`, datasets of the Hugging Face hub, or a class.

Opens each entry of data.train_files or data.val_files as a `RowTable`. If a source has several splits, the split named
after @ is used, else the split whose name fits the option. trainer/DATA.md lists the accepted entries. This module
parses json itself, because `datasets` converts the text "2024-05-01" to a date and, in columns with several types, the
text "1" to a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet
import torch
from transformers import PreTrainedTokenizerBase

from verl_lite.config import HUB_NAME, DataConfig
from verl_lite.errors import UserError
from verl_lite.registry import accepts, load_object

if TYPE_CHECKING:
    import datasets

SUFFIXES = (".parquet", ".json", ".jsonl")
SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("test", "validation", "val", "valid", "dev", "eval", "testing", "evaluation"),
}
"""Split names for an entry without @, in order of preference, by option."""

_SPLIT_WORD = re.compile(rf"(?<![a-z0-9])({'|'.join(name for names in SPLITS.values() for name in names)})(?![a-z0-9])")
MOST_LEVELS = 100
_DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json")


class RowTable:
    """The rows of one source. Rows of a file are in memory; rows of `datasets` stay on disk until they are read.

    path: the source, for messages. data_source: the data source of rows that have none themselves. columns: column
    names; for json sorted, else in the order of the file. media: columns whose declared type is image, video or audio.
    """

    def __init__(
        self, path: str, rows: list[dict[str, Any]] | pyarrow.Table | datasets.Dataset, data_source: str | None = None
    ) -> None:
        self.path, self.data_source, self._rows, self.media = path, data_source, rows, list[str]()
        if isinstance(rows, list):  # from json: rows may have different columns and types
            self.columns = sorted({name for row in rows for name in row})
            return
        self.columns = list(rows.column_names)
        if not isinstance(rows, pyarrow.Table):
            from datasets.features.features import require_decoding

            self.media = [name for name, feature in rows.features.items() if require_decoding(feature)]

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Returns the rows at these indices, in this order, with those of the given columns that they have."""
        rows = self._rows
        if isinstance(rows, list):
            return [{name: row[name] for name in columns if name in row} for row in map(rows.__getitem__, indices)]
        if isinstance(rows, pyarrow.Table):
            table = rows.select(list(columns)).take(pyarrow.array(indices, type=pyarrow.int64()))
        else:
            table = rows.with_format("arrow", columns=list(columns))[list(indices)]
        return table.to_pylist(maps_as_pydicts="lossy")


def open_sources(
    places: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, split: str
) -> list[RowTable]:
    """Opens each entry of data.train_files (split="train") or data.val_files ("val") without checking its rows.

    Raises UserError if a source does not exist or is unreadable.
    """
    if config.custom_cls.path is not None:
        return [_rows_of_class(places, config, tokenizer, split)]
    return [table for place in places for table in open_place(place, f"data.{split}_files", split)]


def read_rows(path: str, option: str) -> list[dict[str, Any]]:
    """Returns all rows of a file; see `read_data_file`."""
    table = read_data_file(path, option)
    return table.rows(range(len(table)), table.columns)


def read_data_file(path: str, option: str) -> RowTable:
    """Reads a parquet, json (a list of rows) or jsonl (one row per line) file. option: its key, for messages.

    Raises UserError if the file does not exist, is unreadable, or has another format.
    """
    file, where = Path(path).expanduser(), f"{option}={path!r}"
    if not file.is_file() or file.suffix not in SUFFIXES:
        found = "expected a file" if file.is_file() else f"no such file (looked for {file.absolute()}); expected a file"
        raise UserError(f"{where}: {found} named .parquet, .json or .jsonl")
    if file.suffix != ".parquet":
        return RowTable(path, _read_json(file, where))
    try:
        with pyarrow.parquet.ParquetFile(file) as reader:
            table = reader.read()
        table.validate(full=True)  # finds text that is not UTF-8 here instead of when a row is read
        if len(set(table.column_names)) < table.num_columns:
            raise pyarrow.ArrowInvalid(f"several columns have the same name: {', '.join(table.column_names)}")
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{where}: not a readable parquet file ({error})") from error
    return RowTable(path, table)


def _read_json(file: Path, where: str) -> list[dict[str, Any]]:
    try:
        text = file.read_bytes().decode("utf-8-sig")  # editors on Windows begin files with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: cannot be read ({error}); expected uncompressed json in UTF-8") from error
    if text.lstrip().startswith("["):
        rows = parse_json(text, where, "a row per line, or one list of rows")
    else:  # split, not splitlines, which would also split at U+2028 inside a string
        lines = enumerate(text.split("\n"), start=1)
        rows = [parse_json(line, f"{where}, line {number}", "a row per line") for number, line in lines if line.strip()]
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{where}: row {index} is {row!r:.100}, expected an object with named columns")
    return rows


def parse_json(text: str, where: str, expected: str) -> Any:
    """Parses a json text. Raises UserError, which contains `where` and `expected`, if the text is invalid or nested
    deeper than MOST_LEVELS."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError is also raised for a number with too many digits
        raise UserError(f"{where}: not valid json ({error}); expected {expected}") from error
    if text.count("{") + text.count("[") > MOST_LEVELS and is_nested_deeper(value, MOST_LEVELS):
        raise UserError(f"{where}: nested more than {MOST_LEVELS} levels deep; flatten it, or store it as a text")
    return value


def is_nested_deeper(value: Any, levels: int) -> bool:
    """Returns True if a mapping or list contains others over more than `levels` levels. Later stages copy and send
    values by recursion."""
    level = [value]
    for _ in range(levels):
        inner: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                inner += container.values()
            elif isinstance(container, list):
                inner += container
        level = [one for one in inner if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def open_place(text: str, option: str, split: str) -> list[RowTable]:
    """Opens one entry of an option, `base:config@split`, as one table per file. split: selects the default splits."""
    front, _, asked = text.partition("@")
    base, _, config = front.partition(":")
    if Path(text).expanduser().exists():  # a path may hold any character
        base, config, asked = text, "", ""
    place, where = Path(base).expanduser(), f"{option}={text!r}"
    wanted = (asked,) if asked else SPLITS[split]
    if place.is_dir() and ((place / "dataset_dict.json").is_file() or (place / "state.json").is_file()):
        return [RowTable(text, _load_saved(base, where, wanted))]
    if place.is_dir() and not config:
        return [read_data_file(str(file), option) for file in _files_of_split(place, where, wanted)]
    if place.is_dir():  # a copy of a hub repository, whose README lists the files of each config
        return [RowTable(text, _load_prepared(str(place), config, where, wanted))]
    if HUB_NAME.fullmatch(text) and place.suffix not in SUFFIXES:
        return [RowTable(text, _load_prepared(base, config or None, where, wanted), data_source=base)]
    return [read_data_file(text, option)]


def _files_of_split(folder: Path, where: str, wanted: Sequence[str]) -> list[Path]:
    """Returns the files of a folder, or of its subfolder `data`, that are named after a wanted split, or all files if
    none is named after a split."""
    by_split: dict[str, list[Path]] = {}
    for part in (folder, folder / "data"):
        for file in sorted(part.iterdir()) if part.is_dir() and not by_split else ():
            if file.suffix in SUFFIXES and file.name not in _DESCRIPTIONS and not file.name.startswith("."):
                word = _SPLIT_WORD.search(file.stem.lower())
                by_split.setdefault(word[1] if word else "", []).append(file)
    if not by_split:
        raise UserError(f"{where}: the folder {folder.absolute()} has no parquet, json or jsonl file")
    if list(by_split) == [""] and len(wanted) > 1:
        return by_split[""]
    if "" in by_split and len(by_split) > 1:
        raise UserError(
            f"{where}: some files of the folder are named after a split, but {by_split[''][0].name} is not; list the "
            "intended files instead of the folder"
        )
    return by_split[_choose_split(list(by_split), where, wanted)]


def _choose_split(known: Sequence[str], where: str, wanted: Sequence[str]) -> str:
    """Returns the first wanted split that exists. Raises UserError, which lists the existing splits, if none does."""
    if found := [name for name in wanted if name in known]:
        return found[0]
    raise UserError(
        f"{where}: no split called {' or '.join(wanted[:2])}; splits found: {', '.join(sorted(known)) or 'none'}. Add "
        "the split after an @, for example owner/name:config@split"
    )


def _load_saved(folder: str, where: str, wanted: Sequence[str]) -> datasets.Dataset:
    """Loads a dataset, or the wanted split of a `DatasetDict`, from a folder written by `save_to_disk`."""
    import datasets

    try:
        found = datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise UserError(f"{where}: not a readable folder of datasets.save_to_disk ({error})") from error
    if isinstance(found, datasets.DatasetDict):
        return found[_choose_split(list(found), where, wanted)]
    if len(wanted) == 1:
        raise UserError(f"{where}: the folder contains one dataset without splits; remove @{wanted[0]}")
    return found


def _load_prepared(name: str, config: str | None, where: str, wanted: Sequence[str]) -> datasets.Dataset:
    """Loads a dataset of the hub (without network, from the cache of `datasets`), or a copy of a hub repository."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(name, config)
        known = list(builder.info.splits or getattr(builder.config, "data_files", None) or [])
        split = _choose_split([str(name) for name in known], where, wanted)
        builder.download_and_prepare()
        return builder.as_dataset(split=split)
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{where}: not a file, and loading it from the Hugging Face hub or the cache "
            f"{datasets.config.HF_DATASETS_CACHE} failed ({type(error).__name__}: {error}). Add a config after a "
            f"colon: {name}:NAME. Without network, load the dataset on another machine and copy the cache, or write "
            f"it to a file: datasets.load_dataset({name!r}, split=SPLIT).to_parquet(FILE)"
        ) from error


def _rows_of_class(
    places: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str
) -> RowTable:
    """Returns the rows of data.custom_cls. The class is constructed with those of verl's arguments that it accepts."""
    custom = config.custom_cls
    made = load_object(custom.path or "", custom.name or "", "data.custom_cls.path", "data.custom_cls.name")
    most = config.train_max_samples if split == "train" else config.val_max_samples
    arguments: dict[str, Any] = {"data_files": list(places), "tokenizer": tokenizer, "processor": None}
    arguments |= {"config": config, "max_samples": most}
    rows = made(**{name: value for name, value in arguments.items() if accepts(made, name)})
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise UserError(f"data.custom_cls.name={custom.name}: expected a sequence of rows, found {type(rows).__name__}")
    name = f"{custom.name} of {custom.path}"
    found = [rows[index] for index in range(len(rows))]
    for index, row in enumerate(found):
        if isinstance(row, dict) and is_nested_deeper(row, MOST_LEVELS):
            raise UserError(f"data.custom_cls: row {index} of {name} is nested more than {MOST_LEVELS} levels deep")
        if not isinstance(row, dict) or any(isinstance(value, torch.Tensor) for value in row.values()):
            raise UserError(
                f"data.custom_cls: row {index} of {name} is {row!r:.100}, expected a dict of columns without tensors "
                '(tokens are computed later): {"data_source": "mine", "prompt": [{"role": "user", "content": "1+1="}]}'
            )
    return RowTable(name, found)
