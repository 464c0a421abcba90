"""The lakes of the recipe, and what its model is made from: entries of agentic.custom_envs, model, warm start."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_lite.envs.base import EnvTemplate

NAME = "agentic_frozen_lake"
MODEL_SEED = DATA_SEED = 1
LAYERS, HIDDEN = 4, 64
DEMONSTRATIONS, RANDOM_SHARE = 3_000, 0.3
WARM_START_STEPS, WARM_START_ROWS = 260, 192

MAX_STEPS = 10
PROMPT_TOKENS, TURN_TOKENS, CONVERSATION_TOKENS = 24, 4, 256
"""A turn is <answer>, a move, </answer> and the end; a 4x4 grid with its two marks has 21 tokens."""

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
"""lake_unseen: random maps, none of which is played in the warm start or in training."""


def build(folder: Path) -> None:
    """Writes model/, after the warm start, and demonstrations.parquet into `folder`."""
    from recipes.agentic_frozen_lake.data import lake_player, write_demonstrations
    from recipes.agentic_frozen_lake.model import write_model
    from recipes.embedded import warm_start

    length = PROMPT_TOKENS + CONVERSATION_TOKENS
    write_model(folder / "random", MODEL_SEED, layers=LAYERS, hidden=HIDDEN)
    rng = random.Random(DATA_SEED)
    file = folder / "demonstrations.parquet"
    write_demonstrations(file, demonstrated(), lake_player(rng), rng, number=DEMONSTRATIONS, random_share=RANDOM_SHARE)
    warm_start(folder, NAME, steps=WARM_START_STEPS, rows=WARM_START_ROWS, max_length=length, lr=3e-3)


def demonstrated() -> dict[str, EnvTemplate]:
    """What the clumsy player plays: one conversation in four on the fixed map."""
    from verl_lite.envs.base import env_templates

    templates = env_templates(CUSTOM_ENVS)
    return {"fixed": templates["lake_4x4"]} | {f"random {place}": templates["lake_random"] for place in range(3)}


def made_from() -> list[Path]:
    """The files that decide what `build` writes."""
    return [Path(__file__).with_name(name) for name in ("worlds.py", "data.py", "model.py")]
