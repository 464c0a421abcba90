"""Questions for the agent of lesson 4, `17*8`, and conversations in which a careless agent calls a calculator.

The conversations are those of recipes/agent_program with two numbers instead of up to four, so that a small model
learns their form in seconds.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from recipes.agent_program.data import MAX_NUMBER, demonstration
from recipes.made_data import Question, write_different_questions
from verl_lite.envs.calculator import evaluate, written

TEST_ROWS, TRAIN_ROWS, DEMONSTRATIONS = 128, 1024, 6000


def write_data(folder: Path, seed: int) -> None:
    """Writes test.parquet, train.parquet and demonstrations.parquet into `folder`."""
    rng = random.Random(seed)
    write_different_questions(
        folder,
        questions(rng),
        lambda question: demonstration(question, rng),
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
        text = f"{left}{sign}{right}"
        yield Question("verl_lite/calculator", "arithmetic", text, written(evaluate(text)))
