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


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    return {f"agentic.custom_envs.{tag}": entry for tag, entry in CUSTOM_ENVS.items()} | {
        **small_model(cache_folder() / "model"),
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": CONVERSATION_TOKENS,
        "agentic.train_env_manager.tags": ["sokoban"],
        "agentic.val_env_manager.tags": ["sokoban_unseen"],
    }


def prepare(config: PPOConfig) -> None:
    """Makes the model where the run wants it and the cache does not hold it."""
    make_where_wanted(config, cache_folder(), NAME, build)


def cache_folder() -> Path:
    """The folder of this version of the warm start."""
    return folder_of(NAME, made_from())
