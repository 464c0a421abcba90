"""The rooms of the recipe as entries of agentic.custom_envs, and the builder of its model with the warm start."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.embedded import Made

if TYPE_CHECKING:
    from recipes.agentic_frozen_lake.data import Player
    from verl_lite.envs.grid import GridEnv

NAME = "agentic_sokoban"
MAX_STEPS = 10
PROMPT_TOKENS, TURN_TOKENS, CONVERSATION_TOKENS = 40, 4, 384
"""A turn has 4 tokens: <answer>, a move, </answer> and the end. A 5x6 room with its two markers has 36 tokens."""

_ROOM = {
    "env_instruction": "",
    "feedback": False,
    "dim_room": [5, 6],
    "num_boxes": 1,
    "min_depth": 2,
    "search_depth": 8,
}
_SOKOBAN = {
    "env_type": "sokoban",
    "max_steps": MAX_STEPS,
    "max_tokens_per_step": TURN_TOKENS,
    "agent_template": "{observation}",
}

CUSTOM_ENVS: dict[str, dict[str, Any]] = {
    "sokoban": _SOKOBAN | {"env_config": _ROOM | {"split": "train"}},
    "sokoban_unseen": _SOKOBAN | {"env_config": _ROOM | {"split": "test"}},
}
"""Environments by tag. sokoban_unseen: rooms that occur neither in the warm start nor in training."""


def build(folder: Path) -> None:
    """Builds the model: a warm start of 180 steps on 4,000 conversations."""
    from recipes.agentic_frozen_lake.data import make_player
    from verl_lite.envs.base import env_templates

    played = {"sokoban": env_templates(CUSTOM_ENVS)["sokoban"]}
    length = PROMPT_TOKENS + CONVERSATION_TOKENS
    make_player(folder, NAME, played, room_player, number=4_000, steps=180, length=length)


def room_player(rng: random.Random) -> Callable[[GridEnv], Player]:
    """Returns a player who makes the first move of a shortest solution, or a random move if the box is stuck."""
    from verl_lite.envs.sokoban import DIRECTIONS, Sokoban, solution

    def player(env: GridEnv) -> Player:
        assert isinstance(env, Sokoban)

        def choose() -> int:
            room = replace(env.room, boxes=env.boxes, player=env.player)
            actions = solution(room)
            if not actions:
                return rng.choice(sorted(DIRECTIONS))
            return actions[0]

        return choose

    return player


MADE = Made(NAME, build, [Path(__file__), Path(__file__).parents[1] / "agentic_frozen_lake" / "data.py"])
