"""Small images of one coloured square with captions, and a reward that checks whether an image matches its prompt.

A prompt names a colour and a place, `a red square at the top left`; an image has 8 x 8 pixels. In the captions of the
pretraining data, colour and place are each right with probability `CARE` and otherwise random, so the pretrained model
draws squares but seldom the requested one. The reward thresholds pixels, finds connected ones and compares names; it
has no gradient.
"""

from collections.abc import Sequence

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
_LEAST_PIXELS, _MOST_PIXELS = 6, 12


def draw(color: str, place: str, rng: np.random.Generator) -> np.ndarray:
    """Draws an image (3, SIZE, SIZE) in [0, 1]: black, with a square somewhere in the named quarter."""
    half = SIZE // 2
    top, left = (half * part + rng.integers(0, half - SQUARE + 1) for part in PLACES[place])
    image = np.zeros((3, SIZE, SIZE), dtype=np.float32)
    image[:, top : top + SQUARE, left : left + SQUARE] = np.array(COLORS[color])[:, None, None]
    return image


def captioned_images(count: int, seed: int) -> tuple[torch.Tensor, list[str]]:
    """Generates images (count, 3, SIZE, SIZE) in [0, 1] and unreliable captions, determined by the seed."""
    rng = np.random.default_rng(seed)
    images, captions = [], []
    for _ in range(count):
        caption = {"color": str(rng.choice([*COLORS])), "place": str(rng.choice([*PLACES]))}
        shown = {
            "color": caption["color"] if rng.random() < CARE else str(rng.choice([*COLORS])),
            "place": caption["place"] if rng.random() < CARE else str(rng.choice([*PLACES])),
        }
        images.append(draw(shown["color"], shown["place"], rng))
        captions.append(f"a {caption['color']} square at the {caption['place']}")
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
    lit = np.asarray(is_bright.any(0))
    rows, columns = np.nonzero(lit)
    if not _LEAST_PIXELS <= len(rows) <= _MOST_PIXELS or not is_connected(lit):
        return None
    if not {int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1} <= {SQUARE - 1, SQUARE, SQUARE + 1}:
        return None
    channels = is_bright[:, rows, columns].mean(1) > _BRIGHT
    colors = [name for name, color in COLORS.items() if np.array_equal(channels, np.array(color) > 0)]
    middle = (SIZE - 1) / 2
    quarter = (int(rows.mean() > middle), int(columns.mean() > middle))
    place = next(name for name, part in PLACES.items() if part == quarter)
    return f"a {colors[0]} square at the {place}" if colors else None


def is_connected(mask: np.ndarray) -> bool:
    """Returns True if all set pixels of mask (SIZE, SIZE), at least one, are connected along their sides."""
    found, before = np.zeros_like(mask), None
    found.flat[mask.argmax()] = True
    while before is None or found.sum() > before:
        before, near = found.sum(), np.pad(found, 1)
        found = mask & (found | near[2:, 1:-1] | near[:-2, 1:-1] | near[1:-1, 2:] | near[1:-1, :-2])
    return bool(found.sum() == mask.sum())
