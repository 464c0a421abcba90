"""The lakes of the recipe as entries of agentic.custom_envs, and the builder of its model with the warm start."""

from pathlib import Path
from typing import Any

from recipes.embedded import Made

NAME = "agentic_frozen_lake"
MAX_STEPS = 10
PROMPT_TOKENS, TURN_TOKENS, CONVERSATION_TOKENS = 24, 4, 256
"""A turn has 4 tokens: <answer>, a move, </answer> and the end. A 4x4 grid with its two markers has 21 tokens."""

_GRID_ONLY = {"env_instruction": "", "feedback": False}
_LAKE = {
    "env_type": "frozen_lake",
    "max_steps": MAX_STEPS,
    "max_tokens_per_step": TURN_TOKENS,
    "agent_template": "{observation}",
}

CUSTOM_ENVS: dict[str, dict[str, Any]] = {
    "lake_4x4": _LAKE | {"env_config": _GRID_ONLY | {"map_name": "4x4"}},
    "lake_random": _LAKE | {"env_config": _GRID_ONLY | {"size": 4, "p": 0.7, "split": "train"}},
    "lake_unseen": _LAKE | {"env_config": _GRID_ONLY | {"size": 4, "p": 0.7, "split": "test"}},
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
    length = PROMPT_TOKENS + CONVERSATION_TOKENS
    make_player(folder, NAME, played, lake_player, number=3_000, steps=260, length=length)


MADE = Made(NAME, build, [Path(__file__).with_name(name) for name in ("worlds.py", "data.py")])
