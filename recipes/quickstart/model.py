"""The model of the quickstart: a random Qwen2 of 1.1 million parameters, and its tokenizer of characters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recipes.embedded import CHAT_TEMPLATE, byte_tokenizer, write_qwen2

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

__all__ = ["CHAT_TEMPLATE", "character_tokenizer", "write_model"]


def character_tokenizer() -> Qwen2Tokenizer:
    """One token a byte."""
    return byte_tokenizer()


def write_model(folder: Path, seed: int) -> None:
    """Writes the model and its tokenizer into `folder`. Same seed, same bytes."""
    write_qwen2(folder, character_tokenizer(), seed, layers=4, hidden=128, intermediate=512)
