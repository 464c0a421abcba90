"""SmolLM2 decides whether a text can be made of the letters of another: a task of reasoning-gym.

The answer is True or False, so guessing is right in half of the cases.
"""

from __future__ import annotations

from recipes.smollm2.recipe import prepare, task_settings

__all__ = ["overrides", "prepare"]


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return task_settings("ransom_note", questions=16, answers=8, prompt_tokens=160, answer_tokens=8, lr=1e-5, steps=40)
