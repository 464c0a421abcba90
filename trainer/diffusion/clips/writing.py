"""Writes clips as mp4 files, and draws the picture that compares samples before and after training."""

import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trainer.diffusion.clips.reading import Frames, require_av
from verl_lite.errors import UserError

FPS = 16
"""Frame rate of Wan and ROLL."""

CODEC = "libx264"
# PyAV's colour space for RGB; players assume BT.709 from 720 lines on if the file names none
_BT601 = 6


def write_mp4(path: Path, frames: Frames) -> None:
    """Writes frames (F, H, W, 3) as H.264 in yuv420p for every player; repeats the last line of odd sides."""
    av = require_av()
    height, width = frames.shape[1:3]
    # yuv420p has one colour value for 2 x 2 pixels
    added_lines = (0, height % 2)
    added_columns = (0, width % 2)
    even_frames = np.pad(frames, ((0, 0), added_lines, added_columns, (0, 0)), mode="edge")
    even_height, even_width = even_frames.shape[1:3]

    # faststart: the index comes first in the file, so that a browser can play it before it has all of it
    file_options = {"movflags": "+faststart"}
    encoder_options = {"crf": "18", "threads": "1"}
    with av.open(str(path), "w", format="mp4", options=file_options) as container:
        stream: Any = container.add_stream(CODEC, rate=Fraction(FPS), options=encoder_options)
        stream.height = even_height
        stream.width = even_width
        stream.pix_fmt = "yuv420p"
        stream.codec_context.colorspace = _BT601
        for frame in even_frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            packets = stream.encode(picture)
            container.mux(packets)
        # the frames that the encoder still holds
        last_packets = stream.encode(None)
        container.mux(last_packets)


def as_frames(video: torch.Tensor) -> Frames:
    """Converts (F, 3, H, W) in [0, 1], of any device and floating dtype, to uint8 (F, H, W, 3); clips other values."""
    values = video.detach().to(torch.float32)
    scaled = values.clamp(0.0, 1.0) * 255.0
    pixels = scaled.round().to(torch.uint8)
    channels_last = pixels.permute(0, 2, 3, 1).contiguous()
    return channels_last.cpu().numpy()


def write_clips(folder: Path, rows: Sequence[int], videos: torch.Tensor, tell: Callable[[str], None]) -> None:
    """Writes the clips of `rows` into `folder`. Each file is complete or missing.

    Args:
        folder: folder, which is created.
        rows: row number of each clip, which is in the name of its file; a row can have several clips.
        videos: (n, F, 3, H, W) in [0, 1].
        tell: called with a message for each clip that could not be written.
    """
    for index, (row, video) in enumerate(zip(rows, videos, strict=True)):
        name = f"row_{row}"
        earlier_clips = rows[:index].count(row)
        if earlier_clips:
            name += f"_{earlier_clips}"
        path = folder / f"{name}.mp4"
        # renamed when it is complete, so that no file with the final name is half written
        draft = path.with_name(f".{path.name}.part")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_mp4(draft, as_frames(video))
            draft.replace(path)
        except Exception as error:
            # a failing encoder must not end the run
            tell(f"videos: {path}: {type(error).__name__}: {error}. The run continues without this clip")
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def require_encoder() -> None:
    """Raises UserError if PyAV or its H.264 encoder is missing."""
    if CODEC not in require_av().codecs_available:
        raise UserError(f"The installed PyAV cannot write {CODEC}: pip install av, or set trainer.video_freq=0")


class Strip(NamedTuple):
    """One row of the comparison picture: frames side by side.

    Attributes:
        label: text to the left of the frames.
        frames: (n, H, W, 3).
        is_better: colours the label green if True and red if False.
    """

    label: str
    frames: Frames
    is_better: bool | None = None


_COLOURS = {None: "#1c2126", True: "#2f7d4a", False: "#b5495b"}


def draw_strips(path: Path, groups: Sequence[tuple[str, Sequence[Strip]]], title: str, columns: int = 6) -> Path:
    """Draws a PNG with the strips of each prompt below each other, with `columns` evenly spaced frames per strip.

    Args:
        path: the file.
        groups: prompts with their strips; all frames have the same size, all strips the same number of frames.
        title: text above the strips.
        columns: largest number of frames in a strip.
    """
    _, first_strips = groups[0]
    count, frame_height, frame_width = first_strips[0].frames.shape[:3]
    num_panels = min(columns, count)
    evenly_spaced = np.linspace(0, count - 1, num_panels)
    numbers = evenly_spaced.round().astype(int).tolist()

    # in inches; a strip below a prompt is taller by the line of the prompt
    num_strips = sum(len(strips) for _, strips in groups)
    height = 0.35 + 1.15 * num_strips + 0.3 * len(groups)
    width = 1.2 + 1.1 * frame_width / frame_height * num_panels
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, weight="bold")

    rows_of_panels = iter(figure.subplots(num_strips, num_panels, squeeze=False))
    for prompt, strips in groups:
        # the prompt above the first of its strips
        title_of_strip = prompt
        for strip in strips:
            panels = next(rows_of_panels)
            _draw_strip(panels, strip, numbers, title_of_strip)
            title_of_strip = ""
    figure.savefig(path, dpi=200)
    return path


def _draw_strip(panels: Sequence[Axes], strip: Strip, numbers: Sequence[int], title: str) -> None:
    """Draws the frames of a strip with these numbers, one in each panel."""
    for panel, number in zip(panels, numbers, strict=True):
        frame = strip.frames[number]
        panel.imshow(frame, interpolation="nearest")
        panel.set(xticks=[], yticks=[], frame_on=False)

    # the prompt above the strip and its label to the left of it
    first_panel = panels[0]
    short_title = textwrap.shorten(title, 108, placeholder=" ...")
    colour = _COLOURS[strip.is_better]
    # parse_math=False: a prompt may contain dollar signs
    first_panel.set_title(short_title, loc="left", size=9, parse_math=False)
    first_panel.set_ylabel(strip.label, color=colour, rotation=0, ha="right", parse_math=False)
