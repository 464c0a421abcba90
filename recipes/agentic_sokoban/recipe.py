"""An agent of 230,000 parameters learns to push a box onto its target, in rooms that it has not seen.

Model, warm start and settings are those of agentic_frozen_lake; only the world differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recipes.agentic_frozen_lake.recipe import small_model
from recipes.agentic_sokoban.worlds import CONVERSATION_TOKENS, CUSTOM_ENVS, NAME, PROMPT_TOKENS, build, made_from
from recipes.embedded import cache_folder as folder_of
from recipes.embedded import make_where_wanted

if TYPE_CHECKING:
    from verl_lite.config import PPOConfig

RL_STEPS = 60


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    return {f"agentic.custom_envs.{tag}": entry for tag, entry in CUSTOM_ENVS.items()} | {
        **small_model(cache_folder() / "model"),
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": CONVERSATION_TOKENS,
        "agentic.rollout_batch_size": 128,
        "agentic.train_env_manager.tags": ["sokoban"],
        "agentic.train_env_manager.num_env_groups": 16,
        "agentic.train_env_manager.group_size": 8,
        "agentic.train_env_manager.format_penalty": -0.1,
        "agentic.val_env_manager.tags": ["sokoban_unseen"],
        "agentic.val_env_manager.num_env_groups": 192,
        "agentic.val_batch_size": 192,
        "trainer.total_training_steps": RL_STEPS,
    }


def prepare(config: PPOConfig) -> None:
    """Makes the model where the run wants it and the cache does not hold it."""
    make_where_wanted(config, cache_folder(), NAME, build)


def cache_folder() -> Path:
    """The folder of this version of the warm start."""
    return folder_of(NAME, made_from())
