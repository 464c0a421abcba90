"""What recipes with data made by rule share: questions as rows, a careless teacher, files.

The demonstrations, from which a model learns before it is reinforced, come from a teacher whose answers are wrong as
often as the recipe says. No question stands in two files: what is tested and reinforced is new to the model.
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
    """One question with its answer. extra: entries of extra_info, beside split and index."""

    data_source: str
    ability: str
    prompt: str
    answer: str
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)

    def row(self, split: str, index: int) -> dict[str, object]:
        """In verl's row schema."""
        return {
            "data_source": self.data_source,
            "prompt": [{"role": "user", "content": self.prompt}],
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": self.answer},
            "extra_info": {"split": split, "index": index, **self.extra},
        }

    def answered(self, answer: str) -> dict[str, object]:
        """As a row of supervised training, with this answer."""
        chat = [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": answer}]
        return {"messages": chat}


def write_files(
    folder: Path, *, test: Sequence[Question], train: Sequence[Question], taught: Iterable[dict[str, object]]
) -> None:
    """test.parquet and train.parquet (verl's row schema) and demonstrations.parquet (chats), in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {
        "test": [question.row("test", index) for index, question in enumerate(test)],
        "train": [question.row("train", index) for index, question in enumerate(train)],
        "demonstrations": list(taught),
    }
    for name, table in rows.items():
        pq.write_table(pa.Table.from_pylist(table), folder / f"{name}.parquet")


def careless(answer: str, wrong_share: float, rng: random.Random) -> str:
    """The answer, each digit and letter of which is with this probability a random one of its kind."""
    return "".join(
        rng.choice(string.digits if right.isdigit() else string.ascii_lowercase)
        if right != "-" and rng.random() < wrong_share
        else right
        for right in answer
    )


def unique(things: Iterable[T], key: Callable[[T], Hashable]) -> Iterator[T]:
    """The first of those that have the same key."""
    seen: set[Hashable] = set()
    for thing in things:
        if key(thing) not in seen:
            seen.add(key(thing))
            yield thing


def reasoning_gym_entries(task: str, **arguments: Any) -> Any:
    """A dataset of reasoning-gym."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a dependency's, at its first compilation
        from reasoning_gym import create_dataset  # imports a hundred generators: seconds, and needed only here

    return create_dataset(task, **arguments)
