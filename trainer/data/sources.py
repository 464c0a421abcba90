"""Data sources: files, folders of files, folders saved by `datasets`, datasets of the Hugging Face hub, or a class.

Opens each entry of data.train_files or data.val_files as a `RowTable`. If a source has several splits, the split named
after @ is used, else the split whose name fits the option. trainer/DATA.md lists the accepted entries. This module
parses json itself, because `datasets` converts the text "2024-05-01" to a date and, in columns with several types, the
text "1" to a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow
import pyarrow.parquet
import torch
from transformers import PreTrainedTokenizerBase

from verl_lite.config import HUB_NAME, DataConfig
from verl_lite.errors import UserError
from verl_lite.json_types import DatasetRow
from verl_lite.registry import accepts, load_object

if TYPE_CHECKING:
    import datasets

SUFFIXES = (".parquet", ".json", ".jsonl")
SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("test", "validation", "val", "valid", "dev", "eval", "testing", "evaluation"),
}
"""Split names for an entry without @, in order of preference, by option."""

# a split name as a word of its own: "train-00000.parquet", but neither "trainer" nor "contest"
_SPLIT_WORD = re.compile(rf"(?<![a-z0-9])({'|'.join(SPLITS['train'] + SPLITS['val'])})(?![a-z0-9])")
_ROWS_PER_BATCH = 256  # of parquet; a batch of texts of 8 MiB is still below the 2 GiB of an array
MOST_LEVELS = 100  # of nesting; far below Python's recursion limit of 1,000
_DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json")  # written by `datasets` next to data files

Row = DatasetRow
"""A row of a source as it was read: its columns can hold anything."""
Rows: TypeAlias = "list[Row] | pyarrow.Table | datasets.Dataset"


class RowTable:
    """The rows of one source. Rows of a file are in memory; rows of `datasets` stay on disk until they are read.

    Attributes:
        path: The source, for messages.
        data_source: The data source of rows that have none themselves.
        columns: Column names; for json sorted, else in the order of the file.
        media: Columns whose declared type is image, video or audio.
    """

    def __init__(self, path: str, rows: Rows, data_source: str | None = None) -> None:
        self.path = path
        self.data_source = data_source
        self._rows = rows
        self.media: list[str] = []
        # from json, whose rows may have different columns and types
        if isinstance(rows, list):
            names: set[str] = set()
            for row in rows:
                names.update(row)
            self.columns = sorted(names)
            return

        self.columns = list(rows.column_names)
        if not isinstance(rows, pyarrow.Table):
            from datasets.features.features import require_decoding

            for name, feature in rows.features.items():
                if require_decoding(feature):
                    self.media.append(name)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """Returns rows as Python objects.

        Args:
            indices: Numbers of the rows, in the order of the result.
            columns: Names of columns of the table. A row from json has only those of them that it has itself.
        """
        rows = self._rows
        if isinstance(rows, list):
            return [_with_columns(rows[index], columns) for index in indices]

        if not isinstance(rows, pyarrow.Table):
            # in arrow format, because `datasets` would decode images to PIL
            arrow_rows = rows.with_format("arrow", columns=list(columns))
            return self._python_rows(arrow_rows[list(indices)])

        # Slices, not `take`: that joins all texts of a column first, which fails above 2 GiB, and cannot read the
        # texts of Polars (string_view).
        table = rows.select(list(columns))
        python_rows: list[Row] = []
        for first, count in _runs(indices):
            python_rows += self._python_rows(table.slice(first, count))
        return python_rows

    def _python_rows(self, table: pyarrow.Table) -> list[Row]:
        """Returns all rows of a table as Python objects. Raises UserError for a value that Python does not have."""
        try:
            # "lossy": of a key that occurs twice in a map, the last value is used
            return table.to_pylist(maps_as_pydicts="lossy")
        # such as a date after the year 9999
        except (OverflowError, ValueError) as error:
            for name in table.column_names:
                if not _has_python_values(table.column(name)):
                    raise UserError(
                        f"{self.path}, column {name!r}: a value of type {table.schema.field(name).type} cannot be read "
                        f"({error}); write the column as text, or leave it out"
                    ) from error
            raise


def _has_python_values(column: pyarrow.ChunkedArray) -> bool:
    """Returns True if all values of a column can be converted to Python objects."""
    try:
        column.to_pylist(maps_as_pydicts="lossy")
    except (OverflowError, ValueError):
        return False
    return True


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the runs of consecutive indices: the first index and the length of each, in their order."""
    first = 0
    count = 0
    for index in indices:
        if count and index == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first = index
        count = 1
    if count:
        yield first, count


def _with_columns(row: Row, columns: Sequence[str]) -> Row:
    """Returns a row without all other columns. Columns that the row lacks are left out."""
    return {name: row[name] for name in columns if name in row}


def open_sources(
    entries: Sequence[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str,
) -> list[RowTable]:
    """Opens the entries of an option without checking their rows.

    Args:
        entries: The entries of data.train_files (split="train") or data.val_files (split="val").
        config: Options of the data. With data.custom_cls, that class gets all entries.
        tokenizer: The tokenizer, for data.custom_cls.
        split: "train" or "val".

    Raises:
        UserError: If a source does not exist or is unreadable.
    """
    if config.custom_cls.path is not None:
        return [_rows_of_class(entries, config, tokenizer, split)]
    tables: list[RowTable] = []
    for entry in entries:
        tables += open_place(entry, f"data.{split}_files", split)
    return tables


def read_rows(path: str, option: str) -> list[Row]:
    """Returns all rows of a file; see `read_data_file`."""
    table = read_data_file(path, option)
    all_rows = range(len(table))
    return table.rows(all_rows, table.columns)


def read_data_file(path: str, option: str) -> RowTable:
    """Reads a parquet, json (a list of rows) or jsonl (one row per line) file.

    Args:
        path: Path of the file.
        option: Key of the option that names the file, for messages.

    Raises:
        UserError: If the file does not exist, is unreadable, or has another format.
    """
    file = Path(path).expanduser()
    where = f"{option}={path!r}"
    if not file.is_file():
        raise UserError(
            f"{where}: no such file (looked for {file.absolute()}); expected a file named .parquet, .json or .jsonl"
        )
    if file.suffix not in SUFFIXES:
        raise UserError(f"{where}: expected a file named .parquet, .json or .jsonl")
    if file.suffix != ".parquet":
        return RowTable(path, _read_json(file, where))

    try:
        with pyarrow.parquet.ParquetFile(file) as reader:
            # in batches: `read` converts the texts inside lists of a whole row group at once, which fails above 2 GiB
            batches = reader.iter_batches(batch_size=_ROWS_PER_BATCH)
            table = pyarrow.Table.from_batches(batches, schema=reader.schema_arrow)
        # finds text that is not UTF-8 here instead of when a row is read
        table.validate(full=True)
        distinct_names = set(table.column_names)
        # a row is a dictionary, which would silently keep only one of them
        if len(distinct_names) < table.num_columns:
            raise pyarrow.ArrowInvalid(f"several columns have the same name: {', '.join(table.column_names)}")
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{where}: not a readable parquet file ({error})") from error
    return RowTable(path, table)


def _read_json(file: Path, where: str) -> list[Row]:
    """Returns the rows of a json or jsonl file, which its content tells apart, not its name."""
    text = read_json_text(file, where)
    if text.lstrip().startswith("["):
        rows = parse_json(text, where, "a row per line, or one list of rows")
    else:
        rows = []
        # split, not splitlines, which would also split at U+2028 inside a string
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                rows.append(parse_json(line, f"{where}, line {number}", "a row per line"))

    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{where}: row {index} is {row!r:.100}, expected an object with named columns")
    return rows


def read_json_text(file: Path, where: str) -> str:
    """Returns the text of a json file.

    Args:
        file: The file.
        where: Its location, for messages.

    Raises:
        UserError: If the file cannot be read, or is not UTF-8.
    """
    try:
        # editors on Windows begin files with a byte order mark
        return file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: cannot be read ({error}); expected uncompressed json in UTF-8") from error


def parse_json(text: str, where: str, expected: str) -> Any:
    """Returns the value of a json text.

    Args:
        text: The json text.
        where: Its location, for messages.
        expected: Description of a valid text, for messages.

    Raises:
        UserError: If the text is invalid or nested deeper than MOST_LEVELS.
    """
    try:
        value = json.loads(text)
    # ValueError is also raised for a number with too many digits
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid json ({error}); expected {expected}") from error
    num_brackets = text.count("{") + text.count("[")
    # most texts have fewer brackets than levels are allowed, so their values need not be searched
    if num_brackets > MOST_LEVELS and is_nested_deeper(value, MOST_LEVELS):
        raise UserError(f"{where}: nested more than {MOST_LEVELS} levels deep; flatten it, or store it as a text")
    return value


def is_nested_deeper(value: object, levels: int) -> bool:
    """Returns True if a mapping or list contains others over more than `levels` levels.

    Later stages copy and send values by recursion, which fails at Python's limit.
    """
    # level by level, because a recursion here could itself reach the limit
    containers = [value]
    for _ in range(levels):
        entries: list[object] = []
        for container in containers:
            if isinstance(container, dict):
                entries += container.values()
            elif isinstance(container, list):
                entries += container
        containers = [entry for entry in entries if isinstance(entry, dict | list)]
        if not containers:
            return False
    return True


def open_place(text: str, option: str, split: str) -> list[RowTable]:
    """Opens one entry of an option, as one table per file.

    Args:
        text: The entry, `base:config@split`.
        option: Key of the option, for messages.
        split: "train" or "val". It selects the default splits.

    Raises:
        UserError: If the entry does not exist, is unreadable, or lacks the split.
    """
    front, _, named_split = text.partition("@")
    base, _, config = front.partition(":")
    # an existing path is taken as a whole, because it may contain : and @
    if Path(text).expanduser().exists():
        base = text
        config = ""
        named_split = ""
    path = Path(base).expanduser()
    where = f"{option}={text!r}"
    # the entry's own split has priority over that of its option
    splits = (named_split,) if named_split else SPLITS[split]

    if not path.is_dir():
        # with one of the suffixes, the entry names a file, also if the file does not exist
        if path.suffix in SUFFIXES or not HUB_NAME.fullmatch(text):
            return [read_data_file(text, option)]
        dataset = _load_prepared(base, config or None, where, splits)
        return [RowTable(text, dataset, data_source=base)]

    # `save_to_disk` writes the first file for a DatasetDict, and the second for a single dataset
    descriptions = (path / "dataset_dict.json", path / "state.json")
    if any(file.is_file() for file in descriptions):
        dataset = _load_saved(base, where, splits)
        return [RowTable(text, dataset)]
    # a copy of a hub repository, whose README lists the files of each config
    if config:
        dataset = _load_prepared(str(path), config, where, splits)
        return [RowTable(text, dataset)]
    files = _files_of_split(path, where, splits)
    return [read_data_file(str(file), option) for file in files]


def _files_of_split(folder: Path, where: str, splits: Sequence[str]) -> list[Path]:
    """Returns the files of a folder, or of its subfolder `data`, that belong to one of the splits.

    Args:
        folder: The folder.
        where: Its location, for messages.
        splits: Accepted names of the split, in order of preference. If there are several, the user named none, and a
            folder in which no file is named after a split has only one: all files belong to it.

    Raises:
        UserError: If there is no such file, or if only some of the files are named after a split.
    """
    files_by_split = _data_files_by_split(folder) or _data_files_by_split(folder / "data")
    if not files_by_split:
        raise UserError(f"{where}: the folder {folder.absolute()} has no parquet, json or jsonl file")

    unnamed = files_by_split.pop("", [])
    if unnamed and files_by_split:
        raise UserError(
            f"{where}: some files of the folder are named after a split, but {unnamed[0].name} is not; list the "
            "intended files instead of the folder"
        )
    if unnamed and len(splits) > 1:
        return unnamed
    split = _choose_split(list(files_by_split), where, splits)
    return files_by_split[split]


def _data_files_by_split(folder: Path) -> dict[str, list[Path]]:
    """Returns the data files of a folder by the split in their names, or "" without one."""
    if not folder.is_dir():
        return {}
    files_by_split: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        is_data = file.suffix in SUFFIXES and file.name not in _DESCRIPTIONS
        if not is_data or file.name.startswith("."):
            continue
        split = ""
        if match := _SPLIT_WORD.search(file.stem.lower()):
            split = match[1]
        files_by_split.setdefault(split, []).append(file)
    return files_by_split


def _choose_split(available: Sequence[str], where: str, wanted: Sequence[str]) -> str:
    """Returns the first wanted split that exists. Raises UserError, which lists the existing splits, if none does."""
    for split in wanted:
        if split in available:
            return split
    raise UserError(
        f"{where}: no split called {' or '.join(wanted[:2])}; splits found: {', '.join(sorted(available)) or 'none'}. "
        "Add the split after an @, for example owner/name:config@split"
    )


def _load_saved(folder: str, where: str, wanted: Sequence[str]) -> datasets.Dataset:
    """Loads a dataset, or the wanted split of a `DatasetDict`, from a folder written by `save_to_disk`."""
    import datasets

    try:
        loaded = datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise UserError(f"{where}: not a readable folder of datasets.save_to_disk ({error})") from error
    if isinstance(loaded, datasets.DatasetDict):
        split = _choose_split(list(loaded), where, wanted)
        return loaded[split]
    # `wanted` has one name if the user chose a split, which a single dataset does not have
    if len(wanted) == 1:
        raise UserError(f"{where}: the folder contains one dataset without splits; remove @{wanted[0]}")
    return loaded


def _load_prepared(name: str, config: str | None, where: str, wanted: Sequence[str]) -> datasets.Dataset:
    """Loads a dataset of the hub (without network, from the cache of `datasets`), or a copy of a hub repository.

    Args:
        name: Name on the hub, or folder of the copy.
        config: Config of the dataset; None: the only one.
        where: The entry of the option, for messages.
        wanted: Accepted names of the split, in order of preference.

    Raises:
        UserError: If the dataset cannot be loaded or lacks the split.
    """
    import datasets

    try:
        builder = datasets.load_dataset_builder(name, config)
        # a builder that has never been prepared lists its splits only as files
        available = builder.info.splits or getattr(builder.config, "data_files", None) or []
        names = [str(available_split) for available_split in available]
        split = _choose_split(names, where, wanted)
        builder.download_and_prepare()
        return builder.as_dataset(split=split)
    # that of `_choose_split`, which is also a ValueError
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
    entries: Sequence[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
) -> RowTable:
    """Returns the rows of data.custom_cls, which is constructed with those of verl's arguments that it accepts.

    Args:
        entries: The entries of data.train_files or data.val_files, which only the class interprets.
        config: Section `data` of the options.
        tokenizer: The policy's tokenizer.
        split: "train" or "val".

    Raises:
        UserError: If the class is no sequence of rows, or a row is no dict of columns.
    """
    custom = config.custom_cls
    path = custom.path or ""
    class_name = custom.name or ""
    row_class = load_object(path, class_name, "data.custom_cls.path", "data.custom_cls.name")
    arguments: dict[str, object] = {
        "data_files": list(entries),
        "tokenizer": tokenizer,
        "processor": None,  # verl's class prepares images with it; here `images.py` does
        "config": config,
        "max_samples": config.train_max_samples if split == "train" else config.val_max_samples,
    }
    accepted = {name: value for name, value in arguments.items() if accepts(row_class, name)}
    dataset = row_class(**accepted)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"data.custom_cls.name={custom.name}: expected a sequence of rows, found {type(dataset).__name__}"
        )

    # by index, because a class with __getitem__ and __len__ need not be iterable
    rows = [dataset[index] for index in range(len(dataset))]
    name = f"{custom.name} of {custom.path}"
    for index, row in enumerate(rows):
        if isinstance(row, dict) and is_nested_deeper(row, MOST_LEVELS):
            raise UserError(f"data.custom_cls: row {index} of {name} is nested more than {MOST_LEVELS} levels deep")
        if not isinstance(row, dict) or _has_tensor(row):
            raise UserError(
                f"data.custom_cls: row {index} of {name} is {row!r:.100}, expected a dict of columns without tensors "
                '(tokens are computed later): {"data_source": "mine", "prompt": [{"role": "user", "content": "1+1="}]}'
            )
    return RowTable(name, rows)


def _has_tensor(row: Row) -> bool:
    """Returns True if a column of the row is a tensor, as in datasets that tokenize their prompts themselves."""
    for value in row.values():
        if isinstance(value, torch.Tensor):
            return True
    return False
