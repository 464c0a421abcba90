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
COLORS = {
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
}
PLACES = {
    "top left": (0, 0),
    "top right": (0, 1),
    "bottom left": (1, 0),
    "bottom right": (1, 1),
}
"""Quarters of the image: 1 if it is a lower one, and 1 if it is on the right."""


def prompt_of(color: str, place: str) -> str:
    """Returns the prompt that names a colour and a place."""
    return f"a {color} square at the {place}"


PROMPTS = tuple(prompt_of(color, place) for color in COLORS for place in PLACES)
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
    room = half - SQUARE
    is_lower, is_right = PLACES[place]
    top = half * is_lower + rng.integers(0, room + 1)
    left = half * is_right + rng.integers(0, room + 1)
    rows = slice(top, top + SQUARE)
    columns = slice(left, left + SQUARE)

    image = np.zeros((3, SIZE, SIZE), dtype=np.float32)
    for channel, brightness in enumerate(COLORS[color]):
        image[channel, rows, columns] = brightness
    return image


def captioned_images(count: int, seed: int) -> tuple[torch.Tensor, list[str]]:
    """Generates images (count, 3, SIZE, SIZE) in [0, 1] and unreliable captions, determined by the seed."""
    rng = np.random.default_rng(seed)
    images = []
    captions = []
    for _ in range(count):
        color = _choose(COLORS, rng)
        quarter = _choose(PLACES, rng)
        captions.append(prompt_of(color, quarter))

        # a careless caption: its image is drawn with new random words, which may be the same ones
        if rng.random() >= CARE:
            color = _choose(COLORS, rng)
        if rng.random() >= CARE:
            quarter = _choose(PLACES, rng)
        images.append(draw(color, quarter, rng))
    return torch.from_numpy(np.stack(images)), captions


def _choose(names: Mapping[str, object], rng: np.random.Generator) -> str:
    """Draws one of the names."""
    return str(rng.choice(list(names)))


def follows_prompt(frames: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """Scores each image: 1 if it shows one square of the prompt's colour at the prompt's place, else 0.

    Args:
        frames: (B, 1, 3, SIZE, SIZE) in [0, 1].
        prompts: The prompt of each image.
    """
    images = frames[:, 0].numpy()
    scores = []
    for image, prompt in zip(images, prompts, strict=True):
        scores.append(float(describe(image) == prompt))
    return scores


def describe(image: np.ndarray) -> str | None:
    """Returns the prompt that matches an image (3, SIZE, SIZE), or None unless it shows one square of one colour."""
    is_bright = image > _BRIGHT
    is_lit = np.asarray(is_bright.any(0))
    rows, columns = np.nonzero(is_lit)
    # before `is_connected`, which needs a lit pixel
    if not _LEAST_PIXELS <= len(rows) <= _MOST_PIXELS:
        return None
    if not is_connected(is_lit):
        return None

    height = int(np.ptp(rows)) + 1
    width = int(np.ptp(columns)) + 1
    # rules out long lines, which have as many pixels as a square
    if abs(height - SQUARE) > 1 or abs(width - SQUARE) > 1:
        return None

    # a channel belongs to the colour if most of the lit pixels have it
    shares = is_bright[:, rows, columns].mean(1)
    colors = [name for name, channels in COLORS.items() if np.array_equal(shares > _BRIGHT, channels)]
    if not colors:
        return None

    middle = (SIZE - 1) / 2
    quarter = (int(rows.mean() > middle), int(columns.mean() > middle))
    [name_of_quarter] = [name for name, position in PLACES.items() if position == quarter]
    return prompt_of(colors[0], name_of_quarter)


def is_connected(mask: np.ndarray) -> bool:
    """Returns True if all set pixels of mask (SIZE, SIZE), at least one, are connected along their sides."""
    # grows from the first set pixel to its neighbours until nothing is added
    reached = np.zeros_like(mask)
    reached.flat[mask.argmax()] = True
    size_before = 0
    while reached.sum() > size_before:
        size_before = reached.sum()
        # the border of unset pixels keeps an image from being connected to its opposite side
        padded = np.pad(reached, 1)
        neighbours = padded[1:-1, 2:] | padded[1:-1, :-2]
        neighbours |= padded[2:, 1:-1] | padded[:-2, 1:-1]
        reached = mask & (reached | neighbours)
    return bool(reached.sum() == mask.sum())
