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

# side of a frame in pixels
SIZE = 64
FRAMES = 5
# numbers that define a person
TRAITS = 20
DRAWN_AT_ONCE = 8


class Cast(NamedTuple):
    """n people with the motion of each in one clip.

    Attributes:
        traits: (n, TRAITS) in [0, 1].
        sway: (n, F, 2) offset of the head in pixels.
        mouth: (n, F) opening in [0, 1].
    """

    traits: torch.Tensor
    sway: torch.Tensor
    mouth: torch.Tensor


def cast_of(traits: torch.Tensor, generator: torch.Generator) -> Cast:
    """Draws a random motion of head and mouth for each of the people (n, TRAITS)."""
    time = torch.linspace(0, 1, FRAMES)
    phase, speed, height, mouth_phase, mouth_speed = torch.rand(len(traits), 5, 1, generator=generator).unbind(1)
    turn = 2 * torch.pi * phase + 2 * torch.pi * (0.2 + 0.2 * speed) * time  # (n, F)
    sideways = 4 * turn.sin()
    downwards = (2 * turn).cos() + 2 * (height - 0.5)
    sway = torch.stack([sideways, downwards], -1)
    mouth_turn = 2 * torch.pi * (mouth_phase + (0.3 + 0.3 * mouth_speed) * time)
    mouth = 0.5 + 0.5 * mouth_turn.sin()
    return Cast(traits, sway, mouth)


def draw(cast: Cast) -> torch.Tensor:
    """Renders a clip of each person, (n, F, 3, SIZE, SIZE) in [0, 1]."""
    # every shape is a tensor with all pixels of the people that are drawn together
    clips = []
    for first in range(0, len(cast.traits), DRAWN_AT_ONCE):
        people = slice(first, first + DRAWN_AT_ONCE)
        clips.append(_paint_people(Cast(cast.traits[people], cast.sway[people], cast.mouth[people])))
    return torch.cat(clips)


Length = torch.Tensor | float


class _Canvas:
    """A picture of each frame, painted in layers. Coordinates are pixels from the middle of each head.

    Attributes:
        x: (n, F, 1, SIZE).
        y: (n, F, SIZE, 1).
        picture: (n, F, 3, SIZE, SIZE).
    """

    def __init__(self, sway: torch.Tensor, background: torch.Tensor) -> None:
        pixel = torch.arange(SIZE, dtype=torch.float32) - SIZE / 2
        self.x = pixel.view(1, 1, 1, SIZE) - sway[..., 0, None, None]
        self.y = pixel.view(1, 1, SIZE, 1) - sway[..., 1, None, None]
        self.picture = background.expand(-1, FRAMES, -1, SIZE, SIZE)

    def paint(self, tint: torch.Tensor, inside: torch.Tensor) -> None:
        """Paints the pixels with a positive distance `inside` to the border of a shape; the border is soft."""
        self.picture = self.picture + inside.sigmoid()[:, :, None] * (tint - self.picture)

    def ellipse(self, cx: float, cy: float, rx: Length, ry: Length) -> torch.Tensor:
        """Returns the approximate distance to an ellipse's border in pixels, positive inside, (n, F, SIZE, SIZE)."""
        radius = (((self.x - cx) / rx) ** 2 + ((self.y - cy) / ry) ** 2).sqrt()
        return (1 - radius) * torch.as_tensor(rx).clamp_max(torch.as_tensor(ry))


def _paint_people(cast: Cast) -> torch.Tensor:
    """Renders clips like `draw`, painting from the background to the mouth."""
    traits = iter(cast.traits.T.reshape(TRAITS, -1, 1, 1, 1))  # each (n, 1, 1, 1)

    def colour(low: float, high: float) -> torch.Tensor:
        """Returns a colour from the next three traits, (n, 1, 3, 1, 1)."""
        return low + (high - low) * torch.stack([next(traits) for _ in range(3)], 2)

    # the order decides which trait of a person is which
    background = colour(0.1, 0.9)
    shirt = colour(0.1, 0.9)
    skin = colour(0.45, 0.95)
    hair = colour(0.0, 0.9)
    iris = colour(0.0, 0.7)
    width = 13 + 4 * next(traits)
    height = 17 + 3 * next(traits)
    hair_width = next(traits) * 3 + 2
    hair_length = next(traits) * 22
    fringe = next(traits) * 6

    # from back to front, because each shape covers what is painted before it
    canvas = _Canvas(cast.sway, background)
    x = canvas.x
    y = canvas.y
    ellipse = canvas.ellipse
    canvas.paint(shirt, ellipse(0, 38, 24, 18))

    locks = torch.minimum(hair_length - y, width + hair_width - x.abs()).minimum(y + 2)
    behind_face = ellipse(0, -2, width + hair_width, height + hair_width)
    canvas.paint(hair, torch.maximum(behind_face, locks))
    canvas.paint(skin, ellipse(0, 0, width, height))
    forehead = ellipse(0, -2, width + 1, height + 1)
    canvas.paint(hair, torch.minimum(forehead, -(y + 9) + fringe - 3))

    _paint_features(canvas, skin, iris, cast.mouth)
    return canvas.picture


def _paint_features(canvas: _Canvas, skin: torch.Tensor, iris: torch.Tensor, mouth: torch.Tensor) -> None:
    """Paints eyes, nose and mouth. mouth: (n, F) opening."""
    white = skin.new_ones(1, 1, 3, 1, 1)
    lips = skin.new_tensor([0.65, 0.1, 0.15]).view(1, 1, 3, 1, 1)
    for side in (-6.5, 6.5):
        canvas.paint(white, canvas.ellipse(side, -2, 4.2, 3.0))
    for side in (-6.5, 6.5):
        canvas.paint(iris, canvas.ellipse(side, -2, 2.2, 2.2))
    canvas.paint(skin * 0.7, canvas.ellipse(0, 4, 1.5, 2.5))
    canvas.paint(lips, canvas.ellipse(0, 10, 5.5, 1.2 + 1.8 * mouth[..., None, None]))


class FisherEmbedder(nn.Module):
    """Embeds the identity of a face by a linear map of the frame's middle.

    path: file with `mean` (d,) and `directions` (d, D), written by `fit`.
    """

    crop_size = SIZE

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        tensors = load_file(path)
        self.mean = nn.Buffer(tensors["mean"])
        self.directions = nn.Buffer(tensors["directions"])

    def forward(self, crops: torch.Tensor) -> torch.Tensor:
        """Returns vectors (n, D) of crops (n, 3, SIZE, SIZE) in [0, 1]."""
        return (_middle(crops) - self.mean) @ self.directions

    @staticmethod
    def fit(path: Path, clips: torch.Tensor, dimensions: int = 16, ridge: float = 0.02) -> None:
        """Writes a file with `dimensions` directions, scaled to equal variance between people.

        Args:
            path: the file.
            clips: (people, F, 3, SIZE, SIZE) in [0, 1].
            dimensions: number of directions.
            ridge: variance added to every pixel within a person, so that nearly constant pixels do not dominate.
        """
        num_people, num_frames = clips.shape[:2]
        pixels = _middle(clips.flatten(0, 1)).view(num_people, num_frames, -1).double()
        person_means = pixels.mean(1)
        mean = person_means.mean(0)

        deviations = (pixels - person_means[:, None]).flatten(0, 1)
        within = deviations.T @ deviations / len(deviations)
        within = within + ridge * torch.eye(len(mean), dtype=torch.float64)
        centred = person_means - mean
        between = centred.T @ centred / num_people

        # in coordinates in which the variance within a person is 1 in all directions, the directions are eigenvectors
        whiten = torch.linalg.inv(torch.linalg.cholesky(within))
        variances, vectors = torch.linalg.eigh(whiten @ between @ whiten.T)  # in ascending order
        largest = vectors[:, -dimensions:]
        directions = (whiten.T @ largest) / variances[-dimensions:].sqrt()
        save_file({"mean": mean.float(), "directions": directions.float().contiguous()}, path)


def _middle(frames: torch.Tensor) -> torch.Tensor:
    """Crops the middle of frames (n, 3, SIZE, SIZE), where the face is, at half resolution; (n, d)."""
    margin = SIZE // 4
    middle = frames[..., margin:-margin, margin:-margin]
    return F.avg_pool2d(middle, 2).flatten(1)
