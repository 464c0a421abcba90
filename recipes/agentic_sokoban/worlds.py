"""The rooms of the recipe as entries of agentic.custom_envs, and the builder of its model with the warm start."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.embedded import Made
from verl_lite.json_types import JsonObject

if TYPE_CHECKING:
    from recipes.agentic_frozen_lake.data import Player, PlayerOf
    from verl_lite.envs.grid import GridEnv

NAME = "agentic_sokoban"
MAX_STEPS = 10
# a 5x6 room with its two markers has 36 tokens
PROMPT_TOKENS = 40
# <answer>, a move, </answer> and the end
TURN_TOKENS = 4
CONVERSATION_TOKENS = 384

_ROOM = {
    "env_instruction": "",
    "feedback": False,
    "dim_room": [5, 6],
    "num_boxes": 1,
    # each room can be solved in 2 to 8 moves, so that `MAX_STEPS` leaves some for detours
    "min_depth": 2,
    "search_depth": 8,
}
_SOKOBAN = {
    "env_type": "sokoban",
    "max_steps": MAX_STEPS,
    "max_tokens_per_step": TURN_TOKENS,
    "agent_template": "{observation}",
}

CUSTOM_ENVS: dict[str, JsonObject] = {
    "sokoban": _SOKOBAN | {"env_config": _ROOM | {"split": "train"}},
    "sokoban_unseen": _SOKOBAN | {"env_config": _ROOM | {"split": "test"}},
}
"""Environments by tag. sokoban_unseen: rooms that occur neither in the warm start nor in training."""


def build(folder: Path) -> None:
    """Builds the model: a warm start of 180 steps on 4,000 conversations."""
    from recipes.agentic_frozen_lake.data import make_player
    from verl_lite.envs.base import env_templates

    templates = env_templates(CUSTOM_ENVS)
    make_player(
        folder,
        NAME,
        {"sokoban": templates["sokoban"]},
        room_player,
        number=4_000,
        # after 120 steps the policy does not read the room yet and learns little; after 300, less is left to learn
        steps=180,
        length=PROMPT_TOKENS + CONVERSATION_TOKENS,
    )


def room_player(rng: random.Random) -> PlayerOf:
    """Returns a player who makes the first move of a shortest solution, or a random move if the box is stuck."""
    from verl_lite.envs.sokoban import DIRECTIONS, Sokoban, solution

    def player(env: GridEnv) -> Player:
        assert isinstance(env, Sokoban)

        def choose() -> int:
            # the room as it is after the moves so far; `env.room` is its start
            room = replace(env.room, boxes=env.boxes, player=env.player)
            actions = solution(room)
            if not actions:
                return rng.choice(sorted(DIRECTIONS))
            return actions[0]

        return choose

    return player


_HERE = Path(__file__)
_PLAYER = _HERE.parents[1] / "agentic_frozen_lake" / "data.py"
MADE = Made(NAME, build, [_HERE, _PLAYER])
