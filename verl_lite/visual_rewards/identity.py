"""The identity reward: similarity of a generated face to the face of a reference clip, differentiable.

A detector finds the five points of a face in each frame, without gradient. The frame is rotated, scaled and cropped so
that the points lie on ArcFace's template, and an embedder computes a vector of the crop; both steps are differentiable.
The score is the mean cosine between the vectors of generated and reference frames. `arcface` loads real detectors and
embedders from ONNX files.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl_lite.errors import UserError
from verl_lite.json_types import KeywordArguments
from verl_lite.registry import Registry
from verl_lite.visual_rewards.arcface import ArcFaceEmbedder, ScrfdDetector
from verl_lite.visual_rewards.base import Faces, VisualScore, as_pixels, register_visual_reward, scaled_points

TEMPLATE_SIZE = 112
ARCFACE_TEMPLATE = ((38.2946, 51.6963), (73.5318, 51.5014), (56.0252, 71.7366), (41.5493, 92.3655), (70.7299, 92.2041))
"""Left eye, right eye, nose, left and right corner of the mouth, as seen by the viewer: (x, y) in pixels of a 112 x 112
crop, pixel centres at whole numbers. ArcFace (Deng et al. 2019) and its successors are trained on this layout."""


Detector = Callable[[torch.Tensor], Faces]
"""Finds faces in RGB frames (F, 3, H, W) in [0, 1]; called without gradient."""

Embedder = Callable[[torch.Tensor], torch.Tensor]
"""Embeds RGB crops (n, 3, S, S) in [0, 1] as vectors (n, D) of any norm; differentiable. S is its attribute `crop_size`
(default 112)."""


@register_visual_reward("cosine_identity")
class CosineIdentityReward(nn.Module):
    """Mean cosine between the face vectors of generated and reference frames; see `pooled_similarity`.

    Args:
        embedder: an object, FILE.onnx (see `arcface`), pkg.module:object (a class or function, called without
            arguments), or a mapping with one of these strings as `name` and arguments.
        detector: likewise; None if the face fills the frame.
    """

    def __init__(
        self, embedder: Embedder | str | KeywordArguments, detector: Detector | str | KeywordArguments | None = None
    ) -> None:
        super().__init__()
        self.embedder: Embedder = make_part("embedder", embedder)
        self.detector: Detector = whole_frame
        if detector is not None:
            self.detector = make_part("detector", detector)
        self.crop_size = int(getattr(self.embedder, "crop_size", TEMPLATE_SIZE))

    @torch.no_grad()
    def prepare(self, reference_frames: torch.Tensor) -> torch.Tensor:
        """Returns the face vectors of the frames, (F, D); zeros for frames without a face.

        Args:
            reference_frames: (F, 3, H, W) in [0, 1].

        Raises:
            ValueError: no frame after the first has a face; the first is the model's input and is not compared.
        """
        has_face, vectors = self.embed(reference_frames.float())
        num_frames = len(has_face)
        if not bool(has_face[1:].any()):
            raise ValueError(f"no face in any of the {max(num_frames - 1, 0)} reference frames after the first")
        vectors_of_frames = vectors.new_zeros(num_frames, vectors.shape[-1])
        vectors_of_frames[has_face] = vectors
        return vectors_of_frames

    def score(self, frames: torch.Tensor, reference: torch.Tensor) -> VisualScore:
        """Scores frames (F, 3, H, W) in [-1, 1]; a clip without any face is not counted. reference: (R, D)."""
        has_face, vectors = self.embed(as_pixels(frames))
        if not bool(has_face.any()):
            return VisualScore(torch.zeros((), device=frames.device), counted=False)
        return VisualScore(pooled_similarity(vectors, reference))

    def embed(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `Faces.found` (F,) and the vectors (n, D) of its n faces. pixels: (F, 3, H, W) in [0, 1]."""
        # the points are constants for the gradient, which flows through the pixels of the crops alone
        with torch.no_grad():
            faces = self.detector(pixels.detach())
        keypoints = faces.keypoints[faces.found].to(pixels)
        # one crop for each frame with a face, so n can be smaller than F, and 0
        crops = align(pixels[faces.found], keypoints, self.crop_size)
        return faces.found, self.embedder(crops).float()


def pooled_similarity(vectors: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Returns the mean over generated frames of the mean cosine to the compared reference frames, a scalar.

    Same pooling as in ROLL's reward flow, but without the small constants in the denominators: callers must pass at
    least one generated and one compared reference frame.

    Args:
        vectors: (n, D) vectors of the generated frames with a face, including the first frame.
        reference: (R, D). Row 0 (the model's input frame) and rows of zeros (no face) are not compared.
    """
    is_compared = reference.abs().sum(-1) > 0  # (R,)
    # the first frame is the model's input
    is_compared[0] = False
    compared_vectors = reference[is_compared].to(vectors)  # (r, D)

    directions = F.normalize(vectors, dim=-1)
    compared_directions = F.normalize(compared_vectors, dim=-1)
    cosines = directions @ compared_directions.T  # (n, r)
    return cosines.mean()


def make_part(role: str, option: Any) -> Any:
    """Returns the embedder or detector of `CosineIdentityReward`.

    Args:
        role: "embedder" or "detector".
        option: the object itself, or a string or mapping that names its file or class.

    Raises:
        UserError: the name is neither an ONNX file nor the path of an object.
    """
    if not isinstance(option, str | Mapping):
        return option
    if isinstance(option, str):
        arguments = {"name": option}
    else:
        arguments = dict(option)
    name = str(arguments.pop("name", ""))
    if name.endswith(".onnx"):
        onnx_classes = {"embedder": ArcFaceEmbedder, "detector": ScrfdDetector}
        return onnx_classes[role](path=name, **arguments)
    if ":" not in name:
        raise UserError(
            f"reward.kwargs.{role}={option!r}; expected FILE.onnx, pkg.module:object, or {{name: one of both}}"
        )
    try:
        make = Registry[Callable[..., Any]](role).get_fn(name)
    except ValueError as error:
        raise UserError(f"reward.kwargs.{role}: {error}") from None
    return make(**arguments)


def whole_frame(frames: torch.Tensor) -> Faces:
    """Detector for clips whose frames consist of a face only: returns a face that fills the frame.

    frames: (F, 3, H, W).
    """
    count, _, height, width = frames.shape
    device = frames.device
    template = torch.tensor(ARCFACE_TEMPLATE, device=device)
    scale = torch.tensor([width / TEMPLATE_SIZE, height / TEMPLATE_SIZE], device=device)
    points = scaled_points(template, scale)
    has_face = torch.ones(count, dtype=torch.bool, device=device)
    return Faces(has_face, points.expand(count, 5, 2))


def align(pixels: torch.Tensor, keypoints: torch.Tensor, size: int) -> torch.Tensor:
    """Crops frames to (n, 3, size, size) so that their keypoints lie on ArcFace's template.

    Bilinear, black outside the frame, differentiable with respect to the pixels.

    Args:
        pixels: (n, 3, H, W).
        keypoints: (n, 5, 2) in pixels.
        size: side of a crop.
    """
    count, channels, height, width = pixels.shape
    # affine_grid refuses a batch of no frames
    if count == 0:
        return pixels.new_zeros(0, channels, size, size)
    template = scaled_points(keypoints.new_tensor(ARCFACE_TEMPLATE), size / TEMPLATE_SIZE)
    frame_to_crop = similarity_transform(keypoints, template)

    # affine_grid takes the map from the crop to the frame, both in coordinates from -1 to 1
    frame_coordinates_to_pixels = _to_pixels(height, width, frame_to_crop)
    crop_coordinates_to_pixels = _to_pixels(size, size, frame_to_crop)
    frame_coordinates_to_crop_pixels = frame_to_crop @ frame_coordinates_to_pixels
    theta = torch.linalg.inv(frame_coordinates_to_crop_pixels) @ crop_coordinates_to_pixels
    # without the last row of an affine map, which is always (0, 0, 1)
    grid = F.affine_grid(theta[:, :2], [count, channels, size, size], align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def similarity_transform(points: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Fits the rotation, scale and translation from points (n, k, 2) to targets (k, 2) by least squares; (n, 3, 3).

    With (x, y) as the complex number x + iy this is the linear regression target = a point + b. Equal to Umeyama (1991)
    without reflection.
    """
    middle = points.mean(1, keepdim=True)
    target_middle = targets.mean(0)
    centred_points = points - middle
    centred_targets = targets - target_middle
    x, y = centred_points.unbind(-1)  # (n, k)
    u, v = centred_targets.unbind(-1)  # (k,)

    # the bound is for points that all coincide
    square = (x * x + y * y).sum(-1).clamp_min(1e-12)
    real = (x * u + y * v).sum(-1) / square
    imaginary = (x * v - y * u).sum(-1) / square
    # a = real + i imaginary is the matrix of a rotation and scale
    entries = torch.stack([real, -imaginary, imaginary, real], -1)
    turn = entries.unflatten(-1, (2, 2))  # (n, 2, 2)

    # the middle of the points must come to lie on the middle of the targets
    turned_middle = turn @ middle.transpose(1, 2)
    shift = target_middle[:, None] - turned_middle  # (n, 2, 1)
    upper_rows = torch.cat([turn, shift], -1)
    last_row = points.new_tensor([0.0, 0.0, 1.0])
    last_rows = last_row.expand(len(points), 1, 3)
    return torch.cat([upper_rows, last_rows], -2)


def _to_pixels(height: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Returns the 3 x 3 map from grid_sample's coordinates to pixels, with the dtype and device of `like`.

    The coordinates are -1 and 1 at the borders of the picture. Pixel centres are whole numbers, so the borders are at
    -0.5 and width - 0.5.
    """
    return like.new_tensor([[width / 2, 0, (width - 1) / 2], [0, height / 2, (height - 1) / 2], [0, 0, 1]])
