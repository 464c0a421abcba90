"""`python -m recipes.gsm8k.prepare --from FOLDER_OR_NAME --out FOLDER`: writes GSM8K as train.parquet and test.parquet
in verl's row schema.

FOLDER_OR_NAME is a folder with files whose names contain train and test (parquet, json or jsonl, at any depth, as in
OpenAI's repository or a copy of the hub's), a folder written by `datasets`, or a name that `datasets` loads, such as
openai/gsm8k. Rows need the columns `question` and `answer`; the last line of an answer is `#### N`.
"""

import argparse
import sys
from pathlib import Path

from recipes.gsm8k.problems import as_question
from recipes.made_data import Row, write_parquet
from trainer.cli import command
from trainer.data.sources import SUFFIXES, RowTable, open_place, read_data_file
from verl_lite.errors import UserError


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status. Raises UserError for missing rows or rows in another format."""
    parser = argparse.ArgumentParser(prog="python -m recipes.gsm8k.prepare", description=__doc__)
    parser.add_argument("--from", dest="source", required=True, help="folder, or a name that `datasets` loads")
    parser.add_argument("--out", "--to", type=Path, required=True, help="folder for the parquet files")
    options = parser.parse_args(argv)
    for split in ("train", "test"):
        tables = load_split(options.source, split)
        rows = rows_of(tables, split)
        file = options.out / f"{split}.parquet"
        write_parquet(rows, file)
        print(f"wrote {file}: {len(rows)} questions")
    return 0


def rows_of(tables: list[RowTable], split: str) -> list[Row]:
    """Converts GSM8K's rows to verl's row schema. Raises UserError for a row in another format."""
    rows = []
    for table in tables:
        all_rows = range(len(table))
        for index, row in enumerate(table.rows(all_rows, table.columns)):
            where = f"--from: {split} row {index} of {table.path}"
            text = row.get("question")
            answer = row.get("answer")
            if not isinstance(text, str) or not isinstance(answer, str):
                raise UserError(f"{where}: no text in the columns 'question' and 'answer'; found {row!r:.200}")
            question = as_question(text, answer, where)
            rows.append(question.row(split, index))
    return rows


def load_split(source: str, split: str) -> list[RowTable]:
    """Loads the rows of the split "train" or "test". Raises UserError if they are missing."""
    folder = Path(source).expanduser()
    if not folder.exists():
        # the hub's other configuration, socratic, has questions inside of its answers
        return open_place(f"{source}:main@{split}", "--from", split)
    # `datasets` writes this file when it saves a dataset with its splits
    if (folder / "dataset_dict.json").is_file():
        return open_place(f"{source}@{split}", "--from", split)

    files = []
    for file in sorted(folder.rglob(f"*{split}*")):
        is_socratic = "socratic" in str(file)
        if file.suffix in SUFFIXES and not is_socratic:
            files.append(file)
    if not files:
        raise UserError(f"--from {source}: no file with {split!r} in its name that ends in {', '.join(SUFFIXES)}")
    return [read_data_file(str(file), "--from") for file in files]


if __name__ == "__main__":
    sys.exit(main())
