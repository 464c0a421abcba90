"""Generates the data of the quickstart: three small verifiable tasks, as parquet files in verl's row schema.

    verl_lite/sort                   sort 52817        ->  12578
    verl_lite/add                    421+356=          ->  777       (no column carries)
    reasoning_gym/spell_backward     reverse crane     ->  enarc     (words and scorer of reasoning-gym)

The same seed gives the same bytes.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from recipes.made_data import Question, careless, reasoning_gym_entries, unique, write_files

MIN_SORT_DIGITS, MAX_SORT_DIGITS = 4, 6
ADD_DIGITS = 3
WORD_LETTERS = 5
WORD_TASK = "spell_backward"
WRONG_SHARE = 0.15
"""Share of wrong characters in demonstrations, with which about half of the demonstrated answers are wrong."""

EQUAL_PARTS, DEMONSTRATED_PARTS = (1, 1, 1), (3, 5, 4)
"""Proportions of sort, add and spell_backward. Demonstrations contain less sorting, which is learnt first because it
does not depend on positions."""

TEST_ROWS, TRAIN_ROWS, DEMONSTRATIONS = 512, 8192, 15_360


def write_data(folder: Path, seed: int, wrong_share: float = WRONG_SHARE) -> None:
    """Writes test.parquet, train.parquet and demonstrations.parquet into `folder`. wrong_share: share of wrong
    characters in the demonstrations."""
    rng = random.Random(seed)
    generators = (sort_questions, add_questions, word_questions)
    sources = [unique(generate(rng), lambda question: question.prompt) for generate in generators]
    test, train = (draw(sources, number, rng, EQUAL_PARTS) for number in (TEST_ROWS, TRAIN_ROWS))
    shown = draw(sources, DEMONSTRATIONS, rng, DEMONSTRATED_PARTS)
    taught = (question.answered(careless(question.answer, wrong_share, rng)) for question in shown)
    write_files(folder, test=test, train=train, taught=taught)


def draw(sources: list[Iterator[Question]], number: int, rng: random.Random, parts: tuple[int, ...]) -> list[Question]:
    """Draws `number` new questions from the sources in the proportions `parts`, and shuffles them."""
    turns = [source for source, part in zip(sources, parts, strict=True) for _ in range(part)]
    questions = [next(turns[place % len(turns)]) for place in range(number)]
    rng.shuffle(questions)
    return questions


def _question(source: str, ability: str, prompt: str, answer: str, entry: str = "") -> Question:
    """Builds a question. entry: JSON of reasoning-gym's entry, for its scorer; empty for other sources."""
    return Question(source, ability, prompt, answer, {"entry": entry, "full_marks_only": True})


def sort_questions(rng: random.Random) -> Iterator[Question]:
    """Yields digit strings to be sorted."""
    while True:
        digits = rng.choices("0123456789", k=rng.randint(MIN_SORT_DIGITS, MAX_SORT_DIGITS))
        yield _question("verl_lite/sort", "sorting", f"sort {''.join(digits)}", "".join(sorted(digits)))


def add_questions(rng: random.Random) -> Iterator[Question]:
    """Yields sums of two numbers of equal length in which no column carries; each column's digit sum is uniform."""
    while True:
        left = right = 0
        for column in range(ADD_DIGITS):
            least = 1 if column == 0 else 0
            first = rng.randint(least, 9 - least)
            left = 10 * left + first
            right = 10 * right + rng.randint(least, 9 - first)
        if rng.random() < 0.5:
            left, right = right, left
        yield _question("verl_lite/add", "arithmetic", f"{left}+{right}=", str(left + right))


def word_questions(rng: random.Random) -> Iterator[Question]:
    """Yields reasoning-gym's words to be spelt backward, with a prompt that is short for a character tokenizer."""
    lengths = {"min_word_len": WORD_LETTERS, "max_word_len": WORD_LETTERS}
    while True:
        for entry in reasoning_gym_entries(WORD_TASK, **lengths, seed=rng.randrange(2**31), size=4096):
            word, source = entry["metadata"]["word"], f"reasoning_gym/{WORD_TASK}"
            if word.isascii() and word.isalpha() and word.islower():
                yield _question(source, "spelling", f"reverse {word}", entry["answer"], json.dumps(entry))
