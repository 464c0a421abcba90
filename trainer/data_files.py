"""Dataset files, read and checked: parquet, json (a list of rows) and jsonl (a row per line), in verl's row schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow
import pyarrow.parquet

from verl_lite.errors import UserError

EXAMPLE_ROW: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 70 + 2? Put the answer after ####."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}

_MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
_SURROGATE = "which has half of a surrogate pair (\\ud800 to \\udfff): no character, so no tokenizer reads it"
_MULTIMODAL = "pictures, video and sound are not supported yet: use a dataset of text"
_ROWS_AT_ONCE = 1000  # of a table, as Python objects


class DataFile(Protocol):
    """The rows of one file."""

    path: str

    def __len__(self) -> int: ...

    def column(self, name: str) -> list[Any]:
        """All values of a column."""

    def rows(self, indices: Sequence[int], columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Some rows, in the order asked for; with these columns alone, or all."""


def read_data_file(path: str, option: str, prompt_key: str, needs_ground_truth: bool = True) -> DataFile:
    """Opens a file and checks its columns and rows, all but the prompts. option: the configuration key it came from.

    needs_ground_truth: whether rows have to have reward_model["ground_truth"].
    Raises UserError for a missing, unreadable, wrong or multimodal file.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            f"{option}={path!r}: no such file (looked for {file.absolute()}). Give parquet, json or jsonl files; a "
            "dataset of the Hugging Face hub becomes one with datasets.load_dataset(NAME, split=SPLIT).to_parquet(FILE)"
        )
    if file.suffix == ".parquet":
        table = _read_parquet(file, path, option)
        data = _ParquetFile(path, table)
        return _checked(data, table.column_names, option, prompt_key, needs_ground_truth)
    if file.suffix in (".json", ".jsonl"):
        rows = _read_json(file, path, option)
        columns = sorted({name for row in rows for name in row})
        return _checked(_JsonFile(path, rows), columns, option, prompt_key, needs_ground_truth)
    raise UserError(f"{option}={path!r}: expected a file named .parquet, .json or .jsonl")


def check_prompt(prompt: Any, where: str) -> None:
    """Raises UserError unless `prompt` is a list of chat messages with text."""
    if isinstance(prompt, str):
        raise UserError(
            f"{where}: found text ({prompt[:60]!r}), expected a list of chat messages. Write it as "
            f'[{{"role": "user", "content": {json.dumps(prompt[:60])}}}]'
        )
    if not isinstance(prompt, list) or not prompt:
        raise UserError(
            f"{where}: found {prompt!r:.200}, expected a list of chat messages like {EXAMPLE_ROW['prompt']}"
        )
    for message in prompt:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise UserError(f"{where}: found {message!r:.200}, expected a message like {EXAMPLE_ROW['prompt'][0]}")
        if isinstance(message["content"], list):
            raise UserError(f"{where}: a message's content is a list of parts ({_MULTIMODAL})")
        for name in ("role", "content"):
            if not isinstance(message[name], str):
                raise UserError(f"{where}: a message's {name} is {message[name]!r:.200}, expected text")
            if not _is_unicode(message[name]):
                raise UserError(f"{where}: a message's {name} is {message[name]!r:.200}, {_SURROGATE}")


def _checked(data: DataFile, columns: list[str], option: str, prompt_key: str, needs_ground_truth: bool) -> DataFile:
    """The file, after a look at its columns and at what its rows say of the reward."""
    if len(data) == 0:
        return data
    required = (prompt_key, "data_source", *["reward_model"] * needs_ground_truth)
    missing = [name for name in required if name not in columns]
    if missing:
        remedy = "" if prompt_key not in missing else " Set data.prompt_key if the chat messages are in another column."
        raise UserError(
            f"{option}: {data.path} has no column {missing[0]!r}; columns found: {', '.join(columns)}.{remedy} "
            f"A correct row:\n{json.dumps(EXAMPLE_ROW, indent=2)}"
        )
    twice = sorted(name for name in {*columns} if columns.count(name) > 1)
    if twice:
        raise UserError(f"{option}: {data.path} has several columns {twice[0]!r}; expected one of each name")
    looked_at = [name for name in (*_MEDIA_COLUMNS, "data_source", "reward_model", "extra_info") if name in columns]
    for start in range(0, len(data), _ROWS_AT_ONCE):
        places = range(start, min(start + _ROWS_AT_ONCE, len(data)))
        for index, row in zip(places, data.rows(places, looked_at), strict=True):
            _check_row(row, f"{option}: row {index} of {data.path}", needs_ground_truth)
    return data


def _check_row(row: dict[str, Any], where: str, needs_ground_truth: bool) -> None:
    """Raises UserError for media, and for what the reward could not be found or called with."""
    for name in _MEDIA_COLUMNS:
        if row.get(name):
            raise UserError(f"{where}, column {name!r} is not empty ({_MULTIMODAL})")
    source = row.get("data_source")
    if not isinstance(source, str) or not source:
        raise UserError(
            f"{where}, column 'data_source': found {source!r:.200}, expected a name, as {EXAMPLE_ROW['data_source']!r}"
        )
    if not _is_unicode(source):
        raise UserError(f"{where}, column 'data_source': found {source!r:.200}, {_SURROGATE}")
    reward_model = row.get("reward_model")
    if reward_model is not None and not isinstance(reward_model, dict):
        raise UserError(
            f"{where}, column 'reward_model': found {reward_model!r:.200}, expected a dict, as "
            f"{EXAMPLE_ROW['reward_model']}"
        )
    if needs_ground_truth and "ground_truth" not in (reward_model or {}):
        raise UserError(
            f"{where}, column 'reward_model': found {reward_model!r:.200}, expected a dict with 'ground_truth', as "
            f"{EXAMPLE_ROW['reward_model']}"
        )
    if row.get("extra_info") is not None and not isinstance(row["extra_info"], dict):
        raise UserError(f"{where}, column 'extra_info': found {row['extra_info']!r:.200}, expected a dict")


def _is_unicode(text: str) -> bool:
    """Whether it has an encoding: half of a surrogate pair, which json can spell, has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _ParquetFile:
    """Rows in Arrow's own memory; Python objects are made for those that are asked for."""

    def __init__(self, path: str, table: pyarrow.Table) -> None:
        self.path = path
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def column(self, name: str) -> list[Any]:
        return self._table.column(name).to_pylist(maps_as_pydicts="lossy")

    def rows(self, indices: Sequence[int], columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        table = self._table if columns is None else self._table.select(list(columns))
        return table.take(pyarrow.array(indices, type=pyarrow.int64())).to_pylist(maps_as_pydicts="lossy")


class _JsonFile:
    """Rows as Python objects: they need not agree in their types, as columns of a table would have to."""

    def __init__(self, path: str, rows: list[dict[str, Any]]) -> None:
        self.path = path
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self._rows]

    def rows(self, indices: Sequence[int], columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        return [self._rows[index] for index in indices]


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
