"""Questions for the agent of lesson 4, `17*8`, and conversations in which a careless agent calls a calculator.

The conversations are those of recipes/agent_program with two numbers instead of up to four, so that a small model
learns their form in seconds.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from recipes.agent_program.data import MAX_NUMBER, demonstration
from recipes.made_data import Question, unique, write_files
from verl_lite.envs.calculator import evaluate, written

TEST_ROWS, TRAIN_ROWS, DEMONSTRATIONS = 128, 1024, 6000


def write_data(folder: Path, seed: int) -> None:
    """Writes test.parquet, train.parquet and demonstrations.parquet into `folder`."""
    rng = random.Random(seed)
    different = unique(questions(rng), lambda question: question.prompt)
    test = [next(different) for _ in range(TEST_ROWS)]
    train = [next(different) for _ in range(TRAIN_ROWS)]
    demonstrated = [next(different) for _ in range(DEMONSTRATIONS)]
    write_files(folder, test=test, train=train, taught=(demonstration(question, rng) for question in demonstrated))


def questions(rng: random.Random) -> Iterator[Question]:
    """Yields sums, differences and products of two numbers."""
    while True:
        left, right = rng.randint(1, MAX_NUMBER), rng.randint(1, MAX_NUMBER)
        text = f"{left}{rng.choice('+-*')}{right}"
        yield Question("verl_lite/calculator", "arithmetic", text, written(evaluate(text)))
