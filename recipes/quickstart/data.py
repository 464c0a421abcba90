"""Generates the data of the quickstart: three small verifiable tasks, as parquet files in verl's row schema.

    verl_lite/sort                   sort 52817        ->  12578
    verl_lite/add                    421+356=          ->  777       (no column carries)
    reasoning_gym/spell_backward     reverse crane     ->  enarc     (words and scorer of reasoning-gym)

The same seed gives the same bytes.
"""

import json
import random
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

from recipes.made_data import Question, careless_demonstration, reasoning_gym_entries, unique, write_files

MIN_SORT_DIGITS = 4
MAX_SORT_DIGITS = 6
# the lengths of sums and words are fixed: a model of this size does not learn positions in words of mixed lengths
ADD_DIGITS = 3
WORD_LETTERS = 5
WORD_TASK = "spell_backward"
WRONG_SHARE = 0.15
"""Share of wrong characters in demonstrations, with which about half of the demonstrated answers are wrong."""

EQUAL_PARTS = (1, 1, 1)
DEMONSTRATED_PARTS = (3, 5, 4)
"""Proportions of sort, add and spell_backward. Demonstrations contain less sorting, which is learnt first because it
does not depend on positions."""

Sources = list[Iterator[Question]]
"""Iterators over the questions of each task."""

TEST_ROWS = 512
TRAIN_ROWS = 8192
DEMONSTRATIONS = 15_360


def write_data(folder: Path, seed: int, wrong_share: float = WRONG_SHARE) -> None:
    """Writes test.parquet, train.parquet and demonstrations.parquet into `folder`.

    Args:
        folder: Folder of the files.
        seed: Seed of all random numbers.
        wrong_share: Share of wrong characters in the demonstrations.
    """
    rng = random.Random(seed)
    sources = []
    for questions in (sort_questions(rng), add_questions(rng), word_questions(rng)):
        sources.append(unique(questions, lambda question: question.prompt))

    # the three files share one iterator per task, so that no question is in two of them
    test = draw(sources, TEST_ROWS, rng, EQUAL_PARTS)
    train = draw(sources, TRAIN_ROWS, rng, EQUAL_PARTS)
    demonstrated = draw(sources, DEMONSTRATIONS, rng, DEMONSTRATED_PARTS)

    taught = [careless_demonstration(question, wrong_share, rng) for question in demonstrated]
    write_files(folder, test=test, train=train, taught=taught)


def draw(sources: Sources, number: int, rng: random.Random, parts: tuple[int, ...]) -> list[Question]:
    """Draws `number` new questions from the sources in the proportions `parts`, and shuffles them."""
    turns: Sources = []
    for source, part in zip(sources, parts, strict=True):
        turns += [source] * part

    # in turn and not at random, so that the proportions are exact
    questions = []
    for source in islice(cycle(turns), number):
        questions.append(next(source))
    rng.shuffle(questions)
    return questions


def _question(source: str, ability: str, prompt: str, answer: str, entry: str = "") -> Question:
    """Builds a question.

    Args:
        source: The data_source, which selects the scorer.
        ability: Kind of the question.
        prompt: Text of the question.
        answer: The right answer.
        entry: JSON of reasoning-gym's entry, which its scorer reads; empty for other sources.
    """
    # partial scores for words made the greedy answers worse
    extra = {"entry": entry, "full_marks_only": True}
    return Question(source, ability, prompt, answer, extra)


def sort_questions(rng: random.Random) -> Iterator[Question]:
    """Yields digit strings to be sorted."""
    while True:
        length = rng.randint(MIN_SORT_DIGITS, MAX_SORT_DIGITS)
        digits = "".join(rng.choices("0123456789", k=length))
        answer = "".join(sorted(digits))
        yield _question("verl_lite/sort", "sorting", f"sort {digits}", answer)


def add_questions(rng: random.Random) -> Iterator[Question]:
    """Yields sums of two numbers of equal length in which no column carries; each column's digit sum is uniform."""
    while True:
        left = 0
        right = 0
        for column in range(ADD_DIGITS):
            # a number does not begin with 0
            least = 1 if column == 0 else 0
            first = rng.randint(least, 9 - least)
            second = rng.randint(least, 9 - first)
            left = 10 * left + first
            right = 10 * right + second

        # the second digit is at most 9 less the first, so that the first number tends to be larger
        if rng.random() < 0.5:
            left, right = right, left
        answer = str(left + right)
        yield _question("verl_lite/add", "arithmetic", f"{left}+{right}=", answer)


def word_questions(rng: random.Random) -> Iterator[Question]:
    """Yields reasoning-gym's words to be spelt backward, with a prompt that is short for a character tokenizer."""
    source = f"reasoning_gym/{WORD_TASK}"
    while True:
        entries = reasoning_gym_entries(
            WORD_TASK,
            min_word_len=WORD_LETTERS,
            max_word_len=WORD_LETTERS,
            seed=rng.randrange(2**31),
            size=4096,
        )
        for entry in entries:
            word = entry["metadata"]["word"]
            if word.isascii() and word.isalpha() and word.islower():
                yield _question(source, "spelling", f"reverse {word}", entry["answer"], json.dumps(entry))
