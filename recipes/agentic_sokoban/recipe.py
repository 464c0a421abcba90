"""An agent of 230,000 parameters learns to push a box onto its target, in rooms that it has not seen.

Model and settings are those of agentic_frozen_lake; the environments and demonstrations differ.
"""

from recipes.agentic_frozen_lake.recipe import small_model
from recipes.agentic_sokoban.worlds import CONVERSATION_TOKENS, CUSTOM_ENVS, MADE, PROMPT_TOKENS


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    environments = {f"agentic.custom_envs.{tag}": entry for tag, entry in CUSTOM_ENVS.items()}
    return environments | {
        **small_model(MADE.folder / "model"),
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": CONVERSATION_TOKENS,
        "agentic.train_env_manager.tags": ["sokoban"],
        "agentic.val_env_manager.tags": ["sokoban_unseen"],
    }


prepare = MADE.prepare
