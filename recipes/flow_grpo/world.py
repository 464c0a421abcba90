"""Small images of one coloured square with captions, and a reward that checks whether an image matches its prompt.

A prompt names a colour and a place, `a red square at the top left`; an image has 8 x 8 pixels. In the captions of the
pretraining data, colour and place are each right with probability `CARE` and otherwise random, so the pretrained model
draws squares but seldom the requested one. The reward thresholds pixels, finds connected ones and compares names; it
has no gradient.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

SIZE = 8
SQUARE = 3
COLORS = {"red": (1.0, 0.0, 0.0), "green": (0.0, 1.0, 0.0), "blue": (0.0, 0.0, 1.0)}
PLACES = {"top left": (0, 0), "top right": (0, 1), "bottom left": (1, 0), "bottom right": (1, 1)}
PROMPTS = tuple(f"a {color} square at the {place}" for color in COLORS for place in PLACES)
WORDS = ("a", "square", "at", "the", *COLORS, "top", "bottom", "left", "right")
CARE = 0.5
"""Probability that a caption's colour (or place) is copied from the image; otherwise it is random."""

_BRIGHT = 0.5
# 2 x 3 to 3 x 4 pixels: a generated square may have a side that is one pixel shorter or longer
_LEAST_PIXELS = 6
_MOST_PIXELS = 12


def draw(color: str, place: str, rng: np.random.Generator) -> np.ndarray:
    """Draws an image (3, SIZE, SIZE) in [0, 1]: black, with a square somewhere in the named quarter."""
    half = SIZE // 2
    lower, right = PLACES[place]
    top = half * lower + rng.integers(0, half - SQUARE + 1)
    left = half * right + rng.integers(0, half - SQUARE + 1)
    image = np.zeros((3, SIZE, SIZE), dtype=np.float32)
    image[:, top : top + SQUARE, left : left + SQUARE] = np.array(COLORS[color])[:, None, None]
    return image


def captioned_images(count: int, seed: int) -> tuple[torch.Tensor, list[str]]:
    """Generates images (count, 3, SIZE, SIZE) in [0, 1] and unreliable captions, determined by the seed."""
    rng = np.random.default_rng(seed)
    colors = list(COLORS)
    places = list(PLACES)
    images = []
    captions = []
    for _ in range(count):
        color = str(rng.choice(colors))
        place = str(rng.choice(places))
        captions.append(f"a {color} square at the {place}")
        # the image is drawn with other words than its caption has
        if rng.random() >= CARE:
            color = str(rng.choice(colors))
        if rng.random() >= CARE:
            place = str(rng.choice(places))
        images.append(draw(color, place, rng))
    return torch.from_numpy(np.stack(images)), captions


def follows_prompt(frames: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """Scores each image: 1 if it shows one square of the prompt's colour at the prompt's place, else 0.

    frames: (B, 1, 3, SIZE, SIZE) in [0, 1].
    """
    images = frames[:, 0].numpy()
    return [float(prompt == describe(image)) for image, prompt in zip(images, prompts, strict=True)]


def describe(image: np.ndarray) -> str | None:
    """Returns the prompt that matches an image (3, SIZE, SIZE), or None unless it shows one square of one colour."""
    is_bright = image > _BRIGHT
    is_lit = np.asarray(is_bright.any(0))
    rows, columns = np.nonzero(is_lit)
    if not _LEAST_PIXELS <= len(rows) <= _MOST_PIXELS or not is_connected(is_lit):
        return None
    height = int(np.ptp(rows)) + 1
    width = int(np.ptp(columns)) + 1
    if abs(height - SQUARE) > 1 or abs(width - SQUARE) > 1:
        return None

    channels = is_bright[:, rows, columns].mean(1) > _BRIGHT
    color = _name_of(tuple(map(float, channels)), COLORS)
    middle = (SIZE - 1) / 2
    quarter = (int(rows.mean() > middle), int(columns.mean() > middle))
    place = _name_of(quarter, PLACES)
    return f"a {color} square at the {place}" if color else None


def _name_of(value: tuple[float, ...], values: Mapping[str, tuple[float, ...]]) -> str | None:
    """Returns the first name that has this value, or None."""
    return next((name for name in values if values[name] == value), None)


def is_connected(mask: np.ndarray) -> bool:
    """Returns True if all set pixels of mask (SIZE, SIZE), at least one, are connected along their sides."""
    # grows from the first set pixel to its neighbours until nothing is added
    reached = np.zeros_like(mask)
    reached.flat[mask.argmax()] = True
    size_before = 0
    while reached.sum() > size_before:
        size_before = reached.sum()
        padded = np.pad(reached, 1)
        beside = padded[1:-1, 2:] | padded[1:-1, :-2]
        above_or_below = padded[2:, 1:-1] | padded[:-2, 1:-1]
        reached = mask & (reached | beside | above_or_below)
    return bool(reached.sum() == mask.sum())
