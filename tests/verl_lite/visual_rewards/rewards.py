"""Rewards and parts of rewards that the tests of visual rewards use: right ones, and each broken in one way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl_lite.visual_rewards import Faces, VisualScore, as_pixels


class MeanColour(nn.Module):
    """An embedder: the mean colours of the crop's quarters, without their own mean."""

    crop_size = 8

    def forward(self, crops: torch.Tensor) -> torch.Tensor:
        quarters = F.adaptive_avg_pool2d(crops, 2)
        return (quarters - quarters.mean((1, 2, 3), keepdim=True)).flatten(1)


class TopLeftVector(nn.Module):
    """An embedder by hand: the colour of the first pixel of the crop, from grey."""

    crop_size = 4

    def forward(self, crops: torch.Tensor) -> torch.Tensor:
        return crops[:, :, 0, 0] - 0.5


def bright_frames(frames: torch.Tensor) -> Faces:
    """A detector: a frame that is not black is a face."""
    points = torch.tensor([[1.0, 1.0], [3.0, 1.0], [2.0, 2.0], [1.0, 3.0], [3.0, 3.0]])
    return Faces(frames.amax((1, 2, 3)) > 0.01, points.expand(len(frames), 5, 2))


class Redness:
    """A reward of a user's own: how red the clip is beside the reference."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.device = torch.device("cpu")

    def prepare(self, reference_frames: torch.Tensor) -> torch.Tensor:
        return reference_frames[:, 0].mean()

    def score(self, frames: torch.Tensor, reference: torch.Tensor) -> VisualScore:
        return VisualScore(-self.weight * (as_pixels(frames)[:, 0].mean() - reference).abs())

    def to(self, device: Any) -> Redness:
        self.device = torch.device(device)
        return self


class Detached(Redness):
    def score(self, frames: torch.Tensor, reference: torch.Tensor) -> VisualScore:
        return VisualScore(super().score(frames, reference).value.detach())


class PerFrame(Redness):
    def score(self, frames: torch.Tensor, reference: torch.Tensor) -> VisualScore:
        return VisualScore(as_pixels(frames).mean((1, 2, 3)))


class NotANumber(Redness):
    def score(self, frames: torch.Tensor, reference: torch.Tensor) -> VisualScore:
        return VisualScore(super().score(frames, reference).value * float("nan"))


class PlainNumber(Redness):
    def score(self, frames: torch.Tensor, reference: torch.Tensor) -> Any:
        return 0.5


class WithoutScore:
    def prepare(self, reference_frames: torch.Tensor) -> None: ...

    def to(self, device: Any) -> None: ...
