"""`python -m recipes.sft.pairs ANSWERS.parquet FOLDER`: makes preference pairs from a model's own answers.

ANSWERS is a file of `python -m trainer.main_generate` with several answers to each question. A question with right and
wrong answers gives one pair: its right answer and its most frequent wrong answer. FOLDER gets pairs.parquet, and
held_out_pairs.parquet with one pair in 16.
"""

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow.parquet as pq

from recipes.made_data import Row, write_parquet


def pairs_of(rows: list[Row]) -> list[Row]:
    """Returns rows with the columns prompt, chosen and rejected.

    Args:
        rows: The answers, with the columns prompt, output and gts (the right answer).
    """
    wrong: defaultdict[str, Counter[str]] = defaultdict(Counter)
    right: dict[str, Row] = {}
    for row in rows:
        question = str(row["prompt"])
        answer = str(row["output"])
        if answer == row["gts"]:
            right[question] = {"prompt": row["prompt"], "chosen": answer}
        # an empty answer cannot be trained on
        elif answer:
            wrong[question][answer] += 1

    pairs = []
    # a question without a wrong answer gives no pair
    for question, row in right.items():
        if question in wrong:
            [(most_frequent, _)] = wrong[question].most_common(1)
            pairs.append(row | {"rejected": most_frequent})
    return pairs


def main(answers: str, folder: str) -> None:
    """Writes the pairs of the answers into the folder."""
    rows = pq.read_table(answers).to_pylist()
    pairs = pairs_of(rows)
    held_out = pairs[::16]
    others = [pair for index, pair in enumerate(pairs) if index % 16]
    write_parquet(others, Path(folder, "pairs.parquet"))
    write_parquet(held_out, Path(folder, "held_out_pairs.parquet"))
    print(f"{len(pairs):,} pairs, {len(held_out):,} of them held out")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m recipes.sft.pairs ANSWERS.parquet FOLDER")
    main(*sys.argv[1:])
