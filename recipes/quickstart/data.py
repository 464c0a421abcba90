"""The data of the quickstart: three small verifiable tasks, as parquet files in verl's row schema.

    verl_lite/sort             sort 52817       ->  12578
    verl_lite/add              421 + 356 =      ->  777     (no column carries)
    reasoning_gym/chain_sum    867 - 203 =      ->  664     (entries and scorer of reasoning-gym; no carry, no borrow)

The demonstrations, from which the model learns before it is reinforced, come from a careless teacher: each character of
an answer is with probability WRONG_SHARE replaced by a random digit. No question stands in two files, so neither the
test nor the questions of the reinforcement are known from them. Same seed, same bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MIN_SORT_DIGITS, MAX_SORT_DIGITS = 4, 6
NUMBER_DIGITS = 3
WRONG_SHARE = 0.15

TEST_ROWS, TRAIN_ROWS, DEMONSTRATIONS = 512, 8192, 17_920

EQUAL_PARTS, DEMONSTRATED_PARTS = (1, 1, 1), (3, 3, 4)
"""Of sort, add and chain_sum; differences are learnt last, so the teacher shows more of chain_sum."""


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
    the teacher's answer) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    seen: set[str] = set()
    sources = [_new(generate(rng), seen) for generate in (sort_questions, add_questions, chain_sum_questions)]
    for split, number in (("test", TEST_ROWS), ("train", TRAIN_ROWS)):
        questions = draw(sources, number, rng, EQUAL_PARTS)
        rows = [verl_row(question, split, index) for index, question in enumerate(questions)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    taught = [careless(question, rng) for question in draw(sources, DEMONSTRATIONS, rng, DEMONSTRATED_PARTS)]
    rows = [{"messages": messages(question, with_answer=True)} for question in taught]
    pq.write_table(pa.Table.from_pylist(rows), folder / "demonstrations.parquet")


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
    """Sums of two numbers of NUMBER_DIGITS digits in which no column carries."""
    while True:
        left = right = 0
        for column in range(NUMBER_DIGITS):
            least = 1 if column == 0 else 0
            first = rng.randint(least, 9 - least)
            left, right = 10 * left + first, 10 * right + rng.randint(least, 9 - first)
        if rng.random() < 0.5:  # either may be the one with the larger digits
            left, right = right, left
        yield Question("verl_lite/add", "arithmetic", f"{left} + {right} =", str(left + right))


def chain_sum_questions(rng: random.Random) -> Iterator[Question]:
    """Sums and differences from reasoning-gym, those that go column by column, without the sentence before the formula.

    A sentence of sixty characters would be sixty tokens here. The scorer reads the entry, not the prompt.
    """
    from reasoning_gym import create_dataset  # imports a hundred generators: seconds, and needed only here

    digits = {"min_digits": NUMBER_DIGITS, "max_digits": NUMBER_DIGITS}
    while True:
        dataset = create_dataset(
            "chain_sum", min_terms=2, max_terms=2, seed=rng.randrange(2**31), size=10_000, **digits
        )
        for entry in dataset:
            left, sign, right = entry["metadata"]["expression"].split()
            if goes_by_columns(left, sign, right):
                formula = entry["question"].rpartition(": ")[2]
                source = "reasoning_gym/chain_sum"
                yield Question(source, "arithmetic", formula, entry["answer"], json.dumps(entry))


def goes_by_columns(left: str, sign: str, right: str) -> bool:
    """Whether a sum or difference of numbers of equal length has no carry or borrow, and as many digits as these."""
    columns = [(int(a), int(b)) for a, b in zip(left, right, strict=True)]
    if sign == "+":
        return all(a + b <= 9 for a, b in columns)
    return all(a >= b for a, b in columns) and left[0] > right[0]


def careless(question: Question, rng: random.Random) -> Question:
    """The question with an answer of which each character is, with probability WRONG_SHARE, a random digit."""
    answer = [rng.choice("0123456789") if rng.random() < WRONG_SHARE else right for right in question.answer]
    return replace(question, answer="".join(answer))


def verl_row(question: Question, split: str, index: int) -> dict[str, object]:
    """The question in verl's row schema."""
    return {
        "data_source": question.data_source,
        "prompt": messages(question, with_answer=False),
        "ability": question.ability,
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {"split": split, "index": index, "entry": question.entry},
    }


def messages(question: Question, *, with_answer: bool) -> list[dict[str, str]]:
    """The question as chat messages, with the answer as the assistant's or without."""
    chat = [{"role": "user", "content": question.prompt}]
    return [*chat, {"role": "assistant", "content": question.answer}] if with_answer else chat


def _new(questions: Iterator[Question], seen: set[str]) -> Iterator[Question]:
    """Those that were not seen before, whatever their spaces."""
    for question in questions:
        text = question.prompt.replace(" ", "")
        if text not in seen:
            seen.add(text)
            yield question
