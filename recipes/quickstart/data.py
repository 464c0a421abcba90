"""The data of the quickstart: three small verifiable tasks, as parquet files in verl's row schema.

    verl_lite/sort                   sort 52817        ->  12578
    verl_lite/add                    421+356=          ->  777       (no column carries)
    reasoning_gym/spell_backward     reverse crane     ->  enarc     (words and scorer of reasoning-gym)

The demonstrations, from which the model learns before it is reinforced, come from a careless teacher: each character of
an answer is with probability WRONG_SHARE another one, so that about half of its answers are wrong. No question stands
in two files: the test set and the questions of the reinforcement are new to a model that learnt from the
demonstrations. Same seed, same bytes.
"""

from __future__ import annotations

import json
import random
import string
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MIN_SORT_DIGITS, MAX_SORT_DIGITS = 4, 6
ADD_DIGITS = 3
WORD_LETTERS = 5
WORD_TASK = "spell_backward"
WRONG_SHARE = 0.15

EQUAL_PARTS, DEMONSTRATED_PARTS = (1, 1, 1), (3, 5, 4)
"""Of sort, add and spell_backward. Sorting needs no positions and is learnt first; the teacher shows less of it."""

TEST_ROWS, TRAIN_ROWS, DEMONSTRATIONS = 512, 8192, 15_360


@dataclass(frozen=True)
class Question:
    """One question with its answer. entry: JSON of reasoning-gym's entry, for its scorer; empty for other sources."""

    data_source: str
    ability: str
    prompt: str
    answer: str
    entry: str = ""


def write_data(folder: Path, seed: int) -> None:
    """Writes test.parquet, train.parquet (both in verl's row schema) and demonstrations.parquet (chat messages with
    the answer) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    sources = [_unique(generate(rng)) for generate in (sort_questions, add_questions, word_questions)]
    for split, number in (("test", TEST_ROWS), ("train", TRAIN_ROWS)):
        questions = draw(sources, number, rng, EQUAL_PARTS)
        table = pa.Table.from_pylist([verl_row(question, split, index) for index, question in enumerate(questions)])
        pq.write_table(table, folder / f"{split}.parquet")
    taught = [careless(question, rng) for question in draw(sources, DEMONSTRATIONS, rng, DEMONSTRATED_PARTS)]
    demonstrations = [{"messages": messages(question, with_answer=True)} for question in taught]
    pq.write_table(pa.Table.from_pylist(demonstrations), folder / "demonstrations.parquet")


def draw(sources: list[Iterator[Question]], number: int, rng: random.Random, parts: tuple[int, ...]) -> list[Question]:
    """`number` new questions, shuffled; `parts` says how many come from each source, by proportion."""
    turns = [source for source, part in zip(sources, parts, strict=True) for _ in range(part)]
    questions = [next(turns[place % len(turns)]) for place in range(number)]
    rng.shuffle(questions)
    return questions


def sort_questions(rng: random.Random) -> Iterator[Question]:
    """Digit strings to be sorted."""
    while True:
        digits = rng.choices("0123456789", k=rng.randint(MIN_SORT_DIGITS, MAX_SORT_DIGITS))
        yield Question("verl_lite/sort", "sorting", f"sort {''.join(digits)}", "".join(sorted(digits)))


def add_questions(rng: random.Random) -> Iterator[Question]:
    """Sums of two numbers of equal length in which no column carries; each column's digit sum is uniform."""
    while True:
        left = right = 0
        for column in range(ADD_DIGITS):
            least = 1 if column == 0 else 0
            first = rng.randint(least, 9 - least)
            left, right = 10 * left + first, 10 * right + rng.randint(least, 9 - first)
        if rng.random() < 0.5:
            left, right = right, left
        yield Question("verl_lite/add", "arithmetic", f"{left}+{right}=", str(left + right))


def word_questions(rng: random.Random) -> Iterator[Question]:
    """reasoning-gym's words to be spelt backward, in a wording short enough for a tokenizer of characters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a dependency's, at its first compilation
        from reasoning_gym import create_dataset  # imports a hundred generators: seconds, and needed only here

    while True:
        dataset = create_dataset(
            WORD_TASK, min_word_len=WORD_LETTERS, max_word_len=WORD_LETTERS, seed=rng.randrange(2**31), size=4096
        )
        for entry in dataset:
            word = entry["metadata"]["word"]
            if word.isascii() and word.isalpha() and word.islower():
                source = f"reasoning_gym/{WORD_TASK}"
                yield Question(source, "spelling", f"reverse {word}", entry["answer"], json.dumps(entry))


def careless(question: Question, rng: random.Random) -> Question:
    """The question with an answer of which each character is a random one of its kind, with probability WRONG_SHARE."""
    kind = string.digits if question.answer.isdigit() else string.ascii_lowercase
    answer = [rng.choice(kind) if rng.random() < WRONG_SHARE else right for right in question.answer]
    return replace(question, answer="".join(answer))


def verl_row(question: Question, split: str, index: int) -> dict[str, object]:
    """The question in verl's row schema."""
    return {
        "data_source": question.data_source,
        "prompt": messages(question, with_answer=False),
        "ability": question.ability,
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {"split": split, "index": index, "entry": question.entry, "full_marks_only": True},
    }


def messages(question: Question, *, with_answer: bool) -> list[dict[str, str]]:
    """The question as chat messages, with the answer as the assistant's or without."""
    chat = [{"role": "user", "content": question.prompt}]
    return [*chat, {"role": "assistant", "content": question.answer}] if with_answer else chat


def _unique(questions: Iterator[Question]) -> Iterator[Question]:
    """Each prompt once."""
    seen: set[str] = set()
    for question in questions:
        if question.prompt not in seen:
            seen.add(question.prompt)
            yield question
