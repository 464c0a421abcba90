"""The tasks of the SmolLM2 recipes: questions as parquet files in verl's row schema, and their rewards.

    addition          What is 25 + 60? Reply with the number only.      1 if its last number is right
    arithmetic        tinker-cookbook's environment: What is 4 + 5?     1 if the first word is the number
    spell_backward    reasoning-gym, its own text and scorer            1 for full marks
    length            an instruction and a sentence                     -|50 - characters of the answer|
    reversed_text     a line of text to be reversed                     longest common subsequence ratio

No test question appears among the training questions. The same seed gives the same bytes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from importlib import resources
from itertools import islice, product
from pathlib import Path

from recipes.made_data import GymEntry, Question, Row, reasoning_gym_entries, unique, write_parquet
from verl_lite.rewards import register_reward

SEED = 1
TEST_ROWS = 512

LENGTH_GOAL = 50
"""Wanted number of characters of an answer, as in the chapter on GRPO of the Hugging Face course."""

ONE_SHOT = (
    {"role": "user", "content": "What is 4 + 5?"},
    {"role": "assistant", "content": "9"},
)
"""The example that precedes every question of tinker-cookbook's arithmetic environment."""


@dataclass(frozen=True)
class Task:
    """A task of this folder.

    Attributes:
        questions: Returns an iterator over different questions in random order.
        train_rows: Maximum number of training questions.
        prefix: Messages before the question.
        demonstrations: Number of further questions with their answers, for supervised fine-tuning.
    """

    questions: Callable[[random.Random], Iterator[Question]]
    train_rows: int = 8192
    prefix: Sequence[Mapping[str, str]] = ()
    demonstrations: int = 0

    def write(self, folder: Path, name: str) -> None:
        """Writes test.parquet with TEST_ROWS questions, train.parquet, and demonstrations.parquet if there are any."""
        # each task has random numbers of its own, so that a new task leaves the others' questions unchanged
        rng = random.Random(f"{SEED} {name}")
        # one iterator for all files, so that no question is in two of them
        different = unique(self.questions(rng), lambda question: question.prompt)
        folder.mkdir(parents=True)
        for split, number in (("test", TEST_ROWS), ("train", self.train_rows)):
            rows = self._rows(split, islice(different, number))
            write_parquet(rows, folder / f"{split}.parquet")

        # last, so that their number changes no other file
        if self.demonstrations:
            demonstrated = islice(different, self.demonstrations)
            chats = [question.answered(question.answer) for question in demonstrated]
            write_parquet(chats, folder / "demonstrations.parquet")

    def _rows(self, split: str, questions: Iterable[Question]) -> list[Row]:
        """Returns the questions as rows in verl's schema, with the messages of `prefix` before each of them."""
        rows = []
        for index, question in enumerate(questions):
            row = question.row(split, index)
            row["prompt"] = [*self.prefix, {"role": "user", "content": question.prompt}]
            rows.append(row)
        return rows


# ------------------------------------------------------------------------------------------------------------ addition


def addition_questions(rng: random.Random) -> Iterator[Question]:
    """Yields all sums of two numbers of two digits."""
    # few enough to list all of them, so that no question is drawn twice
    pairs = list(product(range(10, 100), repeat=2))
    rng.shuffle(pairs)
    for left, right in pairs:
        text = f"What is {left} + {right}? Reply with the number only."
        yield Question("smollm2/addition", "arithmetic", text, str(left + right))


def arithmetic_questions(rng: random.Random) -> Iterator[Question]:
    """Yields all sums of two numbers from 0 to 100, asked as in tinker-cookbook's arithmetic environment."""
    pairs = list(product(range(101), repeat=2))
    rng.shuffle(pairs)
    for left, right in pairs:
        text = f"What is {left} + {right}?"
        yield Question("smollm2/arithmetic", "arithmetic", text, str(left + right))


@register_reward("smollm2/addition")
def score_last_number(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Returns 1.0 if the last number of the answer is right.

    The untrained model never replies with the number only. It sometimes writes "18 + 10 = 28", which is a start. An
    answer that lists several numbers is not paid for more than one of them.
    """
    numbers = re.findall(r"[0-9]+(?:\.[0-9]+)?", solution_str)
    if not numbers:
        return 0.0
    return float(numbers[-1] == ground_truth)


@register_reward("smollm2/arithmetic")
def score_first_word(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Returns 1.0 if the first word of the answer is the number, as tinker-cookbook's environment does."""
    words = solution_str.split()
    if not words:
        return 0.0
    # Python's `int` also reads 1_000 and digits of other scripts, and refuses very long numbers
    if not re.fullmatch(r"[+-]?[0-9]{1,20}", words[0]):
        return 0.0
    return float(int(words[0]) == int(ground_truth))


# ------------------------------------------------------------------------------------------------------- reasoning-gym


def gym_questions(
    rng: random.Random, *, task: str, full_marks_only: bool = True, **arguments: object
) -> Iterator[Question]:
    """Yields questions of a reasoning-gym task with the text that the task itself gives them.

    Args:
        rng: Source of the seeds of the task's generator.
        task: Name of the task in reasoning-gym.
        full_marks_only: Whether an answer that the scorer gives less than 1 scores 0.
        **arguments: Settings of the generator, such as `max_word_len`.
    """
    while True:
        seed = rng.randrange(2**31)
        for entry in reasoning_gym_entries(task, seed=seed, size=4096, **arguments):
            yield gym_question(task, entry, full_marks_only)


def gym_question(task: str, entry: GymEntry, full_marks_only: bool = True) -> Question:
    """Returns the question of an entry, with the instruction to reply with nothing but the answer."""
    text = entry["question"].strip()
    prompt = f"{text}\nReply with the answer only."
    # the task's scorer reads the entry; a value in it that is not JSON, such as a date, becomes text
    extra = {"entry": json.dumps(entry, default=str), "full_marks_only": full_marks_only}
    return Question(f"reasoning_gym/{task}", task, prompt, str(entry["answer"]), extra)


# ------------------------------------------------------------------------------------------------- texts without a hub


def sentences() -> list[str]:
    """Returns the sentences of a story of 1889 that reasoning-gym contains, without very short and very long ones."""
    file = resources.files("reasoning_gym.data") / "in_the_year_2889.txt"
    story = file.read_text(encoding="utf-8")
    # the file has line breaks within sentences
    text = " ".join(story.split())
    parts = re.split(r"(?<=[.!?])\s+", text)
    return [part for part in parts if 20 <= len(part) <= 400 and part.isascii()]


def length_questions(rng: random.Random) -> Iterator[Question]:
    """Yields instructions about one or two sentences, whose content does not matter for the reward."""
    instructions = ("Summarize:", "Rewrite in your own words:", "What is this text about?", "Give this text a title:")
    texts = sentences()
    # the last start leaves room for two sentences
    starts = range(len(texts) - 1)
    choices = list(product(instructions, starts, (1, 2)))
    rng.shuffle(choices)
    for instruction, start, number in choices:
        text = " ".join(texts[start : start + number])
        yield Question("smollm2/length", "writing", f"{instruction} {text}", str(LENGTH_GOAL))


@register_reward("smollm2/length")
def score_length(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Returns the negative difference between the number of characters of the answer and the wanted number."""
    distance = abs(int(ground_truth) - len(solution_str))
    return -float(distance)


def reversed_questions(rng: random.Random) -> Iterator[Question]:
    """Yields three to six successive words of a story, to be reversed character by character."""
    words = " ".join(sentences()).split()
    # the last start leaves room for six words
    starts = range(len(words) - 6)
    spans = list(product(starts, range(3, 7)))
    rng.shuffle(spans)
    for start, number in spans:
        text = " ".join(words[start : start + number])
        prompt = f"Reverse the text character by character: {text}"
        yield Question("smollm2/reversed_text", "reversal", prompt, text[::-1])


@register_reward("smollm2/reversed_text")
def score_reversed(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Returns the ratio of matching characters, 2 M / T, of `difflib.SequenceMatcher`, as in prime-rl's example."""
    answer = solution_str.strip()
    # the time of `SequenceMatcher` grows with the square of the length
    beginning = answer[: 4 * len(ground_truth)]
    return SequenceMatcher(None, beginning, ground_truth).ratio()


TASKS = {
    "addition": Task(addition_questions),
    "arithmetic": Task(arithmetic_questions, prefix=ONE_SHOT),
    # the model spells no word backward at first, so letters in the right places count, as in reasoning-gym's scorer
    "spell_backward": Task(partial(gym_questions, task="spell_backward", full_marks_only=False, max_word_len=5)),
    # two or three numbers of four or five digits, written in different ways
    "number_format": Task(partial(gym_questions, task="number_format", max_num_candidates=3, max_n=100_000)),
    "ransom_note": Task(partial(gym_questions, task="ransom_note")),
    "length": Task(length_questions),
    "reversed_text": Task(reversed_questions, demonstrations=4096),
}
"""All tasks by name."""
