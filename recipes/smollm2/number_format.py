"""SmolLM2 picks the largest or smallest of two or three numbers: a task of reasoning-gym with its text and its scorer.

The numbers are written in different ways, such as 9,204.38 and 9.204410e+03.
"""

from __future__ import annotations

from recipes.smollm2.recipe import prepare, task_settings

__all__ = ["overrides", "prepare"]


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return task_settings(
        "number_format", questions=16, answers=8, prompt_tokens=192, answer_tokens=16, lr=1e-5, steps=40
    )
