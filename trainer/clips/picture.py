"""What training did to a few clips, as a picture: rows of frames of the reference, of before and of after.

`before_after` writes a PNG for a page of 830 pixels' width at double resolution; `before_after_gif` the same clips side
by side, moving. Clips are (F, 3, H, W) in [0, 1].
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trainer.clips.reading import Frames
from trainer.clips.writing import as_frames

MOST_CLIPS = 3
"""Of a picture, unless more are asked for."""

_WIDTH = 8.3  # inches; the size of a figure counts in inches throughout
_MARGIN = 0.1
_GAP = 0.06
_LABELS = 1.0
_LINE = 0.2
_PROMPT_CHARACTERS = 108
_PROMPT_LINES = 2
_LABEL_CHARACTERS = 12
_TALLEST = 1.15
_GREY, _INK = "#6a6f76", "#1c2126"
_BETTER, _WORSE = "#2f7d4a", "#b5495b"
_DPI, _GIF_DPI = 200, 100


@dataclass(frozen=True)
class BeforeAfter:
    """One prompt with its reference clip and what was generated from it; a score of None is not shown."""

    prompt: str
    reference: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    score_before: float | None = None
    score_after: float | None = None


def before_after(
    path: Path,
    clips: Sequence[BeforeAfter],
    *,
    frames: int = 6,
    most: int = MOST_CLIPS,
    score_name: str = "score",
    title: str = "",
) -> Path:
    """Writes a PNG with three rows of at most `frames` frames for each of the first `most` clips, evenly from the first
    frame to the last.

    Raises ValueError without clips, or where the clips of one entry differ in frames or size.
    """
    clips = clips[:most]
    _check(clips)
    shown = min(frames, max(clip.reference.shape[0] for clip in clips))
    width = _width(clips, (_WIDTH - 2 * _MARGIN - _LABELS) / shown - _GAP, _TALLEST)
    page = _Page(clips, title, rows=3, width=width)
    for clip, top in zip(clips, page.tops, strict=True):
        height = page.height(clip)
        numbers = np.linspace(0, clip.reference.shape[0] - 1, min(shown, clip.reference.shape[0])).round().astype(int)
        for row, (label, video) in enumerate(_parts(clip, score_name)):
            y = top + _LINE + row * (height + _GAP)
            page.text(
                _MARGIN, y + height / 2, label, va="center", color=_color(clip, row), weight="bold" if row else None
            )
            for column, (number, frame) in enumerate(zip(numbers, as_frames(video)[numbers], strict=True)):
                x = _MARGIN + _LABELS + column * (width + _GAP)
                page.frame(x, y, width, height, frame)
                if row == 0:
                    page.text(x + width / 2, y - 0.03, f"frame {number}", ha="center", va="bottom", color=_GREY, size=8)
    page.figure.savefig(path, dpi=_DPI)
    return Path(path)


def before_after_gif(
    path: Path,
    clips: Sequence[BeforeAfter],
    *,
    fps: float = 8.0,
    most: int = MOST_CLIPS,
    score_name: str = "score",
    title: str = "",
) -> Path:
    """Writes an animated GIF, for each of the first `most` clips reference, before and after beside each other; a clip
    that is shorter than others stays on its last frame. Raises ValueError as `before_after` does."""
    from PIL import Image

    clips = clips[:most]
    _check(clips)
    width = _width(clips, (_WIDTH - 2 * _MARGIN) / 3 - _GAP, 3 * _TALLEST)
    page = _Page(clips, title, rows=1, width=width)
    moving: list[tuple[Axes, Frames]] = []
    for clip, top in zip(clips, page.tops, strict=True):
        for column, (label, video) in enumerate(_parts(clip, score_name)):
            video_frames = as_frames(video)
            x, y = _MARGIN + column * (width + _GAP), top + _LINE
            name = label.replace("\n", " ")
            page.text(x, y - 0.03, name, va="bottom", color=_color(clip, column), weight="bold" if column else None)
            moving.append((page.frame(x, y, width, page.height(clip), video_frames[0]), video_frames))
    canvas = FigureCanvasAgg(page.figure)
    page.figure.set_dpi(_GIF_DPI)
    pictures = []
    for number in range(max(len(frames) for _, frames in moving)):
        for axes, frames in moving:
            axes.images[0].set_data(frames[min(number, len(frames) - 1)])
        canvas.draw()
        pictures.append(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy()))
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=round(1000 / fps), loop=0)
    return Path(path)


class _Page:
    """A figure whose places are inches from the upper left corner. tops: where each clip's frames begin, with a line
    above them; the prompts are written already. rows: of frames for each clip. width: of a frame."""

    def __init__(self, clips: Sequence[BeforeAfter], title: str, *, rows: int, width: float) -> None:
        self.width = width
        y = _MARGIN + (0.3 if title else 0.0)
        places, self.tops = [], []
        for clip in clips:
            prompt = textwrap.wrap(clip.prompt, _PROMPT_CHARACTERS, max_lines=_PROMPT_LINES, placeholder=" ...")
            places.append((y, "\n".join(prompt)))
            self.tops.append(y + _LINE * len(prompt) + 0.05)
            y = self.tops[-1] + _LINE + rows * (self.height(clip) + _GAP) + 0.14
        self._total = y - 0.14 + _MARGIN
        self.figure = Figure(figsize=(_WIDTH, self._total), facecolor="white")
        FigureCanvasAgg(self.figure)
        if title:
            self.text(_MARGIN, _MARGIN, title, va="top", size=13, weight="bold")
        for place, prompt_text in places:
            self.text(_MARGIN, place, prompt_text, va="top", size=10)

    def height(self, clip: BeforeAfter) -> float:
        """Of the clip's frames."""
        return self.width * clip.reference.shape[2] / clip.reference.shape[3]

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        va: str,
        ha: str = "left",
        color: str = _INK,
        size: float = 10,
        weight: str | None = None,
    ) -> None:
        """A `$` is no formula."""
        place = (x / _WIDTH, 1 - y / self._total)
        self.figure.text(*place, text, va=va, ha=ha, color=color, size=size, weight=weight, parse_math=False)

    def frame(self, x: float, y: float, width: float, height: float, frame: Frames) -> Axes:
        """Draws a frame within the box."""
        box = (x / _WIDTH, 1 - (y + height) / self._total, width / _WIDTH, height / self._total)
        axes = self.figure.add_axes(box)
        axes.imshow(frame)
        axes.set_axis_off()
        return axes


def _width(clips: Sequence[BeforeAfter], widest: float, tallest: float) -> float:
    """Of frames, so that those of no clip are taller than that."""
    return min(widest, *(tallest * clip.reference.shape[3] / clip.reference.shape[2] for clip in clips))


def _check(clips: Sequence[BeforeAfter]) -> None:
    if not clips:
        raise ValueError("a picture of before and after needs at least one clip")
    for number, clip in enumerate(clips):
        shapes = {name: tuple(getattr(clip, name).shape) for name in ("reference", "before", "after")}
        if len(set(shapes.values())) > 1 or clip.reference.ndim != 4 or clip.reference.shape[1] != 3:
            raise ValueError(f"clip {number} has the shapes {shapes}, expected the same (F, 3, H, W) three times")


def _parts(clip: BeforeAfter, score_name: str) -> list[tuple[str, torch.Tensor]]:
    def label(name: str, score: float | None) -> str:
        return name if score is None else f"{name}\n{words}\n{score:.2f}"

    words = textwrap.fill(score_name.replace("_", " "), _LABEL_CHARACTERS)

    return [
        ("reference", clip.reference),
        (label("before", clip.score_before), clip.before),
        (label("after", clip.score_after), clip.after),
    ]


def _color(clip: BeforeAfter, part: int) -> str:
    """Of a label: that of after says whether the score rose."""
    if part < 2 or clip.score_before is None or clip.score_after is None:
        return _INK
    return _BETTER if clip.score_after > clip.score_before else _WORSE
