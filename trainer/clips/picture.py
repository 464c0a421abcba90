"""What training did to a few clips, as pictures for a page of 830 pixels' width: reference, before and after.

`before_after` writes rows of frames, `before_after_gif` the clips moving beside each other. The clips of a run have one
size; they are (F, 3, H, W) in [0, 1].
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

MOST_CLIPS, MOST_FRAMES = 3, 6
_WIDTH, _MARGIN, _GAP, _LABELS, _LINE = 8.3, 0.1, 0.06, 1.0, 0.2  # inches, as all sizes of a figure
_TALLEST = 1.15
_GREY, _INK, _BETTER, _WORSE = "#6a6f76", "#1c2126", "#2f7d4a", "#b5495b"
_DPI, _GIF_DPI, _GIF_FPS = 200, 100, 8


@dataclass(frozen=True)
class BeforeAfter:
    """One prompt with its reference clip, what was generated from it, and what that scored."""

    prompt: str
    reference: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    score_before: float
    score_after: float

    def parts(self) -> list[tuple[str, Frames, str]]:
        """Label, frames and the label's colour: that of after says whether the score rose."""
        return [
            ("reference", as_frames(self.reference), _INK),
            (f"before\n{self.score_before:.2f}", as_frames(self.before), _INK),
            (
                f"after\n{self.score_after:.2f}",
                as_frames(self.after),
                _BETTER if self.score_after > self.score_before else _WORSE,
            ),
        ]


def before_after(path: Path, clips: Sequence[BeforeAfter], title: str) -> Path:
    """Writes a PNG of double resolution with three rows of at most MOST_FRAMES frames, evenly from the first to the
    last, for each of the first MOST_CLIPS clips, of which there is one at least."""
    count = len(clips[0].reference)
    numbers = np.linspace(0, count - 1, min(MOST_FRAMES, count)).round().astype(int)
    page = _Page(clips, title, 3, len(numbers), left=_MARGIN + _LABELS, tallest=_TALLEST)
    for clip, top in page.places:
        for row, (label, frames, color) in enumerate(clip.parts()):
            middle = top + row * (page.height + _GAP) + page.height / 2
            page.text(_MARGIN, middle, label, va="center", color=color, weight="bold" if row else None)
            for column, number in enumerate(numbers):
                page.frame(top, row, column, frames[number])
                if row == 0:
                    x = page.left + column * (page.width + _GAP) + page.width / 2
                    page.text(x, top - 0.03, f"frame {number}", ha="center", va="bottom", color=_GREY, size=8)
    page.figure.savefig(path, dpi=_DPI)
    return path


def before_after_gif(path: Path, clips: Sequence[BeforeAfter]) -> Path:
    """Writes an animated GIF: for each of the first MOST_CLIPS clips reference, before and after beside each other."""
    from PIL import Image

    page = _Page(clips, "", 1, 3, left=_MARGIN, tallest=3 * _TALLEST)
    moving: list[tuple[Axes, Frames]] = []
    for clip, top in page.places:
        for column, (label, frames, color) in enumerate(clip.parts()):
            x, weight = page.left + column * (page.width + _GAP), "bold" if column else None
            page.text(x, top - 0.03, label.replace("\n", " "), va="bottom", color=color, weight=weight)
            moving.append((page.frame(top, 0, column, frames[0]), frames))
    canvas = FigureCanvasAgg(page.figure)
    page.figure.set_dpi(_GIF_DPI)
    pictures = []
    for number in range(len(clips[0].reference)):
        for axes, frames in moving:
            axes.images[0].set_data(frames[number])
        canvas.draw()
        pictures.append(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy()))
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=round(1000 / _GIF_FPS), loop=0)
    return path


class _Page:
    """A figure whose places are inches from the upper left corner, with title and prompts written. places: the first
    clips, each with where its frames begin. width, height: of a frame, at most `tallest`."""

    def __init__(
        self, clips: Sequence[BeforeAfter], title: str, rows: int, columns: int, *, left: float, tallest: float
    ) -> None:
        high, wide = clips[0].reference.shape[2:]
        self.left = left
        self.width = min((_WIDTH - _MARGIN - left) / columns - _GAP, tallest * wide / high)
        self.height = self.width * high / wide
        y, prompts = _MARGIN + (0.3 if title else 0.0), []
        self.places: list[tuple[BeforeAfter, float]] = []
        for clip in clips[:MOST_CLIPS]:
            prompt = textwrap.wrap(clip.prompt, 108, max_lines=2, placeholder=" ...")
            prompts.append((y, "\n".join(prompt)))
            self.places.append((clip, y + _LINE * (len(prompt) + 1) + 0.05))
            y = self.places[-1][1] + rows * (self.height + _GAP) + 0.14
        self._total = y - 0.14 + _MARGIN
        self.figure = Figure(figsize=(_WIDTH, self._total), facecolor="white")
        FigureCanvasAgg(self.figure)
        self.text(_MARGIN, _MARGIN, title, va="top", size=13, weight="bold")
        for place, text in prompts:
            self.text(_MARGIN, place, text, va="top")

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

    def frame(self, top: float, row: int, column: int, frame: Frames) -> Axes:
        """Draws a frame of the clip whose frames begin at `top`."""
        x, y = self.left + column * (self.width + _GAP), top + row * (self.height + _GAP)
        box = (x / _WIDTH, 1 - (y + self.height) / self._total, self.width / _WIDTH, self.height / self._total)
        axes = self.figure.add_axes(box)
        axes.imshow(frame)
        axes.set_axis_off()
        return axes
