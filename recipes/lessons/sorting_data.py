"""Questions of the lessons, `sort 52817`, and demonstrations of which about half are wrong."""

import random
from pathlib import Path

from recipes.made_data import careless, unique, write_files
from recipes.quickstart.data import sort_questions

TEST_ROWS, TRAIN_ROWS, DEMONSTRATIONS = 128, 1024, 8192
WRONG_SHARE = 0.12
"""Share of wrong digits in the demonstrations, with which about half of the demonstrated answers are wrong."""


def write_data(folder: Path, seed: int) -> None:
    """Writes test.parquet, train.parquet and demonstrations.parquet into `folder`."""
    rng = random.Random(seed)
    different = unique(sort_questions(rng), lambda question: question.prompt)
    test = [next(different) for _ in range(TEST_ROWS)]
    train = [next(different) for _ in range(TRAIN_ROWS)]
    demonstrated = [next(different) for _ in range(DEMONSTRATIONS)]
    taught = (question.answered(careless(question.answer, WRONG_SHARE, rng)) for question in demonstrated)
    write_files(folder, test=test, train=train, taught=taught)
