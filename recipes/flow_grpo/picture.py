"""Samples of the evaluation before and after training, side by side: one row for each prompt, the same noise in each
column of both halves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_SHOWN = 6
"""Samples of a prompt in each half."""
_CELL, _TEXT = 0.5, 3.0  # inches
_RIGHT, _WRONG = "#2f7d4a", "#b5495b"


def draw_before_after(
    path: Path,
    prompts: Sequence[str],
    frames: tuple[torch.Tensor, torch.Tensor],
    scores: tuple[Sequence[float | None], Sequence[float | None]],
) -> Path:
    """Writes a PNG. frames: before and after, (prompts x n, F, 3, H, W) in [0, 1], of which the first frame is shown;
    scores: theirs; a frame around a sample says whether it is above the mean of the scores before."""
    n = len(frames[0]) // len(prompts)
    shown = min(n, _SHOWN)
    known = [score for score in scores[0] if score is not None]
    middle = sum(known) / max(1, len(known))
    width, height = _TEXT + (2 * shown + 1) * _CELL, (len(prompts) + 0.6) * _CELL
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    for half, name in enumerate(("before", "after")):
        left = _TEXT + half * (shown + 0.5) * _CELL
        figure.text((left + shown * _CELL / 2) / width, 1 - 0.3 * _CELL / height, name, ha="center", va="center")
        for row in range(len(prompts)):
            top = (0.6 + row) * _CELL
            for column in range(shown):
                sample = row * n + column
                box = (left + column * _CELL, height - top - _CELL)
                axes = figure.add_axes((box[0] / width, box[1] / height, 0.9 * _CELL / width, 0.9 * _CELL / height))
                axes.imshow(frames[half][sample, 0].permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                score = scores[half][sample]
                axes.spines[:].set(color=_RIGHT if score is not None and score > middle else _WRONG, linewidth=2)
    for row, prompt in enumerate(prompts):
        y = 1 - (0.6 + row + 0.45) * _CELL / height
        figure.text(0.05 / width, y, prompt, va="center", size=9, parse_math=False)
    figure.savefig(path, dpi=110)
    return path
