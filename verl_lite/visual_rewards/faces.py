"""Where faces are in frames, and the aligned crops that embedders see."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

TEMPLATE_SIZE = 112
ARCFACE_TEMPLATE = ((38.2946, 51.6963), (73.5318, 51.5014), (56.0252, 71.7366), (41.5493, 92.3655), (70.7299, 92.2041))
"""Left eye, right eye, nose, left and right corner of the mouth, as seen in the picture: (x, y) in pixels of a crop of
112 x 112, pixel centres at whole numbers. The layout on which ArcFace (Deng et al. 2019) and its successors train."""


class Faces(NamedTuple):
    """The largest face of each frame. found: (F,) bool. keypoints: (F, 5, 2), x and y in pixels, in the template's
    order, pixel centres at whole numbers; what stands where nothing was found is never read."""

    found: torch.Tensor
    keypoints: torch.Tensor


def whole_frame(frames: torch.Tensor) -> Faces:
    """The detector for clips that show nothing but a face: it fills the frame. frames: (F, 3, H, W)."""
    count, _, height, width = frames.shape
    scale = torch.tensor([width / TEMPLATE_SIZE, height / TEMPLATE_SIZE], device=frames.device)
    points = (torch.tensor(ARCFACE_TEMPLATE, device=frames.device) + 0.5) * scale - 0.5
    return Faces(torch.ones(count, dtype=torch.bool, device=frames.device), points.expand(count, 5, 2))


def align(pixels: torch.Tensor, keypoints: torch.Tensor, size: int) -> torch.Tensor:
    """Crops (n, 3, size, size) in which the points lie on ArcFace's template, bilinear, black beyond the frame;
    differentiable in the pixels.

    pixels: (n, 3, H, W). keypoints: (n, 5, 2) in pixels.
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
    """(n, 3, 3): the turn, scale and shift that bring points (n, k, 2) nearest to targets (k, 2), in squared distance.

    With (x, y) as the complex number x + iy this is a line: target = a point + b, so a and b are those of least
    squares; equal to Umeyama (1991) without reflection.
    """
    middle, target_middle = points.mean(1, keepdim=True), targets.mean(0)
    x, y = (points - middle).unbind(-1)  # (n, k)
    u, v = (targets - target_middle).unbind(-1)  # (k,)
    square = (x * x + y * y).sum(-1).clamp_min(1e-12)
    real, imaginary = (x * u + y * v).sum(-1) / square, (x * v - y * u).sum(-1) / square
    turn = torch.stack([torch.stack([real, -imaginary], -1), torch.stack([imaginary, real], -1)], -2)  # (n, 2, 2)
    shift = target_middle[:, None] - turn @ middle.transpose(1, 2)  # (n, 2, 1)
    last = points.new_tensor([[0.0, 0.0, 1.0]]).expand(len(points), 1, 3)
    return torch.cat([torch.cat([turn, shift], -1), last], -2)


def _to_pixels(height: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """From grid_sample's [-1, 1] (borders of the picture) to pixels with centres at whole numbers."""
    return like.new_tensor([[width / 2, 0, (width - 1) / 2], [0, height / 2, (height - 1) / 2], [0, 0, 1]])
