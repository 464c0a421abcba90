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
    numbers = torch.rand(len(traits), 5, 1, generator=generator)
    phase, speed, height, mouth_phase, mouth_speed = numbers.unbind(1)
    full_turn = 2 * torch.pi

    # twice as fast up and down as to the sides
    head_turn = full_turn * (0.2 + 0.2 * speed) * time
    head_angle = full_turn * phase + head_turn  # (n, F)
    sideways = 4 * head_angle.sin()
    waves = (2 * head_angle).cos()
    downwards = waves + 2 * (height - 0.5)
    sway = torch.stack([sideways, downwards], -1)

    mouth_turns = mouth_phase + (0.3 + 0.3 * mouth_speed) * time
    mouth_angle = full_turn * mouth_turns
    mouth = 0.5 + 0.5 * mouth_angle.sin()
    return Cast(traits, sway, mouth)


def draw(cast: Cast) -> torch.Tensor:
    """Renders a clip of each person, (n, F, 3, SIZE, SIZE) in [0, 1]."""
    # few people at a time, because every shape is a tensor with all pixels of the people that are drawn together
    parts = zip(
        cast.traits.split(DRAWN_AT_ONCE),
        cast.sway.split(DRAWN_AT_ONCE),
        cast.mouth.split(DRAWN_AT_ONCE),
        strict=True,
    )
    clips = []
    for traits, sway, mouth in parts:
        people = Cast(traits, sway, mouth)
        clips.append(_paint_people(people))
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
        pixels = torch.arange(SIZE, dtype=torch.float32)
        from_middle = pixels - SIZE / 2
        sideways, downwards = sway[..., None, None].unbind(2)  # each (n, F, 1, 1)

        # a row and a column are enough: all formulas of shapes broadcast them to the pixels
        self.x = from_middle - sideways
        self.y = from_middle.unsqueeze(-1) - downwards
        self.picture = background.expand(-1, FRAMES, -1, SIZE, SIZE)

    def paint(self, tint: torch.Tensor, inside: torch.Tensor) -> None:
        """Paints a shape over the picture, with a soft border.

        Args:
            tint: colour, (n or 1, 1, 3, 1, 1).
            inside: distance of each pixel to the border of the shape, positive inside, (n, F, SIZE, SIZE).
        """
        opacity = inside.sigmoid().unsqueeze(2)
        self.picture = self.picture + opacity * (tint - self.picture)

    def ellipse(self, cx: float, cy: float, rx: Length, ry: Length) -> torch.Tensor:
        """Returns the approximate distance to an ellipse's border in pixels, positive inside, (n, F, SIZE, SIZE)."""
        across = (self.x - cx) / rx
        down = (self.y - cy) / ry
        radius = (across**2 + down**2).sqrt()  # 1 on the border

        shorter_radius = torch.as_tensor(rx).clamp_max(torch.as_tensor(ry))
        return (1 - radius) * shorter_radius


def _paint_people(cast: Cast) -> torch.Tensor:
    """Renders clips like `draw`, painting from the background to the mouth."""
    traits = iter(cast.traits.T.reshape(TRAITS, -1, 1, 1, 1))  # each (n, 1, 1, 1)

    def colour(low: float, high: float) -> torch.Tensor:
        """Returns a colour from the next three traits, (n, 1, 3, 1, 1)."""
        channels = [next(traits), next(traits), next(traits)]
        return low + (high - low) * torch.stack(channels, 2)

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
    shoulders = canvas.ellipse(0, 38, 24, 18)
    canvas.paint(shirt, shoulders)

    # in distances to borders, the minimum of two shapes is their intersection, and the maximum is their union
    above_tips = hair_length - canvas.y
    below_crown = canvas.y + 2
    beside_face = width + hair_width - canvas.x.abs()
    locks = torch.minimum(above_tips, beside_face).minimum(below_crown)
    behind_face = canvas.ellipse(0, -2, width + hair_width, height + hair_width)
    canvas.paint(hair, torch.maximum(behind_face, locks))

    face = canvas.ellipse(0, 0, width, height)
    canvas.paint(skin, face)
    forehead = canvas.ellipse(0, -2, width + 1, height + 1)
    above_fringe = -(canvas.y + 9) + fringe - 3
    canvas.paint(hair, torch.minimum(forehead, above_fringe))

    _paint_features(canvas, skin, iris, cast.mouth)
    return canvas.picture


def _paint_features(canvas: _Canvas, skin: torch.Tensor, iris: torch.Tensor, mouth: torch.Tensor) -> None:
    """Paints eyes, nose and mouth.

    Args:
        canvas: The pictures.
        skin: Colour of the face, (n, 1, 3, 1, 1).
        iris: Colour of the irises, (n, 1, 3, 1, 1).
        mouth: (n, F) opening.
    """
    white = _tint(1.0, 1.0, 1.0)
    for side in (-6.5, 6.5):
        eyeball = canvas.ellipse(side, -2, 4.2, 3.0)
        canvas.paint(white, eyeball)
    for side in (-6.5, 6.5):
        middle_of_eye = canvas.ellipse(side, -2, 2.2, 2.2)
        canvas.paint(iris, middle_of_eye)

    nose = canvas.ellipse(0, 4, 1.5, 2.5)
    canvas.paint(skin * 0.7, nose)

    opening = mouth[..., None, None]
    lips = canvas.ellipse(0, 10, 5.5, 1.2 + 1.8 * opening)
    canvas.paint(_tint(0.65, 0.1, 0.15), lips)


def _tint(red: float, green: float, blue: float) -> torch.Tensor:
    """Returns a colour that is the same for all people, (1, 1, 3, 1, 1)."""
    return torch.tensor([red, green, blue]).view(1, 1, 3, 1, 1)


class FisherEmbedder(nn.Module):
    """Embeds the identity of a face by a linear map of the frame's middle.

    Args:
        path: File with `mean` (d,) and `directions` (d, D), written by `fit`.
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
        frames = clips.flatten(0, 1)
        pixels = _middle(frames).double()
        pixels = pixels.view(num_people, num_frames, -1)
        person_means = pixels.mean(1)
        mean = person_means.mean(0)

        deviations = pixels - person_means[:, None]
        within = _covariance(deviations.flatten(0, 1))
        within = within + ridge * torch.eye(len(mean), dtype=torch.float64)
        between = _covariance(person_means - mean)

        # in coordinates in which the variance within a person is 1 in all directions, the directions are eigenvectors
        root = torch.linalg.cholesky(within)
        whiten = torch.linalg.inv(root)
        # `eigh` sorts by ascending eigenvalue, so that the largest variances between people are last
        variances, vectors = torch.linalg.eigh(whiten @ between @ whiten.T)
        largest = vectors[:, -dimensions:]
        deviation_between = variances[-dimensions:].sqrt()
        directions = (whiten.T @ largest) / deviation_between

        # safetensors refuses tensors that are not contiguous
        tensors = {"mean": mean.float(), "directions": directions.float().contiguous()}
        save_file(tensors, path)


def _covariance(deviations: torch.Tensor) -> torch.Tensor:
    """Returns the covariance (d, d) of rows (n, d) whose mean is 0."""
    return deviations.T @ deviations / len(deviations)


def _middle(frames: torch.Tensor) -> torch.Tensor:
    """Crops the middle of frames (n, 3, SIZE, SIZE), where the face is, at half resolution; (n, d)."""
    margin = SIZE // 4
    middle = frames[..., margin:-margin, margin:-margin]
    return F.avg_pool2d(middle, 2).flatten(1)
