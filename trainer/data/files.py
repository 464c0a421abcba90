"""Dataset files as rows: parquet, json (a list of rows) and jsonl (a row per line).

What the rows mean is said in `schema`, where else rows may come from in `sources`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow
import pyarrow.parquet

from verl_lite.errors import UserError

SUFFIXES = (".parquet", ".json", ".jsonl")


class RowTable(Protocol):
    """Rows from one place.

    path: the place, for messages. columns: names in the order of the place, several times where it has them so.
    media: columns declared to hold pictures, video or sound. data_source: a name for all rows that give none.
    """

    path: str
    columns: list[str]
    media: tuple[str, ...]
    data_source: str | None

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Some rows, in the order asked for, with these columns where they have them."""


class TableRows:
    """Rows in Arrow's own memory; Python objects are made for those that are asked for."""

    media: tuple[str, ...] = ()
    data_source: str | None = None

    def __init__(self, path: str, table: pyarrow.Table) -> None:
        self.path = path
        self.columns = list(table.column_names)
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def rows(self, indices: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        found = self._table.select(list(columns)).take(pyarrow.array(indices, type=pyarrow.int64()))
        return found.to_pylist(maps_as_pydicts="lossy")


class ListedRows:
    """Rows as Python objects: they need not agree in their types, as columns of a table would have to."""

    media: tuple[str, ...] = ()
    data_source: str | None = None

    def __init__(self, path: str, rows: Sequence[dict[str, Any]]) -> None:
        self.path = path
        self.columns = sorted({name for row in rows for name in row})
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        return [{name: row[name] for name in columns if name in row} for row in map(self._rows.__getitem__, indices)]


def read_data_file(path: str, option: str) -> RowTable:
    """The rows of a file. option: the configuration key it came from.

    Raises UserError for a file that is not there, cannot be read, or is of another kind.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{option}={path!r}: no such file (looked for {file.absolute()})")
    if file.suffix == ".parquet":
        return TableRows(path, _read_parquet(file, path, option))
    if file.suffix in SUFFIXES:
        return ListedRows(path, _read_json(file, path, option))
    raise UserError(f"{option}={path!r}: expected a file named .parquet, .json or .jsonl")


def read_rows(path: str, option: str) -> list[dict[str, Any]]:
    """All rows of a file; see `read_data_file`."""
    table = read_data_file(path, option)
    return table.rows(range(len(table)), table.columns)


def _read_parquet(file: Path, path: str, option: str) -> pyarrow.Table:
    try:
        with pyarrow.parquet.ParquetFile(file) as reader:
            table = reader.read()
        table.validate(full=True)  # texts that are not UTF-8 are found here, not when a row is asked for
        return table
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{option}={path!r}: not a readable parquet file ({error})") from error


def _read_json(file: Path, path: str, option: str) -> list[dict[str, Any]]:
    try:
        content = file.read_bytes()
        text = content.decode("utf-8-sig")  # editors on Windows put a mark in front
    except OSError as error:
        raise UserError(f"{option}={path!r}: cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{option}={path!r}, line {line}: found the byte 0x{content[error.start]:02x}, which is not UTF-8 text "
            f"({error.reason}); expected json in UTF-8, not compressed"
        ) from error
    if text.lstrip().startswith("["):
        rows = _parse(text, f"{option}={path!r}")
    else:  # split, not splitlines, which would also split at U+2028 inside a string
        lines = enumerate(text.split("\n"), start=1)
        rows = [_parse(line, f"{option}={path!r}, line {number}") for number, line in lines if line.strip()]
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{option}: row {index} of {path} is {row!r:.100}, expected an object with named columns")
    return rows


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also of a number with too many digits
        raise UserError(f"{where}: not valid json ({error}); expected a row per line, or one list of rows") from error
