"""Clips as files: what a header says, which frames a clip is made of, and these frames at the size of training.

Takes a path of a video container (mp4, mov, mkv, webm ... by PyAV), of an animated picture (gif, webp, apng) or of a
folder of pictures; gives frames as uint8 (F, H, W, 3), upright, in presentation order. Headers are read without
decoding more than the first frame. What is wrong with a file is a `ClipError`, a sentence that
goes on after the path: "it has 5 frames ...".
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from trainer.clips.table import nearest_file
from verl_lite.errors import UserError

if TYPE_CHECKING:
    import av.container
    import av.video.stream

Frames = NDArray[np.uint8]

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".apng")
"""Files that Pillow reads: a frame of a folder, or a clip of their own."""

RATE_TOLERANCE = 0.01
"""A clip at 15.984 frames a second serves a data.fps of 16; the repeated frame comes after half a minute."""

_REORDERED = 32  # frames may lie in a file later than they are shown, by at most 16 in H.264 and H.265
_OF_CAMERAS = ("JPEG", "MPO")  # formats in which Exif says how a picture was held; in others it lies behind the pixels
_DAMAGE = (OSError, SyntaxError, ValueError, IndexError, struct.error, zlib.error, Image.DecompressionBombError)
"""What Pillow was seen to raise where bytes are wrong or missing."""
_GIF_DEFAULT_S = 0.1  # what players make of a duration of 0


class ClipError(ValueError):
    """A file that is no clip for this training."""


def require_av() -> Any:
    """The PyAV module. Raises UserError where it is not installed."""
    try:
        import av
    except ImportError:
        raise UserError(
            "Videos are read and written by PyAV, which is not installed: pip install 'verl_lite[diffusion]'"
        ) from None
    return av


@dataclass(frozen=True)
class Header:
    """What is known of a clip without decoding it.

    height, width: of an upright frame. frames: how many were counted; more may follow unless `is_whole`. times: of
    these frames in seconds from the first, in the order of presentation; None where a file has none.
    """

    height: int
    width: int
    frames: int
    is_whole: bool
    times: tuple[float, ...] | None

    @property
    def rate(self) -> float | None:
        """Frames a second, on average; None without times or of a single frame."""
        return (len(self.times) - 1) / self.times[-1] if self.times and self.times[-1] > 0 else None


def read_header(path: Path, num_frames: int, fps: float | None = None) -> Header:
    """The header of a clip of which `num_frames` frames are wanted. Raises ClipError for what is no clip."""
    if path.is_dir():
        return _folder_header(path)
    if not path.is_file():
        raise ClipError(f"there is no such file or folder{nearest_file(path)}")
    if path.stat().st_size == 0:
        raise ClipError("the file is empty")
    if path.suffix.lower() in PICTURES:
        return _picture_header(path, num_frames, fps)
    return _video_header(path, num_frames, fps)


def choose_frames(header: Header, num_frames: int, fps: float | None) -> list[int]:
    """Which frames a clip is made of, by number. fps: those nearest to the times 0, 1 / fps, 2 / fps ... (the earlier
    of two); None = the first ones. Raises ClipError for a clip that is too short, or has fewer frames a second than
    fps."""
    if fps is None or header.times is None or num_frames == 1:
        if header.frames < num_frames:
            raise ClipError(
                f"it has {header.frames} frame{'s' * (header.frames != 1)}, and data.num_frames={num_frames}"
            )
        return list(range(num_frames))
    wanted = np.arange(num_frames) / fps
    period = header.times[-1] / max(1, header.frames - 1)  # the last frame is shown this long too
    if header.times[-1] + period <= wanted[-1]:
        raise ClipError(
            f"it lasts {header.times[-1] + period:.2f} s, and data.num_frames={num_frames} at data.fps={fps:g} reach "
            f"to {wanted[-1]:.2f} s"
        )
    if header.rate is not None and header.rate < fps * (1 - RATE_TOLERANCE):
        raise ClipError(
            f"it has {header.rate:.4g} frames a second, fewer than data.fps={fps:g}, so that frames would be repeated"
        )
    between = (np.array(header.times[1:]) + np.array(header.times[:-1])) / 2
    return np.searchsorted(between, wanted - 1e-3 / fps).tolist()


def fitted_size(
    height: int, width: int, *, max_pixels: int, multiple: int, exact: tuple[int, int] | None = None
) -> tuple[int, int]:
    """(H, W) that frames of a clip are brought to: `exact`, or scaled down to at most max_pixels with the sides rounded
    down to a multiple. Nothing is scaled up. Raises ClipError for frames smaller than one multiple."""
    if exact is not None:
        return exact
    scale = min(1.0, math.sqrt(max_pixels / (height * width)))
    sides = [int(side * scale + 1e-6) // multiple * multiple for side in (height, width)]
    if min(sides) == 0:
        raise ClipError(
            f"its frames are {width} x {height}, which leaves a side below {multiple} at data.max_pixels={max_pixels}: "
            "set data.height and data.width"
        )
    return sides[0], sides[1]


def read_frames(path: Path, numbers: Sequence[int], height: int, width: int) -> Frames:
    """The frames of these ascending numbers, each scaled until it covers height x width and cropped around its centre:
    (F, H, W, 3). Raises ClipError where the file holds fewer than its header says, or cannot be decoded."""
    wanted = set(numbers)
    taken: dict[int, Frames] = {}
    decoded = 0
    with closing(_decode(path)) as pictures:
        for number, picture in enumerate(islice(pictures, max(numbers) + 1)):
            decoded += 1
            if number in wanted:
                taken[number] = _cover(picture, height, width)
    if len(taken) < len(wanted):
        raise ClipError(
            f"only {decoded} of its frames can be decoded, and {max(numbers) + 1} are needed: the file is damaged"
        )
    return np.stack([taken[number] for number in numbers])


def _cover(picture: Image.Image, height: int, width: int) -> Frames:
    if (picture.height, picture.width) == (height, width):
        return np.asarray(picture)
    scale = max(height / picture.height, width / picture.width)
    left = max(0.0, (picture.width - width / scale) / 2)
    top = max(0.0, (picture.height - height / scale) / 2)
    box = (left, top, picture.width - left, picture.height - top)
    return np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC, box=box))


def _decode(path: Path) -> Generator[Image.Image, None, None]:
    """Upright RGB pictures, one after another. Raises ClipError when one of them cannot be decoded."""
    if path.is_dir():
        for file in _folder_files(path):
            with _picture(file) as picture:
                yield _upright(picture)
    elif path.suffix.lower() in PICTURES:
        with _picture(path) as picture:
            for number in range(getattr(picture, "n_frames", 1)):
                picture.seek(number)
                yield _upright(picture)
    else:
        yield from _decode_video(path)


# ------------------------------------------------------------------------------------------------------------ pictures


def _folder_files(folder: Path) -> list[Path]:
    """Its pictures in natural order: frame_2 before frame_10."""
    files = [path for path in folder.iterdir() if path.suffix.lower() in PICTURES and not path.name.startswith(".")]

    def by_number(path: Path) -> list[str | int]:
        """Its name cut into text and numbers by turns, text first."""
        parts = re.split(r"(\d+)", path.name.lower())
        return [int(part) if place % 2 else part for place, part in enumerate(parts)]

    return sorted(files, key=by_number)


def _folder_header(folder: Path) -> Header:
    files = _folder_files(folder)
    if not files:
        raise ClipError(f"the folder holds no picture ({', '.join(PICTURES)})")
    sizes: dict[tuple[int, int], Path] = {}
    for file in files:
        with _picture(file) as picture:
            sizes.setdefault(_size(picture), file)
    if len(sizes) > 1:
        (first, one), (second, other) = islice(sizes.items(), 2)
        raise ClipError(
            f"the pictures of the folder differ in size: {one.name} is {first[1]} x {first[0]}, {other.name} "
            f"{second[1]} x {second[0]}"
        )
    height, width = next(iter(sizes))
    return Header(height, width, len(files), True, None)


def _picture_header(path: Path, num_frames: int, fps: float | None) -> Header:
    with _picture(path) as picture:
        frames = getattr(picture, "n_frames", 1)
        height, width = _size(picture)
        if fps is None or frames == 1:
            return Header(height, width, frames, True, None)
        starts, end = [], 0.0
        for number in range(frames):
            starts.append(end)
            picture.seek(number)
            picture.load()
            end += picture.info.get("duration", 0) / 1000 or _GIF_DEFAULT_S
            if end > num_frames / fps:
                break
        return Header(height, width, len(starts), len(starts) == frames, tuple(starts))


@contextmanager
def _picture(path: Path) -> Generator[Image.Image, None, None]:
    """A file of pictures, open; what Pillow raises while it is becomes a ClipError."""
    try:
        with Image.open(path) as picture:
            yield picture
    except UnidentifiedImageError as error:
        raise ClipError(f"{path.name} is no picture that can be read") from error
    except _DAMAGE as error:
        raise ClipError(f"{path.name} cannot be decoded ({error}): the file is damaged") from error


def _size(picture: Image.Image) -> tuple[int, int]:
    """(H, W), upright. The pixels are not read."""
    sideways = picture.format in _OF_CAMERAS and picture.getexif().get(0x0112, 1) >= 5  # Exif's orientation
    return (picture.width, picture.height) if sideways else (picture.height, picture.width)


def _upright(picture: Image.Image) -> Image.Image:
    """As RGB; what is transparent is white."""
    turned = ImageOps.exif_transpose(picture) if picture.format in _OF_CAMERAS else picture
    if not turned.has_transparency_data:
        return turned.convert("RGB")
    layered = turned.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered).convert("RGB")


# -------------------------------------------------------------------------------------------------------------- videos


def _video_header(path: Path, num_frames: int, fps: float | None) -> Header:
    av = require_av()
    try:
        with _open(path) as container:
            stream = _stream(container)
            times, is_whole = _times(container, stream, num_frames, fps)
            if not times:
                raise ClipError("it has no frames")
        with _open(path) as container:
            first = next(container.decode(_stream(container)), None)
    except av.FFmpegError as error:
        raise ClipError(f"it is no video that can be read ({error.strerror})") from error
    if first is None:
        raise ClipError("none of its frames can be decoded: the file is damaged")
    height, width = (first.width, first.height) if first.rotation % 180 else (first.height, first.width)
    return Header(height, width, len(times), is_whole, tuple(times))


def _open(path: Path) -> av.container.InputContainer:
    return require_av().open(str(path), metadata_errors="replace")  # titles in old encodings are no reason to fail


def _stream(container: av.container.InputContainer) -> av.video.stream.VideoStream:
    stream = container.streams.best("video")
    if stream is None:
        raise ClipError(f"it has no pictures, only {', '.join(entry.type for entry in container.streams) or 'nothing'}")
    return stream  # type: ignore[return-value]


def _times(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream, num_frames: int, fps: float | None
) -> tuple[list[float], bool]:
    """When the frames are shown, from the first on, as far as is needed; whether these are all. Nothing is decoded."""
    shown: list[float] = []
    base, rate = stream.time_base, stream.average_rate or stream.guessed_rate
    enough = num_frames + _REORDERED
    until = None if fps is None else num_frames / fps
    past = 0
    for packet in container.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        tick = packet.dts if packet.pts is None else packet.pts
        if tick is not None and base is not None:
            shown.append(float(tick * base))
        else:
            shown.append(len(shown) / float(rate) if rate else float(len(shown)))
        past += until is not None and shown[-1] - shown[0] > until
        if len(shown) >= enough if until is None else past >= _REORDERED:
            break
    else:
        return _from_zero(shown), True
    return _from_zero(shown)[: len(shown) - _REORDERED], False


def _from_zero(shown: list[float]) -> list[float]:
    ordered = sorted(shown)
    return [time - ordered[0] for time in ordered]


def _decode_video(path: Path) -> Generator[Image.Image, None, None]:
    av = require_av()
    try:
        with _open(path) as container:
            for frame in container.decode(_stream(container)):
                if frame.is_corrupt:
                    raise ClipError(f"its frame at {frame.time or 0.0:.2f} s is damaged")
                picture = frame.to_image()
                yield picture.rotate(frame.rotation, expand=True) if frame.rotation % 360 else picture
    except av.FFmpegError as error:
        raise ClipError(f"it cannot be decoded ({error.strerror}): the file is damaged") from error
