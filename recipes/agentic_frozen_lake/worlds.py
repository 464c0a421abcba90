"""The lakes of the recipe as entries of agentic.custom_envs, and the builder of its model with the warm start."""

from pathlib import Path

from recipes.embedded import Made
from verl_lite.json_types import JsonObject

NAME = "agentic_frozen_lake"
MAX_STEPS = 10
# a 4x4 grid with its two markers has 21 tokens
PROMPT_TOKENS = 24
# <answer>, a move, </answer> and the end
TURN_TOKENS = 4
CONVERSATION_TOKENS = 256

# the small model has no tokens for words
_GRID_ONLY = {"env_instruction": "", "feedback": False}
_LAKE = {
    "env_type": "frozen_lake",
    "max_steps": MAX_STEPS,
    "max_tokens_per_step": TURN_TOKENS,
    "agent_template": "{observation}",
}

_FIXED_MAP = _GRID_ONLY | {"map_name": "4x4"}
_RANDOM_MAP = _GRID_ONLY | {"size": 4, "p": 0.7}

CUSTOM_ENVS: dict[str, JsonObject] = {
    "lake_4x4": _LAKE | {"env_config": _FIXED_MAP},
    "lake_random": _LAKE | {"env_config": _RANDOM_MAP | {"split": "train"}},
    "lake_unseen": _LAKE | {"env_config": _RANDOM_MAP | {"split": "test"}},
}
"""Environments by tag. lake_unseen: random maps that occur neither in the warm start nor in training."""


def build(folder: Path) -> None:
    """Builds the model: a warm start of 260 steps on 3,000 conversations, a quarter of them on the fixed map."""
    from recipes.agentic_frozen_lake.data import lake_player, make_player
    from verl_lite.envs.base import env_templates

    templates = env_templates(CUSTOM_ENVS)
    # `write_demonstrations` plays the entries in turn, so that three of four conversations have random maps
    played = {"fixed": templates["lake_4x4"]}
    for number in range(3):
        played[f"random {number}"] = templates["lake_random"]
    make_player(
        folder,
        NAME,
        played,
        lake_player,
        number=3_000,
        steps=260,
        length=PROMPT_TOKENS + CONVERSATION_TOKENS,
    )


_HERE = Path(__file__).parent
MADE = Made(NAME, build, [_HERE / "worlds.py", _HERE / "data.py"])
