"""Questions for the agent of lesson 4, `17*8`, and conversations in which a careless agent calls a calculator.

The conversations are those of recipes/agent_program with two numbers instead of up to four, so that a small model
learns their form in seconds.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from recipes.agent_program.data import MAX_NUMBER, calculator_question, demonstration
from recipes.made_data import Question, write_different_questions

TEST_ROWS = 128
TRAIN_ROWS = 1024
DEMONSTRATIONS = 6000


def write_data(folder: Path, seed: int) -> None:
    """Writes test.parquet, train.parquet and demonstrations.parquet into `folder`."""
    write_different_questions(
        folder,
        seed,
        questions,
        demonstration,
        test_rows=TEST_ROWS,
        train_rows=TRAIN_ROWS,
        demonstrations=DEMONSTRATIONS,
    )


def questions(rng: random.Random) -> Iterator[Question]:
    """Yields sums, differences and products of two numbers."""
    while True:
        left = rng.randint(1, MAX_NUMBER)
        right = rng.randint(1, MAX_NUMBER)
        sign = rng.choice("+-*")
        yield calculator_question(f"{left}{sign}{right}")
