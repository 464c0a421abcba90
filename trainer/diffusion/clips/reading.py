"""Reads clips from files: counts their frames, and decodes the first frames at the size of training.

PyAV decodes video containers and folders of pictures (one frame per file). Frames are uint8 (F, H, W, 3), upright, in
presentation order. An invalid file raises `ClipError`, whose message continues a sentence that begins with the path:
"it has 5 frames ...".
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from verl_lite.errors import UserError
from verl_lite.registry import did_you_mean

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

Frames = NDArray[np.uint8]

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
"""Extensions of the files in a folder that are its frames."""


class ClipError(ValueError):
    """Raised for a file or folder that cannot be used as a clip."""


def require_av() -> Any:
    """Imports and returns PyAV. Raises UserError if it is not installed."""
    try:
        import av
    except ImportError:
        raise UserError("PyAV, which reads and writes clips, is missing: pip install 'verl_lite[diffusion]'") from None
    return av


@dataclass(frozen=True)
class Header:
    """Properties of a clip read without decoding all of it.

    Attributes:
        height: height of an upright frame.
        width: its width.
        frames: number of frames.
    """

    height: int
    width: int
    frames: int


def read_header(path: Path) -> Header:
    """Decodes the first frame and counts all frames. Raises ClipError if `path` is not a clip."""
    if not path.exists():
        siblings = []
        if path.parent.is_dir():
            siblings = [file.name for file in path.parent.iterdir()]
        raise ClipError(f"there is no such file or folder{did_you_mean(path.name, siblings)}")
    # the size of a decoded frame, because the header has that of the frame before its rotation
    with closing(_decode(path)) as frames:
        first_frame = next(frames)
    height, width = first_frame.shape[:2]
    if path.is_dir():
        return Header(height, width, len(_pictures(path)))
    # packets, each of which holds a frame, are counted without decoding; the last one is empty, and those to discard
    # are only needed to decode others
    number = 0
    with _opened(path) as (container, stream):
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                number += 1
    return Header(height, width, number)


def fitted_size(height: int, width: int, *, max_pixels: int, multiple: int) -> tuple[int, int]:
    """Returns (H, W) scaled down to at most max_pixels, with both sides rounded down to a multiple of `multiple`.

    Raises ClipError if a side becomes 0.
    """
    scale = min(1.0, math.sqrt(max_pixels / (height * width)))
    # 1e-6, so that a side that rounding errors make slightly smaller than a multiple stays this multiple
    fitted_height = int(height * scale + 1e-6) // multiple * multiple
    fitted_width = int(width * scale + 1e-6) // multiple * multiple
    if fitted_height == 0 or fitted_width == 0:
        raise ClipError(
            f"its frames are {width} x {height}, and a side is below {multiple} at data.max_pixels={max_pixels}: "
            "set data.height and data.width"
        )
    return fitted_height, fitted_width


def read_frames(path: Path, number: int, height: int, width: int) -> Frames:
    """Decodes the first `number` frames (F, H, W, 3), scales them to cover height x width and crops their centre.

    Raises:
        ClipError: the file has fewer frames than its header says, or a frame cannot be decoded.
    """
    # `closing` closes the file although the generator has more frames
    resized_frames: list[Frames] = []
    with closing(_decode(path)) as frames:
        for frame in islice(frames, number):
            full_height, full_width = frame.shape[:2]
            # the larger scale, with which the frame covers the target in both directions
            scale = max(height / full_height, width / full_width)
            left = max(0.0, (full_width - width / scale) / 2)
            top = max(0.0, (full_height - height / scale) / 2)
            box = (left, top, full_width - left, full_height - top)
            picture = Image.fromarray(frame)
            resized = picture.resize((width, height), Image.Resampling.BICUBIC, box=box)
            resized_frames.append(np.asarray(resized))
    if len(resized_frames) < number:
        raise ClipError(f"its frame {len(resized_frames)} cannot be decoded: the file is damaged")
    return np.stack(resized_frames)


def _decode(path: Path) -> Generator[Frames, None, None]:
    """Yields upright frames (H, W, 3). Raises ClipError if a frame cannot be decoded or there is none."""
    files = _pictures(path) if path.is_dir() else [path]
    is_empty = True
    for file in files:
        with _opened(file) as (container, stream):
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise ClipError(f"its frame at {frame.time or 0.0:.2f} s is damaged")
                is_empty = False
                # a decoder returns frames as they are stored, and the metadata says how to turn them
                quarter_turns = frame.rotation // 90
                upright = np.rot90(frame.to_ndarray(format="rgb24"), quarter_turns)
                yield np.ascontiguousarray(upright)
    if is_empty:
        raise ClipError("none of its frames can be decoded: the file is damaged")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Opens a container and its video stream; turns PyAV's errors inside the context into ClipError."""
    av = require_av()
    try:
        # ignores titles in old encodings
        with av.open(str(path), metadata_errors="replace") as container:
            stream = container.streams.best("video")
            if stream is None:
                raise ClipError("it has no pictures")
            yield container, stream
    except (av.FFmpegError, MemoryError) as error:
        raise ClipError(f"{path.name} cannot be read as a video or picture ({error})") from error


def _pictures(folder: Path) -> list[Path]:
    """Returns a folder's pictures in natural order (frame_2 before frame_10). Raises ClipError if there are none."""
    files = []
    for path in folder.iterdir():
        is_hidden = path.name.startswith(".")
        if path.suffix.lower() in PICTURES and not is_hidden:
            files.append(path)
    if not files:
        raise ClipError(f"the folder holds no picture ({', '.join(PICTURES)})")
    return sorted(files, key=_natural_order)


def _natural_order(path: Path) -> list[str]:
    """Returns the parts of a file's name, all padded to one length, so that comparing texts compares numbers."""
    parts = re.split(r"(\d+)", path.name.lower())
    return [part.zfill(20) for part in parts]
