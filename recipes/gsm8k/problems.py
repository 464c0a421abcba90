"""Word problems of one and two steps, made by rule, with solutions as GSM8K writes them.

    Tom has 12 apples. Tom gets 5 more and gives away 8. How many apples are left?   12+5=17
                                                                                    17-8=9
                                                                                    #### 9

The demonstrations, from which a model learns before it is reinforced, come from a careless teacher, who miscalculates,
takes the wrong sign and forgets `####`, each with a probability of its own. No question stands in two files. Same seed,
same bytes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recipes.gsm8k.rows import INSTRUCTION, gsm8k_row

NAMES = ("Tom", "Ana", "Sam", "Eva", "Ben", "Lia", "Max", "Zoe")
THINGS = ("apples", "books", "coins", "cards", "eggs", "pens", "shells", "stamps")
TEST_ROWS, TRAIN_ROWS, DEMONSTRATIONS = 512, 4096, 8192
MISCALCULATED, WRONG_SIGN, FORGOTTEN_MARK = 0.15, 0.08, 0.1

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


@dataclass(frozen=True)
class Kind:
    """Problems of one form. text: the question. steps: (sign, number) of each step, applied to `a` in turn.

    numbers: of a, b, c from least to most.
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
"""What is one token for the model that this recipe brings along."""


@dataclass(frozen=True)
class Problem:
    """kind, with its numbers."""

    question: str
    start: int
    steps: tuple[tuple[str, int], ...]


def write_data(folder: Path, seed: int) -> None:
    """Writes test.parquet, train.parquet (verl's row schema) and demonstrations.parquet (chats) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    problems = _unique(draw(rng))
    for split, number in (("test", TEST_ROWS), ("train", TRAIN_ROWS)):
        taken = list(islice(problems, number))
        rows = [gsm8k_row(problem.question, solution(problem), split, index) for index, problem in enumerate(taken)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    taught = [
        {
            "messages": [
                {"role": "user", "content": problem.question + INSTRUCTION},
                {"role": "assistant", "content": careless(problem, rng)},
            ]
        }
        for problem in islice(problems, DEMONSTRATIONS)
    ]
    pq.write_table(pa.Table.from_pylist(taught), folder / "demonstrations.parquet")


def draw(rng: random.Random) -> Iterator[Problem]:
    """Problems of all kinds, about as many of each."""
    while True:
        kind = rng.choice(KINDS)
        numbers = {name: rng.randint(*limits) for name, limits in kind.numbers.items()}
        question = kind.text.format(N=rng.choice(NAMES), T=rng.choice(THINGS), **numbers)
        yield Problem(question, numbers["a"], tuple((sign, numbers[name]) for sign, name in kind.steps))


def solution(problem: Problem) -> str:
    """A line for each step, and `#### N`."""
    lines, value = [], problem.start
    for sign, number in problem.steps:
        result = OPERATIONS[sign](value, number)
        lines.append(f"{value}{sign}{number}={result}")
        value = result
    return "\n".join([*lines, f"#### {value}"])


def careless(problem: Problem, rng: random.Random) -> str:
    """A solution by somebody who goes on with what was wrong."""
    lines, value = [], problem.start
    for right_sign, number in problem.steps:
        sign = rng.choice("+-*") if rng.random() < WRONG_SIGN else right_sign
        result = OPERATIONS[sign](value, number)
        if rng.random() < MISCALCULATED:
            result = max(0, result + rng.choice((-10, -2, -1, 1, 2, 10)))
        lines.append(f"{value}{sign}{number}={result}")
        value = result
    mark = "" if rng.random() < FORGOTTEN_MARK else "#### "
    return "\n".join([*lines, f"{mark}{value}"])


def _unique(problems: Iterator[Problem]) -> Iterator[Problem]:
    """Each question once."""
    seen: set[str] = set()
    for problem in problems:
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem
