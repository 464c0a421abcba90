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
from verl_lite.registry import Registry
from verl_lite.visual_rewards.arcface import ArcFaceEmbedder, ScrfdDetector
from verl_lite.visual_rewards.base import Faces, VisualScore, as_pixels, register_visual_reward

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

    embedder, detector: an object, FILE.onnx (see `arcface`), pkg.module:object (a class or function, called without
    arguments), or a mapping with one of these strings as `name` and arguments. Without a detector, the face fills the
    frame.
    """

    def __init__(
        self, embedder: Embedder | str | Mapping[str, Any], detector: Detector | str | Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.embedder: Embedder = make_part("embedder", embedder)
        self.detector: Detector = whole_frame if detector is None else make_part("detector", detector)
        self.crop_size = int(getattr(self.embedder, "crop_size", TEMPLATE_SIZE))

    @torch.no_grad()
    def prepare(self, reference_frames: torch.Tensor) -> torch.Tensor:
        """Returns the face vectors of the frames, (F, D); zeros for frames without a face.

        reference_frames: (F, 3, H, W) in [0, 1]. Raises ValueError if no frame after the first has a face; the first
        is the model's input and is not compared.
        """
        found, vectors = self.embed(reference_frames.float())
        if not bool(found[1:].any()):
            raise ValueError(f"no face in any of the {max(len(found) - 1, 0)} reference frames after the first")
        rows = vectors.new_zeros(len(found), vectors.shape[-1])
        rows[found] = vectors
        return rows

    def score(self, frames: torch.Tensor, reference: torch.Tensor) -> VisualScore:
        """Scores frames (F, 3, H, W) in [-1, 1]; a clip without any face is not counted. reference: (R, D)."""
        found, vectors = self.embed(as_pixels(frames))
        if not bool(found.any()):
            return VisualScore(torch.zeros((), device=frames.device), counted=False)
        return VisualScore(pooled_similarity(vectors, reference))

    def embed(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `Faces.found` (F,) and the vectors (n, D) of its n faces. pixels: (F, 3, H, W) in [0, 1]."""
        with torch.no_grad():
            faces = self.detector(pixels.detach())
        crops = align(pixels[faces.found], faces.keypoints[faces.found].to(pixels), self.crop_size)
        return faces.found, self.embedder(crops).float()


def pooled_similarity(vectors: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Returns the mean over generated frames of the mean cosine to the compared reference frames, a scalar.

    Same pooling as in ROLL's reward flow, but without the small constants in the denominators: callers must pass at
    least one generated and one compared reference frame.

    Args:
        vectors: (n, D) vectors of the generated frames with a face, including the first frame.
        reference: (R, D). Row 0 (the model's input frame) and rows of zeros (no face) are not compared.
    """
    counts = reference.abs().sum(-1) > 0  # (R,)
    counts[0] = False
    cosines = F.normalize(vectors, dim=-1) @ F.normalize(reference[counts].to(vectors), dim=-1).T  # (n, r)
    return cosines.mean()


def make_part(role: str, given: Any) -> Any:
    """Returns the embedder or detector of `CosineIdentityReward`; builds it if `given` is a string or a mapping."""
    if not isinstance(given, str | Mapping):
        return given
    arguments = {"name": given} if isinstance(given, str) else dict(given)
    name = str(arguments.pop("name", ""))
    if name.endswith(".onnx"):
        return {"embedder": ArcFaceEmbedder, "detector": ScrfdDetector}[role](path=name, **arguments)
    if ":" not in name:
        raise UserError(
            f"reward.kwargs.{role}={given!r}; expected FILE.onnx, pkg.module:object, or {{name: one of both}}"
        )
    try:
        found: Any = Registry[Any](role).get_fn(name)
    except ValueError as error:
        raise UserError(f"reward.kwargs.{role}: {error}") from None
    return found(**arguments)


def whole_frame(frames: torch.Tensor) -> Faces:
    """Detector for clips whose frames consist of a face only: returns a face that fills the frame.

    frames: (F, 3, H, W).
    """
    count, _, height, width = frames.shape
    scale = torch.tensor([width / TEMPLATE_SIZE, height / TEMPLATE_SIZE], device=frames.device)
    points = (torch.tensor(ARCFACE_TEMPLATE, device=frames.device) + 0.5) * scale - 0.5
    return Faces(torch.ones(count, dtype=torch.bool, device=frames.device), points.expand(count, 5, 2))


def align(pixels: torch.Tensor, keypoints: torch.Tensor, size: int) -> torch.Tensor:
    """Crops frames to (n, 3, size, size) so that their keypoints lie on ArcFace's template.

    Bilinear, black outside the frame, differentiable with respect to the pixels. pixels: (n, 3, H, W). keypoints: (n,
    5, 2) in pixels.
    """
    if len(pixels) == 0:
        return pixels.new_zeros(0, pixels.shape[1], size, size)
    template = (keypoints.new_tensor(ARCFACE_TEMPLATE) + 0.5) * (size / TEMPLATE_SIZE) - 0.5
    to_crop = similarity_transform(keypoints, template)
    height, width = pixels.shape[-2:]
    theta = torch.linalg.inv(to_crop @ _to_pixels(height, width, to_crop)) @ _to_pixels(size, size, to_crop)
    grid = F.affine_grid(theta[:, :2], [len(pixels), pixels.shape[1], size, size], align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def similarity_transform(points: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Fits the rotation, scale and translation from points (n, k, 2) to targets (k, 2) by least squares; (n, 3, 3).

    With (x, y) as the complex number x + iy this is the linear regression target = a point + b. Equal to Umeyama (1991)
    without reflection.
    """
    middle, target_middle = points.mean(1, keepdim=True), targets.mean(0)
    x, y = (points - middle).unbind(-1)  # (n, k)
    u, v = (targets - target_middle).unbind(-1)  # (k,)
    square = (x * x + y * y).sum(-1).clamp_min(1e-12)
    real = (x * u + y * v).sum(-1) / square
    imaginary = (x * v - y * u).sum(-1) / square
    turn = torch.stack([torch.stack([real, -imaginary], -1), torch.stack([imaginary, real], -1)], -2)  # (n, 2, 2)
    shift = target_middle[:, None] - turn @ middle.transpose(1, 2)  # (n, 2, 1)
    last = points.new_tensor([[0.0, 0.0, 1.0]]).expand(len(points), 1, 3)
    return torch.cat([torch.cat([turn, shift], -1), last], -2)


def _to_pixels(height: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Returns the 3 x 3 map from grid_sample's coordinates, [-1, 1] at the borders, to pixels with integer centres."""
    return like.new_tensor([[width / 2, 0, (width - 1) / 2], [0, height / 2, (height - 1) / 2], [0, 0, 1]])
