"""Whether the options of video data fit each other: a part of the checks of `trainer.main_reward_flow`.

Takes a `VideoDataConfig`; yields problems, each naming key, value, what was expected and what to change. What the files
themselves say is checked when they are read (`trainer/video_data.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_lite.config.diffusion import VideoDataConfig

Problems = Iterator[str]

FRAMES_PER_LATENT = 4
"""Frames that a video autoencoder of Wan's kind makes into one in time, after the first, which stands alone."""

_WAN_CLASS, _WAN_FACTOR = "AutoencoderKLWan", 8  # diffusers' default, which files of Wan2.1 and Wan2.2-A14B may omit


def video_data(data: VideoDataConfig) -> Problems:
    """Files, frames and sizes, as far as no range says it (`verl_lite.config.diffusion`)."""
    if not data.train_files:
        yield (
            "data.train_files is empty: give a csv file with the columns video and prompt, "
            "data.train_files=clips/metadata.csv"
        )
    if data.video_key == data.prompt_key:
        yield f"data.video_key and data.prompt_key are both {data.video_key}: two columns are expected"
    yield from _frames(data.num_frames)
    if data.side_multiple >= 1:
        yield from _sides(data)


def fits_pipeline(data: VideoDataConfig, folder: Path) -> Problems:
    """Whether frames have sides that the pipeline in `folder` (diffusers format) takes, as far as its files say."""
    needed = pipeline_multiple(folder)
    if needed is None:
        return
    sides = {"height": data.height, "width": data.width}
    if data.height is None or data.width is None:
        sides = {"side_multiple": data.side_multiple}
    for name, value in sides.items():
        if value is not None and value % needed:
            yield f"data.{name}={value}: a multiple of {needed} is expected, as the pipeline model.path={folder} takes"


def pipeline_multiple(folder: Path) -> int | None:
    """Of which the sides of a pipeline's frames are multiples: its autoencoder's factor times its transformer's patch;
    None where its files do not say."""
    vae, transformer = (read_json(folder / part / "config.json") or {} for part in ("vae", "transformer"))
    factor = vae.get("scale_factor_spatial", _WAN_FACTOR if vae.get("_class_name") == _WAN_CLASS else None)
    patch = transformer.get("patch_size")
    if not isinstance(factor, int) or not isinstance(patch, list) or not patch or not isinstance(patch[-1], int):
        return None
    return factor * patch[-1] or None


def read_json(file: Path) -> dict[str, Any] | None:
    """None where there is no such file, or it is no json object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _frames(number: int) -> Problems:
    if number >= 1 and number % FRAMES_PER_LATENT == 1:
        return
    below = max(1, (number - 1) // FRAMES_PER_LATENT * FRAMES_PER_LATENT + 1)
    near = " or ".join(str(fit) for fit in (below, below + FRAMES_PER_LATENT) if number >= 1 or fit == 1)
    yield (
        f"data.num_frames={number}: 4 k + 1 is expected, since the model makes 4 frames into one after the first; "
        f"data.num_frames={near}"
    )


def _sides(data: VideoDataConfig) -> Problems:
    multiple = data.side_multiple
    if (data.height is None) != (data.width is None):
        given, missing = ("height", "width") if data.width is None else ("width", "height")
        yield f"data.{given}={getattr(data, given)} needs data.{missing}, which is null: set both or none"
        return
    for name in ("height", "width"):
        side = getattr(data, name)
        if side is not None and (side < multiple or side % multiple):
            fit = max(multiple, round(side / multiple) * multiple)
            yield (
                f"data.{name}={side}: a multiple of data.side_multiple={multiple} is expected, for example "
                f"data.{name}={fit}"
            )
    if data.height is None and data.max_pixels < multiple**2:
        yield (
            f"data.max_pixels={data.max_pixels}: at least {multiple**2} is expected, the smallest frame with sides "
            f"that are multiples of data.side_multiple={multiple}"
        )
