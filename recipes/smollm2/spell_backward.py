"""SmolLM2 spells words of three to five letters backward: a task of reasoning-gym with its text and its scorer.

The scorer pays for each letter in the right place. Without that there would be nothing to learn from, because the model
spells no word backward at first.
"""

from __future__ import annotations

from recipes.smollm2.recipe import prepare, task_settings

__all__ = ["overrides", "prepare"]


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return task_settings(
        "spell_backward",
        questions=16,
        answers=8,
        prompt_tokens=96,
        answer_tokens=16,
        lr=1e-5,
        steps=40,
    )
