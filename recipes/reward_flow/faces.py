"""The people of the embedded run: drawn faces, a detector and an identity embedder for them, all in closed form.

A person is a skin, hair, iris, shirt and background colour and the shape of head and hair; a clip is a few frames in
which the head sways and the mouth moves. `draw` makes pixels of both. `TemplateDetector` finds the mean face by
normalised correlation; `FisherEmbedder` is Fisherfaces (Belhumeur et al. 1997): the directions of the aligned crop in
which people differ most against how one person's frames differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from verl_lite.visual_rewards.faces import Faces, align

SIZE, FRAMES = 64, 5
TRAITS = 20
SHARPNESS = 1.0
DRAWN_AT_ONCE = 8


@dataclass(frozen=True)
class Cast:
    """n people, and how the head of each moves in one clip. traits: (n, TRAITS) in [0, 1]. sway: (n, F, 2) pixels.
    mouth: (n, F), how far it is open, in [0, 1]."""

    traits: torch.Tensor
    sway: torch.Tensor
    mouth: torch.Tensor


def people(count: int, generator: torch.Generator) -> torch.Tensor:
    """(count, TRAITS) in [0, 1], independent and uniform."""
    return torch.rand(count, TRAITS, generator=generator)


def in_motion(traits: torch.Tensor, generator: torch.Generator, frames: int = FRAMES) -> Cast:
    """A clip of each of these people (n, TRAITS), the head swaying and the mouth moving at a random phase."""
    count = len(traits)
    time = torch.linspace(0, 1, frames)
    phase, speed, height, mouth_phase, mouth_speed = torch.rand(count, 5, 1, generator=generator).unbind(1)  # (n, 1)
    turn = 2 * torch.pi * phase + 2 * torch.pi * (0.2 + 0.2 * speed) * time  # (n, F)
    sway = torch.stack([4 * turn.sin(), (2 * turn).cos() + 2 * (height - 0.5)], -1)
    mouth = 0.5 + 0.5 * (2 * torch.pi * (mouth_phase + (0.3 + 0.3 * mouth_speed) * time)).sin()
    return Cast(traits, sway, mouth)


def draw(cast: Cast) -> torch.Tensor:
    """(n, F, 3, SIZE, SIZE) in [0, 1]."""
    parts = zip(*(part.split(DRAWN_AT_ONCE) for part in (cast.traits, cast.sway, cast.mouth)), strict=True)
    return torch.cat([_paint_people(Cast(*part)) for part in parts])


def _paint_people(cast: Cast) -> torch.Tensor:
    """As `draw`; from the background to the mouth, each part over those before it."""
    traits, frames = cast.traits, cast.sway.shape[1]
    pixel = torch.arange(SIZE, dtype=torch.float32)
    x = pixel.view(1, 1, 1, SIZE) - cast.sway[..., 0, None, None] - SIZE / 2
    y = pixel.view(1, 1, SIZE, 1) - cast.sway[..., 1, None, None] - SIZE / 2
    number = iter(traits.T.reshape(TRAITS, -1, 1, 1, 1))  # each (n, 1, 1, 1)

    def colour(low: float, high: float) -> torch.Tensor:
        """(n, 1, 3, 1, 1)"""
        return low + (high - low) * torch.stack([next(number) for _ in range(3)], 2)

    background, shirt = colour(0.1, 0.9), colour(0.1, 0.9)
    skin, hair, iris = colour(0.45, 0.95), colour(0.0, 0.9), colour(0.0, 0.7)
    width, height = 13 + 4 * next(number), 17 + 3 * next(number)
    hair_width, hair_length, fringe = next(number) * 3 + 2, next(number) * 22, next(number) * 6
    picture = background.expand(-1, frames, -1, SIZE, SIZE)
    still_x, still_y = pixel.view(1, 1, 1, SIZE) - SIZE / 2, pixel.view(1, 1, SIZE, 1) - SIZE / 2

    def paint(canvas: torch.Tensor, tint: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        cover = (inside * SHARPNESS).sigmoid()[:, :, None]
        return canvas + cover * (tint - canvas)

    def ellipse(cx: float, cy: float, rx: torch.Tensor | float, ry: torch.Tensor | float) -> torch.Tensor:
        """Roughly the distance to its border in pixels, positive inside: (n, F, SIZE, SIZE)."""
        radius = (((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2).sqrt()
        return (1 - radius) * torch.as_tensor(rx).clamp_max(torch.as_tensor(ry))

    body = ((1 - ((still_x / 24) ** 2 + ((still_y - 38) / 18) ** 2).sqrt()) * 18).expand(1, frames, -1, -1)
    picture = paint(picture, shirt, body)
    locks = torch.minimum(hair_length - y, width + hair_width - x.abs()).minimum(y + 2)
    picture = paint(picture, hair, torch.maximum(ellipse(0, -2, width + hair_width, height + hair_width), locks))
    picture = paint(picture, skin, ellipse(0, 0, width, height))
    picture = paint(picture, hair, torch.minimum(ellipse(0, -2, width + 1, height + 1), -(y + 9) + fringe - 3))
    white, dark = picture.new_ones(1, 1, 3, 1, 1), picture.new_full((1, 1, 3, 1, 1), 0.05)
    for side in (-6.5, 6.5):
        picture = paint(picture, white, ellipse(side, -2, 4.2, 3.0))
        picture = paint(picture, iris, ellipse(side, -2, 2.2, 2.2))
        picture = paint(picture, dark, ellipse(side, -2, 0.9, 0.9))
    picture = paint(picture, skin * 0.7, ellipse(0, 4, 1.5, 2.5))
    lips = picture.new_tensor([0.65, 0.1, 0.15]).view(1, 1, 3, 1, 1)
    return paint(picture, lips, ellipse(0, 10, 5.5, 1.2 + 1.8 * cast.mouth[..., None, None]))


KEYPOINTS = ((-6.5, -2.0), (6.5, -2.0), (0.0, 5.0), (-5.0, 10.0), (5.0, 10.0))
"""Eyes, nose, corners of the mouth: (x, y) from the middle of the head, in pixels."""

PATCH_LEFT, PATCH_RIGHT, PATCH_TOP, PATCH_BOTTOM = -12, 12, -7, 15
"""The part of a face that is compared with the mean face, in pixels from the middle of the head."""


class TemplateDetector(nn.Module):
    """Where the mean face fits best, by normalised correlation of luminance; no face where it is below `threshold`.

    path: file with `template` (h, w), of mean 0 and length 1, as `fit_faces` makes it.
    """

    def __init__(self, path: str | Path, threshold: float = 0.6) -> None:
        super().__init__()
        self.template, self.threshold = nn.Buffer(load_file(path)["template"]), threshold

    @torch.no_grad()
    def forward(self, frames: torch.Tensor) -> Faces:
        """frames: (F, 3, H, W) in [0, 1]."""
        grey = _luminance(frames.float())[:, None]
        ones = torch.ones_like(self.template)[None, None]
        total, square = F.conv2d(grey, ones), F.conv2d(grey * grey, ones)
        length = (square - total**2 / ones.numel()).clamp_min(1e-6).sqrt()
        likeness = (F.conv2d(grey, self.template[None, None]) / length)[:, 0]  # (F, rows, columns)
        best, place = likeness.flatten(1).max(1)
        row, column = place // likeness.shape[-1], place % likeness.shape[-1]
        middle = torch.stack([column - PATCH_LEFT, row - PATCH_TOP], -1).float()
        return Faces(best >= self.threshold, middle[:, None] + middle.new_tensor(KEYPOINTS))


class FisherEmbedder(nn.Module):
    """Aligned crops to vectors in which people differ and one person's frames do not: a linear map of the crop.

    path: file with `mean` (d,) and `directions` (d, D), as `fit_faces` makes it.
    """

    crop_size = 32

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        tensors = load_file(path)
        self.mean, self.directions = nn.Buffer(tensors["mean"]), nn.Buffer(tensors["directions"])

    def forward(self, crops: torch.Tensor) -> torch.Tensor:
        """crops: (n, 3, crop_size, crop_size) in [0, 1]. Gives (n, D)."""
        return (_halved(crops) - self.mean) @ self.directions


def fit_faces(path: Path, clips: torch.Tensor, sway: torch.Tensor, known: int) -> None:
    """Writes what detector and embedder read. clips: (n, F, 3, SIZE, SIZE) in [0, 1]. sway: (n, F, 2), where the heads
    are. known: number of people whom the embedder learns from."""
    template = mean_face(clips[:, 0], sway[:, 0])
    save_file({"template": template}, path)
    detector = TemplateDetector(path)
    crops = torch.stack([align(clip, detector(clip).keypoints, FisherEmbedder.crop_size) for clip in clips[:known]])
    mean, directions = fisher_directions(crops)
    save_file({"template": template, "mean": mean, "directions": directions.contiguous()}, path)


def mean_face(frames: torch.Tensor, sway: torch.Tensor) -> torch.Tensor:
    """The template (h, w). frames: (n, 3, SIZE, SIZE) in [0, 1]. sway: (n, 2)."""
    middle = sway + SIZE / 2
    x = torch.arange(PATCH_LEFT, PATCH_RIGHT).view(1, 1, -1) + middle[:, 0].view(-1, 1, 1)
    y = torch.arange(PATCH_TOP, PATCH_BOTTOM).view(1, -1, 1) + middle[:, 1].view(-1, 1, 1)
    grid = torch.stack([x.expand(-1, y.shape[1], -1), y.expand(-1, -1, x.shape[2])], -1)
    grey = _luminance(frames)[:, None]
    patches = F.grid_sample(grey, (grid + 0.5) * 2 / SIZE - 1, align_corners=False)[:, 0]
    patches = patches - patches.mean((1, 2), keepdim=True)
    template = (patches / patches.norm(dim=(1, 2), keepdim=True)).mean(0)
    return template / template.norm()


def fisher_directions(
    crops: torch.Tensor, dimensions: int = 16, ridge: float = 0.02
) -> tuple[torch.Tensor, torch.Tensor]:
    """mean (d,) and directions (d, dimensions), in each of which people spread alike.

    crops: (people, frames of each, 3, S, S) in [0, 1]. ridge: variance that is added to every pixel within a person,
    so that no faint pixel decides.
    """
    pixels = _halved(crops.flatten(0, 1)).view(*crops.shape[:2], -1).double()
    person = pixels.mean(1)
    mean = person.mean(0)
    apart = (pixels - person[:, None]).flatten(0, 1)
    within = apart.T @ apart / len(apart) + ridge * torch.eye(len(mean), dtype=torch.float64)
    between = (person - mean).T @ (person - mean) / len(person)
    whiten = torch.linalg.inv(torch.linalg.cholesky(within))
    values, vectors = torch.linalg.eigh(whiten @ between @ whiten.T)
    chosen = (whiten.T @ vectors[:, -dimensions:]) / values[-dimensions:].sqrt()
    return mean.float(), chosen.float()


def _halved(crops: torch.Tensor) -> torch.Tensor:
    """(n, d): the crops (n, 3, S, S) at half their resolution."""
    return F.avg_pool2d(crops, 2).flatten(1)


def _luminance(frames: torch.Tensor) -> torch.Tensor:
    """(n, H, W) of (n, 3, H, W)."""
    return (frames * frames.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1)
