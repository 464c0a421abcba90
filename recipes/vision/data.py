"""Generates the data of the recipe: drawn pictures with questions about them, and questions without a picture.

    exact_match/color      a picture of shapes of one color     which color?     ->  green
    exact_match/count      the same pictures                    how many?        ->  4
    verl_lite/sort         no picture                           sort 5281        ->  1258

The same seed gives the same bytes.
"""

import io
import random
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from recipes.made_data import Question, careless, unique, write_parquet

SIZE = 24
"""Side of a picture in pixels."""
CELLS = 3
"""Cells along a side of a picture; each contains at most one shape."""
COLORS = {
    "red": (220, 50, 40),
    "green": (40, 180, 70),
    "blue": (50, 90, 230),
    "yellow": (230, 210, 50),
    "purple": (150, 60, 190),
    "white": (245, 245, 245),
}
MOST_SHAPES = 4
# both questions are about the same kind of pictures
WHICH = "which color?"
HOW_MANY = "how many?"
WORDS = ("which", "color", "how", "many", "sort", *COLORS)
"""Words that are one token each."""

WRONG_SHARE = 0.4
"""Share of demonstrated answers that are drawn at random, and of wrong digits in demonstrated sorts."""
TEST_ROWS = 384
TRAIN_ROWS = 6144
DEMONSTRATIONS = 6144


def write_data(folder: Path, seed: int) -> None:
    """Writes test.parquet, train.parquet and demonstrations.parquet into `folder`."""
    rng = random.Random(seed)
    # one sequence of questions for all files, so that no question of the test is in the training
    sources = [unique(questions, _identity) for questions in (colors(rng), counts(rng), sorts(rng))]
    numbers = {"test": TEST_ROWS, "train": TRAIN_ROWS, "demonstrations": DEMONSTRATIONS}
    for name, number in numbers.items():
        # the kinds in turn, so that each has the same number of questions
        pairs = [next(source) for source in islice(cycle(sources), number)]
        rng.shuffle(pairs)
        rows = []
        for index, (question, picture) in enumerate(pairs):
            row = question.row(name, index)
            row["images"] = [{"bytes": picture}] if picture else []
            if name == "demonstrations":
                row["answer"] = demonstrated(question, rng)
            rows.append(row)
        write_parquet(rows, folder / f"{name}.parquet")


def _identity(pair: tuple[Question, bytes]) -> tuple[str, bytes]:
    """Returns what makes a question different from another one: its text and its picture."""
    question, picture = pair
    return question.prompt, picture


def demonstrated(question: Question, rng: random.Random) -> str:
    """Returns an answer to the question that is often wrong."""
    # an answer of four digits is wrong if one of them is
    if question.data_source == "verl_lite/sort":
        return careless(question.answer, WRONG_SHARE / 2, rng)
    if rng.random() >= WRONG_SHARE:
        return question.answer

    # drawn from all answers of the kind, so that some of them are right by chance
    if question.answer in COLORS:
        return rng.choice(list(COLORS))
    count = rng.choice(range(1, MOST_SHAPES + 1))
    return str(count)


def colors(rng: random.Random) -> Iterator[tuple[Question, bytes]]:
    """Yields questions for the color of a picture, with the picture."""
    while True:
        color = rng.choice(list(COLORS))
        count = rng.randint(1, MOST_SHAPES)
        question = Question("exact_match/color", "vision", f"<image>{WHICH}", color)
        yield question, draw(color, count, rng)


def counts(rng: random.Random) -> Iterator[tuple[Question, bytes]]:
    """Yields questions for the number of shapes in a picture, with the picture."""
    while True:
        count = rng.randint(1, MOST_SHAPES)
        color = rng.choice(list(COLORS))
        question = Question("exact_match/count", "vision", f"<image>{HOW_MANY}", str(count))
        yield question, draw(color, count, rng)


def sorts(rng: random.Random) -> Iterator[tuple[Question, bytes]]:
    """Yields digits to be sorted, without a picture."""
    while True:
        digits = "".join(rng.choices("0123456789", k=4))
        answer = "".join(sorted(digits))
        question = Question("verl_lite/sort", "sorting", f"sort {digits}", answer)
        yield question, b""


def draw(color: str, count: int, rng: random.Random) -> bytes:
    """Draws squares and discs of one color that do not overlap, on a dark noisy ground. Returns a PNG file."""
    # NumPy draws all pixels at once
    generator = np.random.default_rng(rng.randrange(2**31))
    ground = generator.integers(0, 60, (SIZE, SIZE, 3), dtype=np.uint8)
    image = Image.fromarray(ground)
    pen = ImageDraw.Draw(image)
    cell_size = SIZE // CELLS
    # different cells, so that shapes do not overlap
    for cell in rng.sample(range(CELLS**2), count):
        row, column = divmod(cell, CELLS)
        size = rng.randint(5, 7)
        room = cell_size - size
        left = cell_size * column + rng.randint(0, room)
        top = cell_size * row + rng.randint(0, room)
        # Pillow draws the last row and column of a box, too
        box = (left, top, left + size - 1, top + size - 1)
        draw_shape = pen.rectangle if rng.random() < 0.5 else pen.ellipse
        draw_shape(box, fill=COLORS[color])

    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
