"""`python -m recipes.gsm8k.prepare --from FOLDER_OR_NAME --to FOLDER`: GSM8K as train.parquet and test.parquet in
verl's row schema.

FOLDER_OR_NAME: a folder that holds files with train and test in their names (parquet, json or jsonl, at any depth, as
in OpenAI's repository or a copy of the hub's), a folder written by `datasets`, or a name that `datasets` loads, such as
openai/gsm8k. Rows need `question` and `answer`, and answers a last line `#### N`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from recipes.gsm8k.rows import gsm8k_row
from trainer.data.sources import read_rows
from verl_lite.errors import UserError

SPLITS = ("train", "test")
CONFIGURATION = "main"  # of the data on the hub; the other one, socratic, asks in between
ENDINGS = (".parquet", ".json", ".jsonl")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m recipes.gsm8k.prepare", description=__doc__)
    parser.add_argument("--from", dest="source", required=True, help="a folder, or a name that datasets loads")
    parser.add_argument("--to", type=Path, required=True, help="the folder to write")
    options = parser.parse_args(argv)
    try:
        for split in SPLITS:
            rows = prepared(load_split(options.source, split), split, options.source)
            options.to.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), options.to / f"{split}.parquet")
            print(f"wrote {options.to / split}.parquet: {len(rows)} questions")
    except UserError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def load_split(source: str, split: str) -> Iterable[Mapping[str, Any]]:
    """The rows of "train" or "test". Raises UserError if they are not there."""
    folder = Path(source).expanduser()
    if not folder.exists():
        return _load_by_name(source, split)
    if (folder / "dataset_dict.json").is_file():
        from datasets import load_from_disk

        return load_from_disk(str(folder))[split]
    files = sorted(
        file for file in folder.rglob(f"*{split}*") if file.suffix in ENDINGS and "socratic" not in str(file)
    )
    if not files:
        raise UserError(
            f"--from {source}: no {split} file there; expected one with {split!r} in its name that ends in "
            f"{', '.join(ENDINGS)}"
        )
    return [row for file in files for row in read_rows(str(file), "--from")]


def _load_by_name(name: str, split: str) -> Iterable[Mapping[str, Any]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        return load_dataset(name, CONFIGURATION, split=split)
    except (DatasetNotFoundError, ConnectionError, OSError, ValueError) as error:
        raise UserError(
            f"--from {name}: there is no such folder, and datasets cannot load it by this name "
            f"({type(error).__name__}: {error}); without a network give a folder with a copy"
        ) from error


def prepared(rows: Iterable[Mapping[str, Any]], split: str, source: str) -> list[dict[str, object]]:
    """The rows in verl's schema. Raises UserError for a row without question and answer."""
    found = []
    for index, row in enumerate(rows):
        for column in ("question", "answer"):
            if not isinstance(row.get(column), str):
                raise UserError(
                    f"--from {source}, {split} row {index}: no text in the column {column!r}; found {row!r:.200}"
                )
        found.append(gsm8k_row(row["question"], row["answer"], split, index))
    return found


if __name__ == "__main__":
    sys.exit(main())
