"""Questions of the lessons, `sort 52817`, and demonstrations of which about half are wrong."""

import random
from pathlib import Path

from recipes.made_data import Question, Row, careless_demonstration, write_different_questions
from recipes.quickstart.data import sort_questions

TEST_ROWS = 128
TRAIN_ROWS = 1024
DEMONSTRATIONS = 8192
WRONG_SHARE = 0.12
"""Share of wrong digits in the demonstrations, with which about half of the demonstrated answers are wrong."""


def write_data(folder: Path, seed: int) -> None:
    """Writes test.parquet, train.parquet and demonstrations.parquet into `folder`."""
    write_different_questions(
        folder,
        seed,
        sort_questions,
        demonstration,
        test_rows=TEST_ROWS,
        train_rows=TRAIN_ROWS,
        demonstrations=DEMONSTRATIONS,
    )


def demonstration(question: Question, rng: random.Random) -> Row:
    """Returns the question with an answer whose digits are often wrong."""
    return careless_demonstration(question, WRONG_SHARE, rng)
