"""Shared code of recipes with generated data: converts questions to rows, corrupts demonstrations, writes files.

The demonstrations for the warm start contain wrong answers at a rate that the recipe sets. No question appears in two
files, so test and training questions are new to the model after its warm start.
"""

import random
import string
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """One question with its answer. extra: entries of extra_info in addition to split and index."""

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
        chat = [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": answer}]
        return {"messages": chat}


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


def careless(answer: str, wrong_share: float, rng: random.Random) -> str:
    """Replaces each digit and letter of the answer by a random digit or letter with probability `wrong_share`."""
    return "".join(
        rng.choice(string.digits if right.isdigit() else string.ascii_lowercase)
        if right != "-" and rng.random() < wrong_share
        else right
        for right in answer
    )


def unique(things: Iterable[T], key: Callable[[T], Hashable]) -> Iterator[T]:
    """Yields the things whose key did not occur before."""
    seen: set[Hashable] = set()
    for thing in things:
        if key(thing) not in seen:
            seen.add(key(thing))
            yield thing


def reasoning_gym_entries(task: str, **arguments: Any) -> Any:
    """Creates the dataset of a reasoning-gym task. arguments: arguments of its generator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # raised by a dependency when it is first compiled
        from reasoning_gym import create_dataset  # imported here, because it takes seconds

    return create_dataset(task, **arguments)
