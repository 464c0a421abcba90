"""SmolLM2 on tinker-cookbook's arithmetic environment: sums of two numbers from 0 to 100, after one example.

The settings are those of its recipe: 100 questions with 4 answers of at most 5 tokens, an adapter of rank 32, a
learning rate of 1e-4, and advantages that are the scores minus the mean of their group. It was published for models of
1B to 9B parameters.
"""

from __future__ import annotations

from recipes.smollm2.recipe import prepare, task_settings

__all__ = ["overrides", "prepare"]


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    settings = task_settings(
        "arithmetic",
        questions=100,
        answers=4,
        prompt_tokens=64,
        answer_tokens=5,
        lr=1e-4,
        steps=20,
    )
    return settings | {
        "model.lora_rank": 32,
        "model.lora_alpha": 32,
        # tinker-cookbook only subtracts the mean of a group
        "algorithm.norm_adv_by_std_in_grpo": False,
    }
