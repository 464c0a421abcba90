"""Clips for tests of video data: files that are made here, whose frames are known."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from trainer.diffusion.clips.reading import Frames
from verl_lite.config.diffusion import VideoDataConfig

STEP = 10
"""Frame f of a clip is grey of this brightness times f, so that its mean says which frame it is."""


def grey_frames(number: int, height: int = 32, width: int = 48) -> Frames:
    shades = np.arange(number, dtype=np.uint8) * STEP
    return np.broadcast_to(shades[:, None, None, None], (number, height, width, 3)).copy()


def corner_frames(number: int, height: int = 32, width: int = 48) -> Frames:
    """Black, the upper left quarter white."""
    frames = np.zeros((number, height, width, 3), dtype=np.uint8)
    frames[:, : height // 2, : width // 2] = 255
    return frames


def which(frames: Any) -> list[int]:
    """The numbers of grey frames (F, H, W, 3), by their brightness."""
    return np.rint(np.asarray(frames).reshape(len(frames), -1).mean(1) / STEP).astype(int).tolist()


def write_video(
    path: Path, frames: Frames, *, rate: Fraction | int = 16, turned: int = 0, codec: str = "libx264", **options: str
) -> Path:
    """turned: degrees counter-clockwise by which a player turns it. options: of the encoder."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=Fraction(rate), options={"crf": "10", **options})
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        if turned:
            stream.set_display_rotation(turned)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def write_animation(path: Path, frames: Frames, durations_ms: int | list[int] = 100) -> Path:
    """gif or webp."""
    pictures = [Image.fromarray(frame) for frame in frames]
    lossless: dict[str, Any] = {"lossless": True} if path.suffix == ".webp" else {}
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations_ms, loop=0, **lossless)
    return path


def write_folder(path: Path, frames: Frames, suffix: str = ".png") -> Path:
    """frame_0, frame_1, ... without leading zeros."""
    path.mkdir(parents=True)
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(path / f"frame_{number}{suffix}")
    return path


def write_table(folder: Path, rows: Sequence[Sequence[str]], columns: Sequence[str] = ("video", "prompt")) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metadata.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def options(*places: Path, **values: Any) -> VideoDataConfig:
    """Data options for small clips."""
    return VideoDataConfig(train_files=[str(place) for place in places], **({"num_frames": 5} | values))
