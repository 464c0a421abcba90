"""Rewards that need no face: how colourful a clip is, and how near its colours are to the reference's."""

from __future__ import annotations

from typing import Any

import torch

from verl_lite.visual_rewards.base import VisualScore, as_pixels, register_visual_reward

VERY_COLOURFUL = 109 / 255
"""What Hasler and Suesstrunk's observers called extremely colourful, for pixels in [0, 1]."""


class _NoWeights:
    """A reward that holds no tensors has nothing to move."""

    def to(self, device: Any) -> _NoWeights:
        return self


@register_visual_reward("colourfulness")
class ColourfulnessReward(_NoWeights):
    """Mean colourfulness of the frames, 1 where people call a picture extremely colourful. It needs no reference."""

    def prepare(self, reference_frames: torch.Tensor) -> None:
        """Nothing."""

    def score(self, frames: torch.Tensor, reference: None) -> VisualScore:
        """frames: (F, 3, H, W) in [-1, 1]."""
        return VisualScore(colourfulness(as_pixels(frames)).mean() / VERY_COLOURFUL)


def colourfulness(pixels: torch.Tensor) -> torch.Tensor:
    """M3 of Hasler and Suesstrunk, Measuring colourfulness in natural images (2003), eq. 3: (F,).

    pixels: (F, 3, H, W) in [0, 1]; the paper's numbers are 255 times these. With rg = R - G and yb = (R + G) / 2 - B,
    over the pixels of a frame: sqrt(var rg + var yb) + 0.3 sqrt(mean(rg)^2 + mean(yb)^2).
    """
    red, green, blue = pixels.flatten(2).unbind(1)  # (F, H W)
    opponents = torch.stack([red - green, (red + green) / 2 - blue], 1)  # (F, 2, H W)
    spread = opponents.var(-1, correction=0).sum(-1)
    mean = opponents.mean(-1).square().sum(-1)
    tiny = 1e-12  # a grey frame's roots have a gradient too
    return (spread + tiny).sqrt() + 0.3 * (mean + tiny).sqrt()


@register_visual_reward("match_colour")
class MatchColourReward(_NoWeights):
    """1 - (distance of the mean colours + distance of their spreads), over all frames: 1 = as the reference clip.

    Each distance is the mean over R, G, B of the absolute difference, in units of [0, 1].
    """

    def prepare(self, reference_frames: torch.Tensor) -> torch.Tensor:
        """(2, 3): mean and standard deviation of each channel. reference_frames: (F, 3, H, W) in [0, 1]."""
        return _statistics(reference_frames.float())

    def score(self, frames: torch.Tensor, reference: torch.Tensor) -> VisualScore:
        """frames: (F, 3, H, W) in [-1, 1]. reference: of `prepare`."""
        distances = (_statistics(as_pixels(frames)) - reference).abs().mean(-1)
        return VisualScore(1 - distances.sum())


def _statistics(pixels: torch.Tensor) -> torch.Tensor:
    """(2, 3) of pixels (F, 3, H, W)."""
    values = pixels.transpose(0, 1).flatten(1)
    return torch.stack([values.mean(-1), (values.var(-1, correction=0) + 1e-12).sqrt()])
