"""Generates word problems of one and two steps, with solutions in the format of GSM8K.

    Tom has 12 apples. Tom gets 5 more and gives away 8. How many apples are left?   12+5=17
                                                                                    17-8=9
                                                                                    #### 9

The demonstrations contain three kinds of errors, each with its own probability: wrong results, wrong signs and missing
`####`. The same seed gives the same bytes.
"""

import operator
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from recipes.made_data import Question, unique, write_files
from verl_lite.errors import UserError

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = ' Let\'s think step by step and output the final answer after "####".'
"""verl's wording."""

NAMES = ("Tom", "Ana", "Sam", "Eva", "Ben", "Lia", "Max", "Zoe")
THINGS = ("apples", "books", "coins", "cards", "eggs", "pens", "shells", "stamps")
TEST_ROWS, TRAIN_ROWS, DEMONSTRATIONS = 512, 4096, 8192
MISCALCULATED, WRONG_SIGN, FORGOTTEN_MARK = 0.15, 0.08, 0.1

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class Kind:
    """A template of problems. text: question with placeholders. steps: (sign, name of number), applied to `a` in order.

    numbers: lower and upper limits of the numbers a, b, c.
    """

    text: str
    steps: tuple[tuple[str, str], ...]
    numbers: dict[str, tuple[int, int]]


KINDS = (
    Kind("{N} has {a} {T}. {N} gets {b} more. How many {T} are there?", (("+", "b"),), {"a": (2, 40), "b": (2, 40)}),
    Kind("{N} has {a} {T}. {N} gives away {b}. How many {T} are left?", (("-", "b"),), {"a": (20, 60), "b": (2, 19)}),
    Kind("{N} has {a} bags of {b} {T}. How many {T} are there?", (("*", "b"),), {"a": (2, 9), "b": (2, 9)}),
    Kind(
        "{N} has {a} {T}. {N} gets {b} more and gives away {c}. How many {T} are left?",
        (("+", "b"), ("-", "c")),
        {"a": (10, 30), "b": (2, 20), "c": (2, 12)},
    ),
    Kind(
        "{N} has {a} bags of {b} {T}. {N} gets {c} more. How many {T} are there?",
        (("*", "b"), ("+", "c")),
        {"a": (2, 9), "b": (2, 9), "c": (2, 20)},
    ),
)

WORDS = (
    *sorted({word for kind in KINDS for word in re.findall(r" ?[A-Za-z]+", re.sub(r"\{\w\}", "", kind.text))}),
    *sorted({f" {thing}" for thing in THINGS} | {mark + name for name in NAMES for mark in ("", " ")}),
    INSTRUCTION,
    "####",
)
"""Strings that are one token each for the recipe's own model."""


@dataclass(frozen=True)
class Problem:
    """A problem with its numbers. start: value of `a`. steps: (sign, number) of each step."""

    question: str
    start: int
    steps: tuple[tuple[str, int], ...]


def write_data(folder: Path, seed: int) -> None:
    """Writes test.parquet, train.parquet and demonstrations.parquet into `folder`."""
    rng = random.Random(seed)
    problems = unique(draw(rng), lambda problem: problem.question)
    test, train = (
        [as_question(problem.question, solution(problem), f"problem {index}") for index, problem in enumerate(taken)]
        for taken in (list(islice(problems, number)) for number in (TEST_ROWS, TRAIN_ROWS))
    )
    taught = [
        Question(DATA_SOURCE, "math", problem.question + INSTRUCTION, "").answered(solution(problem, rng))
        for problem in islice(problems, DEMONSTRATIONS)
    ]
    write_files(folder, test=test, train=train, taught=taught)


def as_question(question: str, answer: str, where: str) -> Question:
    """Adds the instruction on the answer's format. Raises UserError for an answer without a line `#### N`."""
    found = re.findall(r"#### *(-?\$?-?[0-9.,]+)", answer)
    if not found:
        raise UserError(f"{where}: the answer {answer[-80:]!r} has no number after ####, which is the ground truth")
    truth = found[-1].replace(",", "").replace("$", "").rstrip(".")
    return Question(DATA_SOURCE, "math", question + INSTRUCTION, truth, {"question": question, "answer": answer})


def draw(rng: random.Random) -> Iterator[Problem]:
    """Yields problems of all kinds with equal probability."""
    while True:
        kind = rng.choice(KINDS)
        numbers = {name: rng.randint(*limits) for name, limits in kind.numbers.items()}
        question = kind.text.format(N=rng.choice(NAMES), T=rng.choice(THINGS), **numbers)
        yield Problem(question, numbers["a"], tuple((sign, numbers[name]) for sign, name in kind.steps))


def solution(problem: Problem, careless: random.Random | None = None) -> str:
    """Returns one line per step, then `#### N`. `careless` adds random errors, which later steps build on."""
    lines, value = [], problem.start
    for sign, number in problem.steps:
        if careless is not None and careless.random() < WRONG_SIGN:
            sign = careless.choice("+-*")
        result = OPERATIONS[sign](value, number)
        if careless is not None and careless.random() < MISCALCULATED:
            result = max(0, result + careless.choice((-10, -2, -1, 1, 2, 10)))
        lines.append(f"{value}{sign}{number}={result}")
        value = result
    is_marked = careless is None or careless.random() >= FORGOTTEN_MARK
    return "\n".join([*lines, f"{'#### ' if is_marked else ''}{value}"])
