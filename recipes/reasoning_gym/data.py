"""Questions of reasoning-gym in its own words, by task and level, as parquet files in verl's row schema.

The demonstrations, from which the small model learns before it is reinforced, are of the lower levels above all and
come from a careless teacher, who writes each character of an answer wrong with probability WRONG_SHARE. Test questions
stand in no other file. Same seed, same bytes.
"""

from __future__ import annotations

import json
import random
import string
import warnings
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recipes.reasoning_gym.tasks import LEVELS, source

POOL = 2400
"""Questions of a task and level at most; of single-digit sums there are fewer."""

TEST_SHARE, TEST_MOST = 0.2, 48
DEMONSTRATIONS = 12_288
DEMONSTRATED_TASKS = {"spell_backward": 3, "chain_sum": 3, "letter_counting": 1}
DEMONSTRATED_LEVELS = (5, 2, 1)
WRONG_SHARE = 0.12


@dataclass(frozen=True)
class Question:
    """level: from 1. entry: reasoning-gym's, as JSON, for its scorer."""

    task: str
    level: int
    prompt: str
    answer: str
    entry: str


def write_data(folder: Path, seed: int) -> None:
    """Writes test.parquet, train.parquet (verl's row schema) and demonstrations.parquet (chats) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    train: dict[tuple[str, int], list[Question]] = {}
    test: list[Question] = []
    for task, levels in LEVELS.items():
        for level in range(1, len(levels) + 1):
            pool = questions(task, level, rng.randrange(2**31))
            held_out = min(TEST_MOST, int(TEST_SHARE * len(pool)))
            test += pool[:held_out]
            train[task, level] = pool[held_out:]
    for split, rows in (("test", test), ("train", [question for pool in train.values() for question in pool])):
        rng.shuffle(rows)
        table = pa.Table.from_pylist([verl_row(question, split, index) for index, question in enumerate(rows)])
        pq.write_table(table, folder / f"{split}.parquet")
    taught = [{"messages": demonstration(draw(train, rng), rng)} for _ in range(DEMONSTRATIONS)]
    pq.write_table(pa.Table.from_pylist(taught), folder / "demonstrations.parquet")


def questions(task: str, level: int, seed: int) -> list[Question]:
    """Different questions of one level, POOL of them where there are so many; in ASCII, as the small model reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a dependency's, at its first compilation
        from reasoning_gym import create_dataset  # imports a hundred generators: seconds, and needed only here

    found: dict[str, Question] = {}
    for entry in create_dataset(task, seed=seed, size=2 * POOL, **LEVELS[task][level - 1]):
        prompt, answer = entry["question"], entry["answer"]
        if prompt.isascii() and prompt not in found and len(found) < POOL:
            found[prompt] = Question(task, level, prompt, answer, json.dumps(entry))
    return list(found.values())


def draw(train: dict[tuple[str, int], list[Question]], rng: random.Random) -> Question:
    """A question to demonstrate, by DEMONSTRATED_TASKS and DEMONSTRATED_LEVELS."""
    [task] = rng.choices(list(LEVELS), weights=[DEMONSTRATED_TASKS[task] for task in LEVELS])
    [level] = rng.choices(range(1, len(LEVELS[task]) + 1), weights=DEMONSTRATED_LEVELS[: len(LEVELS[task])])
    return rng.choice(train[task, level])


def demonstration(question: Question, rng: random.Random) -> list[dict[str, str]]:
    """The question with a careless answer, as a chat."""
    answer = "".join(
        rng.choice(string.digits if right.isdigit() else string.ascii_lowercase)
        if right != "-" and rng.random() < WRONG_SHARE
        else right
        for right in question.answer
    )
    return [{"role": "user", "content": question.prompt}, {"role": "assistant", "content": answer}]


def verl_row(question: Question, split: str, index: int) -> dict[str, object]:
    """The question in verl's row schema, with its level in extra_info."""
    return {
        "data_source": source(question.task),
        "prompt": [{"role": "user", "content": question.prompt}],
        "ability": question.task,
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {
            "split": split,
            "index": index,
            "level": question.level,
            "entry": question.entry,
            "full_marks_only": True,
        },
    }
