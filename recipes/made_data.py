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

    def row(self, split: str, index: int) -> dict[str, object]:
        """Returns the question as a row in verl's schema."""
        return {
            "data_source": self.data_source,
            "prompt": [{"role": "user", "content": self.prompt}],
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": self.answer},
            "extra_info": {"split": split, "index": index, **self.extra},
        }

    def answered(self, answer: str) -> dict[str, object]:
        """Returns the question with this answer as a row for supervised training."""
        user = {"role": "user", "content": self.prompt}
        assistant = {"role": "assistant", "content": answer}
        return {"messages": [user, assistant]}


def write_files(
    folder: Path, *, test: Sequence[Question], train: Sequence[Question], taught: Iterable[dict[str, object]]
) -> None:
    """Writes test.parquet and train.parquet (verl's row schema) and demonstrations.parquet (chats) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {
        "test": [question.row("test", index) for index, question in enumerate(test)],
        "train": [question.row("train", index) for index, question in enumerate(train)],
        "demonstrations": list(taught),
    }
    for name, table in rows.items():
        pq.write_table(pa.Table.from_pylist(table), folder / f"{name}.parquet")


def write_different_questions(
    folder: Path,
    questions: Iterator[Question],
    demonstrate: Callable[[Question], dict[str, object]],
    *,
    test_rows: int,
    train_rows: int,
    demonstrations: int,
) -> None:
    """Draws different questions for the three files and writes them into `folder`.

    Args:
        folder: Folder of the files, see `write_files`.
        questions: Questions in random order, in which a question may occur twice.
        demonstrate: Returns the demonstration of a question as a row for supervised training.
        test_rows: Number of test questions.
        train_rows: Number of training questions.
        demonstrations: Number of further questions that are demonstrated.
    """
    different = unique(questions, lambda question: question.prompt)
    test = list(islice(different, test_rows))
    train = list(islice(different, train_rows))

    # All questions are drawn before the first demonstration: both use the same random numbers.
    demonstrated = list(islice(different, demonstrations))
    write_files(folder, test=test, train=train, taught=map(demonstrate, demonstrated))


def careless_demonstration(question: Question, wrong_share: float, rng: random.Random) -> dict[str, object]:
    """Returns the question with a `careless` copy of its answer as a row for supervised training."""
    return question.answered(careless(question.answer, wrong_share, rng))


def careless(answer: str, wrong_share: float, rng: random.Random) -> str:
    """Replaces each character of the answer except "-" with probability `wrong_share`.

    A random digit replaces a digit, and a random lower-case letter replaces any other character.
    """
    characters = []
    for right in answer:
        if right == "-" or rng.random() >= wrong_share:
            characters.append(right)
            continue
        alphabet = string.digits if right.isdigit() else string.ascii_lowercase
        characters.append(rng.choice(alphabet))
    return "".join(characters)


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
        warnings.simplefilter("ignore", SyntaxWarning)  # raised by a dependency when it is first compiled
        from reasoning_gym import create_dataset  # imported here, because it takes seconds

    entries: Iterable[GymEntry] = create_dataset(task, **arguments)
    return entries
