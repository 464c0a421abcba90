"""Where the embedded run begins: the small world, made once and kept in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAME = "reward_flow"
SEED = 1


def build(folder: Path) -> None:
    """Writes data/, faces/ and model/ into `folder`: see `world`."""
    from recipes.reward_flow.world import write_world

    write_world(folder, SEED, tell=lambda line: print(f"{NAME}: {line}", flush=True))


def face_reward(folder: Path) -> dict[str, Any]:
    """reward.kwargs of `cosine_identity` for the faces in `folder`."""
    module = "recipes.reward_flow.faces"
    return {
        "embedder": {"name": f"{module}:FisherEmbedder", "path": str(folder / "embedder")},
        "detector": {"name": f"{module}:TemplateDetector", "path": str(folder / "detector")},
    }


def made_from() -> list[Path]:
    """The files that decide what `build` writes."""
    return [Path(__file__).with_name(name) for name in ("start.py", "world.py", "codec.py", "faces.py")]
