"""The tasks, their levels of difficulty, and their share of each batch.

A level is a set of arguments of reasoning-gym's generator. Another task is one more entry here; TOKENS only makes the
sentences around the questions short for the small model, and may lack them.
"""

from __future__ import annotations

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

TOKENS = (
    "Spell this word backward (example: sun -> nus): ",
    "State the final answer to the following arithmetic problem: ",
    'How many times does the letter "',
    '" appear in the text: "',
)
"""What is one token for the model that this recipe brings along."""


def source(task: str) -> str:
    """The data_source of a task."""
    return f"reasoning_gym/{task}"
