"""SmolLM2 learns to write answers of 50 characters, as in the chapter on GRPO of the Hugging Face course.

The reward, the adapter (rank 16, alpha 32), the learning rate of 2e-5, and 8 answers to each of 2 questions a step are
those of the course. Its prompts (posts to be summarized) are on the hub; here the prompts are sentences of a story that
reasoning-gym contains. The course trains in bf16 with an optimizer in 8 bits, here fp32 is used.
"""

from __future__ import annotations

from recipes.smollm2.recipe import prepare, task_settings

__all__ = ["overrides", "prepare"]


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    settings = task_settings(
        "length",
        questions=2,
        answers=8,
        prompt_tokens=256,
        answer_tokens=96,
        lr=2e-5,
        steps=200,
    )
    return settings | {
        "model.lora_rank": 16,
        "model.lora_alpha": 32,
    }
