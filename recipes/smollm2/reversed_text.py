"""SmolLM2 learns to reverse texts by RL, with the ratio of matching characters as the reward, as in prime-rl's example.

The example starts from a model that was fine-tuned on demonstrations (`reversed_sft.py`); `sft_then_rl.py` runs both
stages. The texts are pieces of three to six words of a story that reasoning-gym contains; prime-rl's are paragraphs of
Wikipedia.
"""

from __future__ import annotations

from recipes.smollm2.recipe import prepare, task_settings

__all__ = ["overrides", "prepare"]


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return task_settings(
        "reversed_text",
        questions=16,
        answers=8,
        prompt_tokens=96,
        answer_tokens=48,
        lr=1e-5,
        steps=40,
    )
