"""Pairs of answers to the quickstart's questions, of which a labeller prefers one.

Both answers are a careless teacher's: each character is with some probability another one. The labeller prefers the
answer with more right characters, and is wrong about one pair in ten. Pairs to learn from are about the quickstart's
training questions, pairs to measure on about its test questions, without wrong labels. Same seed, same bytes.
"""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recipes.made_data import careless

PAIRS_PER_QUESTION = 2
WRONG_LABELS = 0.1
WRONG_SHARES = (0.0, 0.15, 0.4)
"""Of an answer's characters; an answer's share is drawn from these."""


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
    """A pair of answers of different worth; the labels are exchanged with probability `wrong_labels`."""
    while True:
        answers = [careless(truth, rng.choice(WRONG_SHARES), rng) for _ in range(2)]
        answers.sort(key=lambda answer: right_characters(answer, truth), reverse=True)
        if right_characters(answers[0], truth) > right_characters(answers[1], truth):
            break
    if rng.random() < wrong_labels:
        answers.reverse()
    return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}


def right_characters(answer: str, truth: str) -> int:
    """Places at which an answer is right."""
    return sum(a == b for a, b in zip(answer, truth, strict=True))
