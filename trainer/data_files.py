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
_MULTIMODAL = "pictures, video and sound are not supported yet: use a dataset of text"
_CHECKED_ROWS = 20


class DataFile(Protocol):
    """The rows of one file."""

    path: str

    def __len__(self) -> int: ...

    def column(self, name: str) -> list[Any]:
        """All values of a column."""

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Some rows, in the order asked for."""


def read_data_file(path: str, option: str, prompt_key: str, needs_ground_truth: bool = True) -> DataFile:
    """Opens a file and checks its columns and first rows. option: the configuration key it came from.

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
        return _checked(data, table.column_names, option, prompt_key, _CHECKED_ROWS, needs_ground_truth)
    if file.suffix in (".json", ".jsonl"):
        rows = _read_json(file, path, option)
        columns = sorted({name for row in rows[:_CHECKED_ROWS] for name in row})
        return _checked(_JsonFile(path, rows), columns, option, prompt_key, len(rows), needs_ground_truth)
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
        if not isinstance(message["content"], str):
            raise UserError(f"{where}: a message's content is {message['content']!r:.200}, expected text")


def _checked(
    data: DataFile, columns: list[str], option: str, prompt_key: str, checked_rows: int, needs_ground_truth: bool
) -> DataFile:
    """The file, after a look at its columns and the reward columns of its first rows."""
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
    rows = data.rows(range(min(checked_rows, len(data))))
    for index, row in enumerate(rows):
        where = f"{option}: row {index} of {data.path}"
        for name in _MEDIA_COLUMNS:
            if row.get(name):
                raise UserError(f"{where}, column {name!r} is not empty ({_MULTIMODAL})")
        if not isinstance(row.get("data_source"), str):
            raise UserError(
                f"{where}, column 'data_source': found {row.get('data_source')!r}, expected a name, as "
                f"{EXAMPLE_ROW['data_source']!r}"
            )
        reward_model = row.get("reward_model")
        if needs_ground_truth and not (isinstance(reward_model, dict) and "ground_truth" in reward_model):
            raise UserError(
                f"{where}, column 'reward_model': found {reward_model!r:.200}, expected a dict with "
                f"'ground_truth', as {EXAMPLE_ROW['reward_model']}"
            )
        if row.get("extra_info") is not None and not isinstance(row["extra_info"], dict):
            raise UserError(f"{where}, column 'extra_info': found {row['extra_info']!r:.200}, expected a dict")
    return data


class _ParquetFile:
    """Rows in Arrow's own memory; Python objects are made for those that are asked for."""

    def __init__(self, path: str, table: pyarrow.Table) -> None:
        self.path = path
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def column(self, name: str) -> list[Any]:
        return self._table.column(name).to_pylist()

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return self._table.take(pyarrow.array(indices, type=pyarrow.int64())).to_pylist()


class _JsonFile:
    """Rows as Python objects: they need not agree in their types, as columns of a table would have to."""

    def __init__(self, path: str, rows: list[dict[str, Any]]) -> None:
        self.path = path
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self._rows]

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self._rows[index] for index in indices]


def _read_parquet(file: Path, path: str, option: str) -> pyarrow.Table:
    try:
        return pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{option}={path!r}: not a readable parquet file ({error})") from error


def _read_json(file: Path, path: str, option: str) -> list[dict[str, Any]]:
    text = file.read_text(encoding="utf-8")
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
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid json ({error}); expected a row per line, or one list of rows") from error
