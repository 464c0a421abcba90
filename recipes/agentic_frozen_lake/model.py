"""The model of the agentic recipes: a random Qwen2 of 230,000 parameters, whose words are moves and cells.

A token is a cell of the grid, a line end, a move or one of the two marks around a move, so that a turn of the agent,
<answer>Right</answer>, has three tokens and its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recipes.embedded import byte_tokenizer, write_qwen2

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

WORDS = ("<answer>", "</answer>", "Left", "Down", "Right", "Up", "√")


def grid_tokenizer() -> Qwen2Tokenizer:
    """One token for each of WORDS, one a byte for any other text: nothing is lost."""
    return byte_tokenizer(WORDS)


def write_model(folder: Path, seed: int, *, layers: int = 4, hidden: int = 128) -> None:
    """Writes the model and its tokenizer into `folder`. Same seed, same bytes."""
    write_qwen2(folder, grid_tokenizer(), seed, layers=layers, hidden=hidden, widening=3)
