"""Generates preference pairs: two answers to a question of the quickstart, and which of them is preferred.

Each character of an answer is wrong with some probability. The answer with more right characters is preferred, except
that one label in ten is wrong. Training pairs use the quickstart's training questions; held-out pairs use its test
questions and have no wrong labels. The same seed gives the same bytes.
"""

import random
from pathlib import Path

import pyarrow.parquet as pq

from recipes.made_data import careless, write_parquet

PAIRS_PER_QUESTION = 2
WRONG_LABELS = 0.1
WRONG_SHARES = (0.0, 0.15, 0.4)
"""Possible shares of wrong characters in an answer; each answer draws one of them."""


def write_pairs(questions: Path, folder: Path, seed: int) -> None:
    """Writes pairs.parquet and held_out_pairs.parquet into `folder`, with the columns prompt, chosen and rejected.

    Args:
        questions: Folder with the quickstart's train.parquet and test.parquet.
        folder: Folder of the pairs.
        seed: Seed of the answers and of the wrong labels.
    """
    rng = random.Random(seed)
    pairs = make_pairs(questions / "train.parquet", rng, WRONG_LABELS)
    write_parquet(pairs, folder / "pairs.parquet")
    held_out_pairs = make_pairs(questions / "test.parquet", rng, wrong_labels=0.0)
    write_parquet(held_out_pairs, folder / "held_out_pairs.parquet")


def make_pairs(questions: Path, rng: random.Random, wrong_labels: float) -> list[dict[str, str]]:
    """Returns PAIRS_PER_QUESTION pairs for each question of a file.

    Args:
        questions: Parquet file of the quickstart.
        rng: Random numbers of the answers and of the wrong labels.
        wrong_labels: Share of wrong labels.
    """
    pairs = []
    for row in pq.read_table(questions).to_pylist():
        prompt = row["prompt"][-1]["content"]
        truth = row["reward_model"]["ground_truth"]
        for _ in range(PAIRS_PER_QUESTION):
            pairs.append(make_pair(prompt, truth, rng, wrong_labels))
    return pairs


def make_pair(prompt: str, truth: str, rng: random.Random, wrong_labels: float) -> dict[str, str]:
    """Returns a pair of answers of different quality; its labels are swapped with probability `wrong_labels`."""
    # two answers of equal quality have no better one
    quality = worse_quality = 0
    while quality == worse_quality:
        better = careless(truth, rng.choice(WRONG_SHARES), rng)
        worse = careless(truth, rng.choice(WRONG_SHARES), rng)
        quality = right_characters(better, truth)
        worse_quality = right_characters(worse, truth)
    if quality < worse_quality:
        better, worse = worse, better

    if rng.random() < wrong_labels:
        better, worse = worse, better
    return {"prompt": prompt, "chosen": better, "rejected": worse}


def right_characters(answer: str, truth: str) -> int:
    """Returns the number of right characters in an answer."""
    number = 0
    for character, right in zip(answer, truth, strict=True):
        if character == right:
            number += 1
    return number
