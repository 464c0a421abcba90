"""What validation episodes looked like, in files: an animated GIF of RGB frames, or text.

A frame is what an environment's `render()` gave: an array (H, W, 3) of uint8, or a text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.agentic.episode_log import column_of
from verl_lite.protocol import DataProto

MILLISECONDS_PER_FRAME = 200
"""ROLL's."""


def save_renders(folder: str, batch: DataProto, step: int) -> list[Path]:
    """Writes FOLDER/step_{step}/{env_id}_{tag}_{score}.gif, or .txt, for each episode that has frames.

    Reads frames, traj_id, env_ids, tags and episode_scores. Rows of one episode share their frames. Episodes of one
    environment after the first have their traj_id in the name too.
    """
    columns = batch.non_tensor_batch
    if "frames" not in columns:
        return []
    target = Path(folder) / f"step_{step}"
    written: dict[str, Path] = {}
    for row, name in enumerate(columns["traj_id"]):
        frames = columns["frames"][row]
        if frames is None or not len(frames) or name in written:
            continue
        score = float(column_of(batch, "episode_scores")[row])
        stem = _file_name(f"{columns['env_ids'][row]}_{columns['tags'][row]}_{score:.1f}")
        if any(path.stem == stem for path in written.values()):
            stem = f"{stem}_{_file_name(name)}"
        target.mkdir(parents=True, exist_ok=True)
        written[name] = _save(frames, target / stem)
    return list(written.values())


def _save(frames: Sequence[Any], path: Path) -> Path:
    """Writes the frames, and gives the path with its ending."""
    pictures = [np.asarray(frame) for frame in frames if not isinstance(frame, str)]
    if not pictures:
        text = path.with_name(path.name + ".txt")
        numbered = (f"frame {number}\n{frame}\n" for number, frame in enumerate(frames))
        text.write_text("\n".join(numbered), encoding="utf-8")
        return text
    from PIL import Image

    gif = path.with_name(path.name + ".gif")
    images = [Image.fromarray(picture.astype(np.uint8)) for picture in pictures]
    images[0].save(gif, save_all=True, append_images=images[1:], duration=MILLISECONDS_PER_FRAME, loop=0)
    return gif


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.+-]", "_", text)
