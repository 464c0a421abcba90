"""The small models with which the lessons begin. Each is made at its first use, in seconds, and kept in the cache.

A random model never gives a rewarded answer, so reinforcement learning has nothing to reinforce. These models of about
120,000 parameters therefore have a short supervised warm start on demonstrations that are often wrong.
"""

from pathlib import Path

from recipes.agent_program.data import WORDS
from recipes.agent_program.recipe import AgentStart
from recipes.embedded import Start
from recipes.lessons import calculator_data, sorting_data

SORTING = Start(
    "lessons_sorting",
    sorting_data,
    hidden=64,
    layers=2,
    steps=120,
    max_length=32,
    lr=5e-3,
)
CALCULATOR = AgentStart(
    "lessons_calculator",
    calculator_data,
    hidden=64,
    layers=2,
    steps=150,
    max_length=96,
    lr=5e-3,
    words=WORDS,
)


def random_model(folder: Path) -> Path:
    """Writes a model without any training, and its tokenizer, into `folder`. Returns the folder."""
    SORTING.write_random_model(folder)
    return folder


def sorting_model() -> Path:
    """Returns the folder of a model that answers some questions such as `sort 52817`."""
    SORTING.make()
    return SORTING.folder / "model"


def calculator_model() -> Path:
    """Returns the folder of a model that calls a calculator, often with a wrong copy of the question."""
    CALCULATOR.make()
    return CALCULATOR.folder / "model"


def calculator_questions(split: str) -> str:
    """Returns the file with the questions of the calculator for a split, train or test."""
    CALCULATOR.make()
    return str(CALCULATOR.folder / "data" / f"{split}.parquet")
