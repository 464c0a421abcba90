"""Clips as files: how many frames they have and when, which of them are taken, and these at the size of training.

PyAV reads them all: video containers, gif and apng, and a folder of pictures, each of which is a file of one frame.
Frames are uint8 (F, H, W, 3), upright, in the order in which they are shown; what is transparent is white. What is
wrong with a file is a `ClipError`, a sentence that goes on after the path: "it has 5 frames ...".
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from verl_lite.errors import UserError
from verl_lite.registry import did_you_mean

Frames = NDArray[np.uint8]

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
"""Files of a folder that are frames."""

RATE_TOLERANCE = 0.01
"""A clip at 15.984 frames a second serves a data.fps of 16; the repeated frame comes after half a minute."""


class ClipError(ValueError):
    """A file that is no clip for this training."""


def require_av() -> Any:
    """The PyAV module. Raises UserError where it is not installed."""
    try:
        import av
    except ImportError:
        raise UserError("PyAV, which reads and writes clips, is missing: pip install 'verl_lite[diffusion]'") from None
    return av


@dataclass(frozen=True)
class Header:
    """What is known of a clip before it is decoded.

    height, width: of an upright frame. times: of all frames, in seconds from the first; None for a folder.
    """

    height: int
    width: int
    frames: int
    times: tuple[float, ...] | None

    @property
    def rate(self) -> float | None:
        """Frames a second, on average; None without times or of a single frame."""
        return (len(self.times) - 1) / self.times[-1] if self.times and self.times[-1] > 0 else None


def read_header(path: Path) -> Header:
    """Decodes the first frame and counts the others. Raises ClipError for what is no clip."""
    if not path.exists():
        beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ClipError(f"there is no such file or folder{did_you_mean(path.name, beside)}")
    with closing(_decode(path)) as frames:
        height, width = next(frames).shape[:2]
    if path.is_dir():
        return Header(height, width, len(_pictures(path)), None)
    with _opened(path) as (container, stream):
        packets = [packet for packet in container.demux(stream) if packet.size and not packet.is_discard]
        base, rate = stream.time_base, stream.average_rate or stream.guessed_rate or 1
    ticks = [packet.dts if packet.pts is None else packet.pts for packet in packets]
    if base is None or None in ticks:
        ticks, base = list(range(len(ticks))), 1 / rate
    first = min(ticks)
    return Header(height, width, len(ticks), tuple(float((tick - first) * base) for tick in sorted(ticks)))


def choose_frames(header: Header, num_frames: int, fps: float | None) -> list[int]:
    """The numbers of the frames that a clip is made of.

    Args:
        fps: takes the frames nearest to the times 0, 1 / fps, 2 / fps ... (the earlier of two); None = the first ones.

    Raises:
        ClipError: the clip is too short, or has fewer frames a second than fps.
    """
    if fps is None or header.times is None or num_frames == 1:
        if header.frames < num_frames:
            raise ClipError(f"it has {header.frames} frames, and data.num_frames={num_frames}")
        return list(range(num_frames))
    wanted = np.arange(num_frames) / fps
    length = header.times[-1] * (1 + 1 / max(1, header.frames - 1))  # the last frame is shown as long as others
    if length <= wanted[-1]:
        raise ClipError(
            f"it lasts {length:.2f} s, and data.num_frames={num_frames} at data.fps={fps:g} reach to {wanted[-1]:.2f} s"
        )
    if header.rate is not None and header.rate < fps * (1 - RATE_TOLERANCE):
        raise ClipError(
            f"it has {header.rate:.4g} frames a second, fewer than data.fps={fps:g}, so that frames would be repeated"
        )
    between = (np.array(header.times[1:]) + np.array(header.times[:-1])) / 2
    return np.searchsorted(between, wanted - 1e-3 / fps).tolist()


def fitted_size(height: int, width: int, *, max_pixels: int, multiple: int) -> tuple[int, int]:
    """(H, W) scaled down to max_pixels, with the sides rounded down to a multiple.

    Raises ClipError for frames smaller than one multiple.
    """
    scale = min(1.0, math.sqrt(max_pixels / (height * width)))
    sides = [int(side * scale + 1e-6) // multiple * multiple for side in (height, width)]
    if min(sides) == 0:
        raise ClipError(
            f"its frames are {width} x {height}, which leaves a side below {multiple} at data.max_pixels={max_pixels}: "
            "set data.height and data.width"
        )
    return sides[0], sides[1]


def read_frames(path: Path, numbers: Sequence[int], height: int, width: int) -> Frames:
    """The frames (F, H, W, 3) of these ascending numbers, scaled until they cover height x width and cropped around the
    centre.

    Raises:
        ClipError: the file holds fewer frames than its header says, or one cannot be decoded.
    """
    taken: dict[int, Frames] = {}
    with closing(_decode(path)) as frames:
        for number, frame in zip(range(max(numbers) + 1), frames, strict=False):
            if number in numbers:
                taken[number] = _cover(frame, height, width)
    if missing := sorted(set(numbers) - set(taken)):
        raise ClipError(f"its frame {missing[0]} cannot be decoded: the file is damaged")
    return np.stack([taken[number] for number in numbers])


def _cover(frame: Frames, height: int, width: int) -> Frames:
    high, wide = frame.shape[:2]
    scale = max(height / high, width / wide)
    left, top = max(0.0, (wide - width / scale) / 2), max(0.0, (high - height / scale) / 2)
    box = (left, top, wide - left, high - top)
    return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC, box=box))


def _decode(path: Path) -> Generator[Frames, None, None]:
    """Upright frames (H, W, 3), one after another. Raises ClipError where one cannot be decoded, or there is none."""
    is_empty = True
    for file in _pictures(path) if path.is_dir() else [path]:
        with _opened(file) as (container, stream):
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise ClipError(f"its frame at {frame.time or 0.0:.2f} s is damaged")
                is_empty = False
                yield np.ascontiguousarray(np.rot90(_rgb(frame), frame.rotation // 90))
    if is_empty:
        raise ClipError("none of its frames can be decoded: the file is damaged")


def _rgb(frame: Any) -> Frames:
    if frame.format.name != "pal8" and not any(part.is_alpha for part in frame.format.components):
        return frame.to_ndarray(format="rgb24")
    layered = frame.to_ndarray(format="rgba").astype(np.float32)
    opaque = layered[..., 3:] / 255
    return (layered[..., :3] * opaque + 255 * (1 - opaque)).round().astype(np.uint8)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """The container and its stream of pictures; what PyAV raises inside becomes a ClipError."""
    av = require_av()
    try:
        with av.open(str(path), metadata_errors="replace") as container:  # titles in old encodings do not matter
            stream = container.streams.best("video")
            if stream is None:
                raise ClipError("it has no pictures")
            yield container, stream
    except (av.FFmpegError, MemoryError) as error:
        webp = "; an animated webp has to be saved as mp4 or gif" * (path.suffix == ".webp")
        raise ClipError(f"{path.name} cannot be read as a video or picture ({error}){webp}") from error


def _pictures(folder: Path) -> list[Path]:
    """The folder's pictures in natural order: frame_2 before frame_10. Raises ClipError where there is none."""
    files = [path for path in folder.iterdir() if path.suffix.lower() in PICTURES and not path.name.startswith(".")]
    if not files:
        raise ClipError(f"the folder holds no picture ({', '.join(PICTURES)})")
    return sorted(files, key=lambda path: [part.zfill(20) for part in re.split(r"(\d+)", path.name.lower())])
