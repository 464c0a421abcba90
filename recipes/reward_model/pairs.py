"""Generates preference pairs: two answers to a question of the quickstart, and which of them is preferred.

Each character of an answer is wrong with some probability. The answer with more right characters is preferred, except
that one label in ten is wrong. Training pairs use the quickstart's training questions; held-out pairs use its test
questions and have no wrong labels. The same seed gives the same bytes.
"""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recipes.made_data import careless

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
    for source, target, wrong_labels in (("train", "pairs", WRONG_LABELS), ("test", "held_out_pairs", 0.0)):
        pairs = []
        for row in pq.read_table(questions / f"{source}.parquet").to_pylist():
            prompt = row["prompt"][-1]["content"]
            truth = row["reward_model"]["ground_truth"]
            for _ in range(PAIRS_PER_QUESTION):
                pairs.append(make_pair(prompt, truth, rng, wrong_labels))
        pq.write_table(pa.Table.from_pylist(pairs), folder / f"{target}.parquet")


def make_pair(prompt: str, truth: str, rng: random.Random, wrong_labels: float) -> dict[str, str]:
    """Returns a pair of answers of different quality; its labels are swapped with probability `wrong_labels`."""
    while True:
        answers = []
        for _ in range(2):
            wrong_share = rng.choice(WRONG_SHARES)
            answers.append(careless(truth, wrong_share, rng))
        answers.sort(key=lambda answer: right_characters(answer, truth), reverse=True)
        better, worse = answers
        if right_characters(better, truth) > right_characters(worse, truth):
            break

    if rng.random() < wrong_labels:
        better, worse = worse, better
    return {"prompt": prompt, "chosen": better, "rejected": worse}


def right_characters(answer: str, truth: str) -> int:
    """Returns the number of right characters in an answer."""
    return sum(character == right for character, right in zip(answer, truth, strict=True))
