"""The questions of the recipe: three tasks of reasoning-gym at three levels each, in verl's row schema.

A level is a set of arguments of reasoning-gym's generator. A further task needs an entry in LEVELS, WEIGHTS and
DEMONSTRATED_TASKS; TOKENS only shortens the prompts for the small model. The same seed gives the same bytes.
"""

import json
import random
from pathlib import Path

from recipes.made_data import Question, careless_demonstration, reasoning_gym_entries, unique, write_files

LEVELS: dict[str, tuple[dict[str, int], ...]] = {
    "spell_backward": (
        {"min_word_len": 3, "max_word_len": 4},
        {"min_word_len": 5, "max_word_len": 6},
        {"min_word_len": 7, "max_word_len": 8},
    ),
    "chain_sum": (
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    ),
    "letter_counting": (
        {"min_words": 1, "max_words": 1},
        {"min_words": 2, "max_words": 2},
        {"min_words": 4, "max_words": 4},
    ),
}

WEIGHTS = {"spell_backward": 0.4, "chain_sum": 0.4, "letter_counting": 0.2}
"""Share of each task in a batch."""

TOKENS = (
    "Spell this word backward (example: sun -> nus): ",
    "State the final answer to the following arithmetic problem: ",
    'How many times does the letter "',
    '" appear in the text: "',
)
"""Strings that are one token each for the recipe's own model."""

POOL = 2400
"""Maximum number of questions per task and level; there are fewer single-digit sums."""

Pools = dict[tuple[str, int], list[Question]]
"""Training questions by task and level."""

TEST_SHARE = 0.2
TEST_MOST = 48
DEMONSTRATIONS = 12_288
# with equal shares, and two-digit sums as level 2, chain_sum began with 5% of right answers and did not learn
DEMONSTRATED_TASKS = {"spell_backward": 3, "chain_sum": 3, "letter_counting": 1}
DEMONSTRATED_LEVELS = (5, 2, 1)
WRONG_SHARE = 0.12


def source(task: str) -> str:
    """Returns the data_source of a task."""
    return f"reasoning_gym/{task}"


def write_data(folder: Path, seed: int) -> None:
    """Writes test.parquet, train.parquet and demonstrations.parquet into `folder`."""
    rng = random.Random(seed)
    pools: Pools = {}
    test: list[Question] = []
    train: list[Question] = []
    for task, levels in LEVELS.items():
        for level in range(1, len(levels) + 1):
            pool = questions(task, level, rng.randrange(2**31))
            # a share, because some pools are small
            held_out = min(TEST_MOST, int(TEST_SHARE * len(pool)))
            test += pool[:held_out]
            train += pool[held_out:]
            pools[task, level] = pool[held_out:]
    rng.shuffle(test)
    rng.shuffle(train)

    # demonstrations repeat training questions, but never show a test question
    taught = []
    for _ in range(DEMONSTRATIONS):
        question = draw(pools, rng)
        taught.append(careless_demonstration(question, WRONG_SHARE, rng))
    write_files(folder, test=test, train=train, taught=taught)


def questions(task: str, level: int, seed: int) -> list[Question]:
    """Returns up to POOL different questions of one level, in ASCII for the small model's tokenizer."""
    arguments = LEVELS[task][level - 1]
    # more entries than questions, because entries repeat and some are not ASCII
    entries = reasoning_gym_entries(task, seed=seed, size=2 * POOL, **arguments)
    pool = []
    for entry in unique(entries, lambda entry: entry["question"]):
        text = entry["question"]
        if not text.isascii():
            continue
        extra = {"level": level, "entry": json.dumps(entry), "full_marks_only": True}
        pool.append(Question(source(task), task, text, entry["answer"], extra))
        if len(pool) == POOL:
            break
    return pool


def draw(pools: Pools, rng: random.Random) -> Question:
    """Draws a question for a demonstration, weighted by DEMONSTRATED_TASKS and DEMONSTRATED_LEVELS."""
    tasks = list(LEVELS)
    task_weights = [DEMONSTRATED_TASKS[task] for task in tasks]
    [task] = rng.choices(tasks, weights=task_weights)

    num_levels = len(LEVELS[task])
    levels = range(1, num_levels + 1)
    [level] = rng.choices(levels, weights=DEMONSTRATED_LEVELS[:num_levels])
    return rng.choice(pools[task, level])
