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
from collections.abc import Callable, Iterable, Iterator
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
TEST_ROWS = 512
TRAIN_ROWS = 4096
DEMONSTRATIONS = 8192
MISCALCULATED = 0.15
WRONG_SIGN = 0.08
FORGOTTEN_MARK = 0.1

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


@dataclass(frozen=True)
class Kind:
    """A template of problems.

    Attributes:
        text: Question with the placeholders N (name), T (thing) and a, b, c (numbers).
        steps: Sign and name of the second number of each step. The first step begins with `a`.
        numbers: Lower and upper limit of each number.
    """

    text: str
    steps: tuple[tuple[str, str], ...]
    numbers: dict[str, tuple[int, int]]


KINDS = (
    Kind(
        text="{N} has {a} {T}. {N} gets {b} more. How many {T} are there?",
        steps=(("+", "b"),),
        numbers={"a": (2, 40), "b": (2, 40)},
    ),
    Kind(
        text="{N} has {a} {T}. {N} gives away {b}. How many {T} are left?",
        steps=(("-", "b"),),
        numbers={"a": (20, 60), "b": (2, 19)},
    ),
    Kind(
        text="{N} has {a} bags of {b} {T}. How many {T} are there?",
        steps=(("*", "b"),),
        numbers={"a": (2, 9), "b": (2, 9)},
    ),
    Kind(
        text="{N} has {a} {T}. {N} gets {b} more and gives away {c}. How many {T} are left?",
        steps=(("+", "b"), ("-", "c")),
        numbers={"a": (10, 30), "b": (2, 20), "c": (2, 12)},
    ),
    Kind(
        text="{N} has {a} bags of {b} {T}. {N} gets {c} more. How many {T} are there?",
        steps=(("*", "b"), ("+", "c")),
        numbers={"a": (2, 9), "b": (2, 9), "c": (2, 20)},
    ),
)


def words_of_problems() -> tuple[str, ...]:
    """Returns the words of all problems, with the spaces before them."""
    words = set()
    for kind in KINDS:
        text = re.sub(r"\{\w\}", "", kind.text)
        words.update(re.findall(r" ?[A-Za-z]+", text))

    # the order of the words gives them their token ids
    fillers = {f" {thing}" for thing in THINGS}
    for name in NAMES:
        fillers |= {name, f" {name}"}
    return (*sorted(words), *sorted(fillers))


WORDS = (*words_of_problems(), INSTRUCTION, "####")
"""Strings that are one token each for the recipe's own model."""


@dataclass(frozen=True)
class Problem:
    """A problem with its numbers.

    Attributes:
        question: Text of the problem.
        start: Number with which the first step begins.
        steps: Sign and second number of each step.
    """

    question: str
    start: int
    steps: tuple[tuple[str, int], ...]


def write_data(folder: Path, seed: int) -> None:
    """Writes test.parquet, train.parquet and demonstrations.parquet into `folder`."""
    rng = random.Random(seed)
    # one iterator for the three files, so that no problem is in two of them
    problems = unique(draw(rng), lambda problem: problem.question)
    test = _right_questions(islice(problems, TEST_ROWS))
    train = _right_questions(islice(problems, TRAIN_ROWS))

    taught = []
    for problem in islice(problems, DEMONSTRATIONS):
        question = Question(DATA_SOURCE, "math", problem.question + INSTRUCTION, "")
        answer = solution(problem, rng)
        taught.append(question.answered(answer))
    write_files(folder, test=test, train=train, taught=taught)


def _right_questions(problems: Iterable[Problem]) -> list[Question]:
    questions = []
    for index, problem in enumerate(problems):
        answer = solution(problem)
        questions.append(as_question(problem.question, answer, f"problem {index}"))
    return questions


def as_question(question: str, answer: str, where: str) -> Question:
    """Adds the instruction on the answer's format.

    Args:
        question: Text of the problem.
        answer: Solution whose last line is `#### N`.
        where: Description of the row for the error message.

    Raises:
        UserError: The answer has no number after ####.
    """
    numbers = re.findall(r"#### *(-?\$?-?[0-9.,]+)", answer)
    if not numbers:
        raise UserError(f"{where}: the answer {answer[-80:]!r} has no number after ####, which is the ground truth")
    truth = numbers[-1].replace(",", "").replace("$", "").rstrip(".")
    extra = {"question": question, "answer": answer}
    return Question(DATA_SOURCE, "math", question + INSTRUCTION, truth, extra)


def draw(rng: random.Random) -> Iterator[Problem]:
    """Yields problems of all kinds with equal probability."""
    while True:
        kind = rng.choice(KINDS)
        numbers = {}
        for name, (low, high) in kind.numbers.items():
            numbers[name] = rng.randint(low, high)
        person = rng.choice(NAMES)
        thing = rng.choice(THINGS)

        question = kind.text.format(N=person, T=thing, **numbers)
        steps = [(sign, numbers[name]) for sign, name in kind.steps]
        yield Problem(question, numbers["a"], tuple(steps))


def solution(problem: Problem, careless: random.Random | None = None) -> str:
    """Returns one line per step, then `#### N`. `careless` adds random errors, which later steps build on."""
    lines = []
    value = problem.start
    for sign, number in problem.steps:
        # the step is then calculated with this sign
        if careless is not None and careless.random() < WRONG_SIGN:
            sign = careless.choice("+-*")
        result = OPERATIONS[sign](value, number)
        if careless is not None and careless.random() < MISCALCULATED:
            error = careless.choice((-10, -2, -1, 1, 2, 10))
            result = max(0, result + error)
        lines.append(f"{value}{sign}{number}={result}")
        value = result

    if careless is not None and careless.random() < FORGOTTEN_MARK:
        lines.append(str(value))
    else:
        lines.append(f"#### {value}")
    return "\n".join(lines)
