"""The people of the embedded run: draws clips of faces, and embeds the identity of a face in closed form.

A person is defined by the colours of skin, hair, iris, shirt and background and by the shapes of head and hair. In a
clip, the head sways and the mouth moves. `FisherEmbedder` implements Fisherfaces (Belhumeur et al. 1997): it projects
the middle of a frame on the directions with the largest ratio of variance between people to variance within a person.
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

SIZE, FRAMES, TRAITS = 64, 5, 20
DRAWN_AT_ONCE = 8


class Cast(NamedTuple):
    """n people with the motion of each in one clip.

    traits: (n, TRAITS) in [0, 1]. sway: (n, F, 2) offset of the head in pixels. mouth: (n, F) opening in [0, 1].
    """

    traits: torch.Tensor
    sway: torch.Tensor
    mouth: torch.Tensor


def cast_of(traits: torch.Tensor, generator: torch.Generator) -> Cast:
    """Draws a random motion of head and mouth for each of the people (n, TRAITS)."""
    time = torch.linspace(0, 1, FRAMES)
    phase, speed, height, mouth_phase, mouth_speed = torch.rand(len(traits), 5, 1, generator=generator).unbind(1)
    turn = 2 * torch.pi * phase + 2 * torch.pi * (0.2 + 0.2 * speed) * time  # (n, F)
    sway = torch.stack([4 * turn.sin(), (2 * turn).cos() + 2 * (height - 0.5)], -1)
    mouth = 0.5 + 0.5 * (2 * torch.pi * (mouth_phase + (0.3 + 0.3 * mouth_speed) * time)).sin()
    return Cast(traits, sway, mouth)


def draw(cast: Cast) -> torch.Tensor:
    """Renders a clip of each person, (n, F, 3, SIZE, SIZE) in [0, 1]."""
    parts = zip(*(part.split(DRAWN_AT_ONCE) for part in cast), strict=True)
    return torch.cat([_paint_people(Cast(*part)) for part in parts])


def _paint_people(cast: Cast) -> torch.Tensor:
    """Renders clips like `draw`, painting from the background to the mouth."""
    pixel = torch.arange(SIZE, dtype=torch.float32) - SIZE / 2
    x = pixel.view(1, 1, 1, SIZE) - cast.sway[..., 0, None, None]
    y = pixel.view(1, 1, SIZE, 1) - cast.sway[..., 1, None, None]
    number = iter(cast.traits.T.reshape(TRAITS, -1, 1, 1, 1))  # each (n, 1, 1, 1)

    def colour(low: float, high: float) -> torch.Tensor:
        """Returns a colour from the next three traits, (n, 1, 3, 1, 1)."""
        return low + (high - low) * torch.stack([next(number) for _ in range(3)], 2)

    background, shirt = colour(0.1, 0.9), colour(0.1, 0.9)
    skin, hair, iris = colour(0.45, 0.95), colour(0.0, 0.9), colour(0.0, 0.7)
    width, height = 13 + 4 * next(number), 17 + 3 * next(number)
    hair_width = next(number) * 3 + 2
    hair_length = next(number) * 22
    fringe = next(number) * 6
    white = skin.new_ones(1, 1, 3, 1, 1)
    lips = skin.new_tensor([0.65, 0.1, 0.15]).view(1, 1, 3, 1, 1)

    def ellipse(cx: float, cy: float, rx: torch.Tensor | float, ry: torch.Tensor | float) -> torch.Tensor:
        """Returns the approximate distance to an ellipse's border in pixels, positive inside, (n, F, SIZE, SIZE)."""
        radius = (((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2).sqrt()
        return (1 - radius) * torch.as_tensor(rx).clamp_max(torch.as_tensor(ry))

    locks = torch.minimum(hair_length - y, width + hair_width - x.abs()).minimum(y + 2)
    picture = background.expand(-1, FRAMES, -1, SIZE, SIZE)
    for tint, inside in (
        (shirt, ellipse(0, 38, 24, 18)),
        (hair, torch.maximum(ellipse(0, -2, width + hair_width, height + hair_width), locks)),
        (skin, ellipse(0, 0, width, height)),
        (hair, torch.minimum(ellipse(0, -2, width + 1, height + 1), -(y + 9) + fringe - 3)),
        *((white, ellipse(side, -2, 4.2, 3.0)) for side in (-6.5, 6.5)),
        *((iris, ellipse(side, -2, 2.2, 2.2)) for side in (-6.5, 6.5)),
        (skin * 0.7, ellipse(0, 4, 1.5, 2.5)),
        (lips, ellipse(0, 10, 5.5, 1.2 + 1.8 * cast.mouth[..., None, None])),
    ):
        picture = picture + inside.sigmoid()[:, :, None] * (tint - picture)
    return picture


class FisherEmbedder(nn.Module):
    """Embeds the identity of a face by a linear map of the frame's middle.

    path: file with `mean` (d,) and `directions` (d, D), written by `fit`.
    """

    crop_size = SIZE

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        tensors = load_file(path)
        self.mean, self.directions = nn.Buffer(tensors["mean"]), nn.Buffer(tensors["directions"])

    def forward(self, crops: torch.Tensor) -> torch.Tensor:
        """Returns vectors (n, D) of crops (n, 3, SIZE, SIZE) in [0, 1]."""
        return (_middle(crops) - self.mean) @ self.directions

    @staticmethod
    def fit(path: Path, clips: torch.Tensor, dimensions: int = 16, ridge: float = 0.02) -> None:
        """Writes a file with `dimensions` directions, scaled to equal variance between people.

        clips: (people, F, 3, SIZE, SIZE) in [0, 1]. ridge: variance added to every pixel within a person, so that
        nearly constant pixels do not dominate.
        """
        pixels = _middle(clips.flatten(0, 1)).view(*clips.shape[:2], -1).double()
        person = pixels.mean(1)
        mean = person.mean(0)
        apart = (pixels - person[:, None]).flatten(0, 1)
        within = apart.T @ apart / len(apart) + ridge * torch.eye(len(mean), dtype=torch.float64)
        between = (person - mean).T @ (person - mean) / len(person)
        whiten = torch.linalg.inv(torch.linalg.cholesky(within))
        values, vectors = torch.linalg.eigh(whiten @ between @ whiten.T)
        chosen = (whiten.T @ vectors[:, -dimensions:]) / values[-dimensions:].sqrt()
        save_file({"mean": mean.float(), "directions": chosen.float().contiguous()}, path)


def _middle(frames: torch.Tensor) -> torch.Tensor:
    """Crops the middle of frames (n, 3, SIZE, SIZE), where the face is, at half resolution; (n, d)."""
    return F.avg_pool2d(frames[..., SIZE // 4 : -SIZE // 4, SIZE // 4 : -SIZE // 4], 2).flatten(1)
