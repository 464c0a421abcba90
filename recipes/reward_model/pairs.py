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
    """Writes pairs.parquet and held_out_pairs.parquet into `folder`; columns prompt, chosen, rejected.

    questions: folder with the quickstart's train.parquet and test.parquet.
    """
    rng = random.Random(seed)
    for source, target, wrong in (("train", "pairs", WRONG_LABELS), ("test", "held_out_pairs", 0.0)):
        rows = pq.read_table(questions / f"{source}.parquet").to_pylist()
        pairs = [
            make_pair(row["prompt"][-1]["content"], row["reward_model"]["ground_truth"], rng, wrong)
            for row in rows
            for _ in range(PAIRS_PER_QUESTION)
        ]
        pq.write_table(pa.Table.from_pylist(pairs), folder / f"{target}.parquet")


def make_pair(prompt: str, truth: str, rng: random.Random, wrong_labels: float) -> dict[str, str]:
    """Returns a pair of answers of different quality; its labels are swapped with probability `wrong_labels`."""
    while True:
        answers = [careless(truth, rng.choice(WRONG_SHARES), rng) for _ in range(2)]
        answers.sort(key=lambda answer: right_characters(answer, truth), reverse=True)
        if right_characters(answers[0], truth) > right_characters(answers[1], truth):
            break
    if rng.random() < wrong_labels:
        answers.reverse()
    return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}


def right_characters(answer: str, truth: str) -> int:
    """Returns the number of right characters in an answer."""
    return sum(a == b for a, b in zip(answer, truth, strict=True))
