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
    return task_settings("reversed_text") | {
        "data.train_batch_size": 16,
        "data.max_prompt_length": 96,
        "data.max_response_length": 48,
        "rollout.n": 8,
        "actor.ppo_mini_batch_size": 16,
        "actor.optim.lr": 1e-5,
        "trainer.total_training_steps": 40,
        "trainer.test_freq": 20,
    }
