"""Shared code of recipes with generated data: converts questions to rows, corrupts demonstrations, writes files.

The demonstrations for the warm start contain wrong answers at a rate that the recipe sets. No question appears in two
files, so test and training questions are new to the model after its warm start.
"""

import random
import string
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

T = TypeVar("T")

Row = dict[str, object]
"""A row of a parquet file: its columns by name."""


class GymEntry(TypedDict):
    """The fields of a reasoning-gym entry that the recipes read."""

    question: str
    answer: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One question with its answer.

    Attributes:
        extra: Entries of extra_info in addition to split and index.
    """

    data_source: str
    ability: str
    prompt: str
    answer: str
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)

    def row(self, split: str, index: int) -> Row:
        """Returns the question as a row in verl's schema."""
        user = {"role": "user", "content": self.prompt}
        return {
            "data_source": self.data_source,
            "prompt": [user],
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": self.answer},
            "extra_info": {"split": split, "index": index, **self.extra},
        }

    def answered(self, answer: str) -> Row:
        """Returns the question with this answer as a row for supervised training."""
        user = {"role": "user", "content": self.prompt}
        assistant = {"role": "assistant", "content": answer}
        return {"messages": [user, assistant]}


def write_parquet(rows: Sequence[Mapping[str, object]], file: Path) -> None:
    """Writes rows as a parquet file, in a folder that is created if necessary."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def write_files(
    folder: Path,
    *,
    test: list[Question],
    train: list[Question],
    taught: list[Row],
) -> None:
    """Writes test.parquet and train.parquet (verl's row schema) and demonstrations.parquet (chats) into `folder`."""
    splits = {"test": test, "train": train}
    for split, questions in splits.items():
        rows = [question.row(split, index) for index, question in enumerate(questions)]
        write_parquet(rows, folder / f"{split}.parquet")
    write_parquet(taught, folder / "demonstrations.parquet")


def write_different_questions(
    folder: Path,
    seed: int,
    draw: Callable[[random.Random], Iterator[Question]],
    demonstrate: Callable[[Question, random.Random], Row],
    *,
    test_rows: int,
    train_rows: int,
    demonstrations: int,
) -> None:
    """Draws different questions for the three files and writes them into `folder`.

    Args:
        folder: Folder of the files, see `write_files`.
        seed: Seed of all random numbers.
        draw: Yields questions in random order, in which a question may occur twice.
        demonstrate: Returns the demonstration of a question as a row for supervised training.
        test_rows: Number of test questions.
        train_rows: Number of training questions.
        demonstrations: Number of further questions that are demonstrated.
    """
    rng = random.Random(seed)
    different = unique(draw(rng), lambda question: question.prompt)
    test = list(islice(different, test_rows))
    train = list(islice(different, train_rows))

    # all questions are drawn before the first demonstration, because both use the same random numbers
    demonstrated = list(islice(different, demonstrations))
    taught = [demonstrate(question, rng) for question in demonstrated]
    write_files(folder, test=test, train=train, taught=taught)


def careless_demonstration(question: Question, wrong_share: float, rng: random.Random) -> Row:
    """Returns the question with a `careless` copy of its answer as a row for supervised training."""
    answer = careless(question.answer, wrong_share, rng)
    return question.answered(answer)


def careless(answer: str, wrong_share: float, rng: random.Random) -> str:
    """Replaces each character of the answer except "-" with probability `wrong_share`.

    A random digit replaces a digit, and a random lower-case letter replaces any other character.
    """
    characters = ""
    for right in answer:
        if right == "-" or rng.random() >= wrong_share:
            characters += right
            continue
        alphabet = string.digits if right.isdigit() else string.ascii_lowercase
        characters += rng.choice(alphabet)
    return characters


def unique(things: Iterable[T], key: Callable[[T], Hashable]) -> Iterator[T]:
    """Yields the things whose key did not occur before."""
    seen: set[Hashable] = set()
    for thing in things:
        identity = key(thing)
        if identity not in seen:
            seen.add(identity)
            yield thing


def reasoning_gym_entries(task: str, **arguments: object) -> Iterable[GymEntry]:
    """Creates the dataset of a reasoning-gym task. `arguments` go to the task's generator."""
    with warnings.catch_warnings():
        # raised by a dependency when it is first compiled
        warnings.simplefilter("ignore", SyntaxWarning)
        # imported here, because it takes seconds
        from reasoning_gym import create_dataset

    entries: Iterable[GymEntry] = create_dataset(task, **arguments)
    return entries
