"""Face models for the identity reward, loaded from ONNX files: SCRFD detects faces, ArcFace embeds them.

    reward.name=cosine_identity
    'reward.kwargs={embedder: /models/antelopev2/glintr100.onnx, detector: /models/antelopev2/scrfd_10g_bnkps.onnx}'

This project neither contains nor downloads these files. ROLL's reward flow was measured with InsightFace's antelopev2,
which its authors license for non-commercial research only; the user who sets these paths is responsible for the licence
of the weights. `onnx2torch` converts the files to torch modules, so that gradients flow through the embedder.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from verl_lite.errors import UserError
from verl_lite.visual_rewards.base import Faces, scaled_points

STRIDES = (8, 16, 32)
"""Pixels between the cells of the three grids, the levels, on which SCRFD looks for small, medium and large faces."""
ANCHORS = 2
"""Anchors per cell: each can be a face, so that two faces may have the same cell."""
NUMBERS = (1, 4, 10)
"""Numbers per anchor in the three kinds of outputs: score, distances of the box, distances of the five points."""


class ArcFaceEmbedder(nn.Module):
    """Embeds crops as face vectors, differentiably, with ArcFace or a successor from InsightFace's ONNX files.

    Args:
        path: FILE.onnx of a model from (n, 3, 112, 112), normalised as (pixel - 127.5) / 127.5, to (n, D).
        channels: channel order of the model's input. InsightFace passes rgb to its models, ROLL's reward flow bgr.
    """

    crop_size = 112

    def __init__(self, path: str, channels: str = "rgb") -> None:
        super().__init__()
        self.is_flipped = _is_flipped("embedder", channels)
        self.network = load_onnx(path, "reward.kwargs.embedder")

    def forward(self, crops: torch.Tensor) -> torch.Tensor:
        """Returns the vectors (n, D) of RGB crops (n, 3, 112, 112) in [0, 1]."""
        if self.is_flipped:
            crops = crops.flip(-3)
        # (pixel - 127.5) / 127.5 for pixels in [0, 255]
        return self.network(crops * 2 - 1).flatten(1)


class ScrfdDetector(nn.Module):
    """Detects the largest face of each frame and its five points with SCRFD (Guo et al. 2021) from an ONNX file.

    Args:
        path: FILE.onnx of an InsightFace model with nine outputs: scores, box distances and point distances, each at
            the strides 8, 16, 32.
        threshold: minimum score of a face.
        overlap: intersection over union above which the face with the lower score is dropped.
        size: side in pixels of the square into which frames are scaled.
        channels: channel order of the model's input, as in `ArcFaceEmbedder`.
    """

    def __init__(
        self, path: str, threshold: float = 0.5, overlap: float = 0.4, size: int = 640, channels: str = "rgb"
    ) -> None:
        super().__init__()
        if size <= 0 or size % STRIDES[-1]:
            raise UserError(f"reward.kwargs.detector size={size}; expected a multiple of {STRIDES[-1]}")
        self.threshold = threshold
        self.overlap = overlap
        self.size = size
        self.is_flipped = _is_flipped("detector", channels)
        self.network = load_onnx(path, "reward.kwargs.detector")

    @torch.no_grad()
    def forward(self, frames: torch.Tensor) -> Faces:
        """Returns the largest face of each frame. frames: (F, 3, H, W) in [0, 1], RGB."""
        height, width = frames.shape[-2:]
        ratio = self.size / max(height, width)
        scaled_height = max(round(height * ratio), 1)
        scaled_width = max(round(width * ratio), 1)
        scaled = F.interpolate(
            frames.float(), (scaled_height, scaled_width), mode="bilinear", antialias=True, align_corners=False
        )
        # the preprocessing of InsightFace's SCRFD: this normalisation, and black to the right and below
        normalised = (scaled * 255 - 127.5) / 128
        if self.is_flipped:
            normalised = normalised.flip(-3)
        black = -127.5 / 128
        squares = F.pad(normalised, (0, self.size - scaled_width, 0, self.size - scaled_height), value=black)

        has_face = []
        points = []
        for square in squares:
            # InsightFace's files accept only one picture per call
            points_of_face = self.largest(self.network(square[None]))
            has_face.append(points_of_face is not None)
            if points_of_face is None:
                points_of_face = scaled.new_zeros(5, 2)
            points.append(points_of_face)

        scale = scaled.new_tensor([width / scaled_width, height / scaled_height])
        keypoints = scaled_points(torch.stack(points), scale)
        return Faces(torch.tensor(has_face, device=frames.device), keypoints)

    def largest(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns the five points (5, 2) of the largest face in one picture, or None if there is no face."""
        scores, boxes, points = decode_scrfd(outputs, self.size, self.threshold)
        faces = suppress(boxes, scores, self.overlap)
        if not len(faces):
            return None
        areas = _areas(boxes[faces])
        largest_face = faces[areas.argmax()]
        return points[largest_face]


def decode_scrfd(
    outputs: Sequence[torch.Tensor], size: int, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Converts SCRFD's outputs to the faces with a score of at least `threshold`, in pixels.

    Args:
        outputs: the scores at strides 8, 16, 32, then the box distances, then the point distances, each of shape
            (cells * ANCHORS, 1 | 4 | 10), optionally with a leading dimension of 1. Cells are in row-major order, the
            anchors of a cell are at (column, row) * stride, and distances are in units of the stride.

    Returns:
        Scores (n,), boxes (n, 4) as left, top, right, bottom, and points (n, 5, 2).

    Raises:
        UserError: the number or the sizes of the outputs differ from those of SCRFD.
    """
    anchors = [(size // stride) ** 2 * ANCHORS for stride in STRIDES]
    expected = [count * numbers for numbers in NUMBERS for count in anchors]
    # sizes instead of shapes, because the leading dimension of 1 is optional
    sizes = [part.numel() for part in outputs]
    if sizes != expected:
        raise UserError(
            f"reward.kwargs.detector: the model has {len(outputs)} outputs of sizes {sizes}; "
            f"expected 9 of sizes {expected} for {size} x {size} pixels (scores, boxes and five points at strides 8, "
            "16, 32). Use an SCRFD file with points, such as scrfd_10g_bnkps.onnx"
        )

    score_levels, distance_levels, offset_levels = _levels_by_kind(outputs)
    scores = []
    boxes = []
    points = []
    for level, stride in enumerate(STRIDES):
        scores_of_level = score_levels[level][:, 0]
        is_face = scores_of_level >= threshold
        distances = distance_levels[level] * stride
        offsets = offset_levels[level].unflatten(-1, (5, 2)) * stride
        steps = torch.arange(size // stride, device=distances.device, dtype=torch.float32) * stride
        rows_and_columns = torch.cartesian_prod(steps, steps)
        # (column, row), as the boxes and points
        centres = rows_and_columns.flip(-1).repeat_interleave(ANCHORS, 0)

        # distances from the anchor to the left, top, right and bottom side
        boxes_of_level = torch.cat([centres - distances[:, :2], centres + distances[:, 2:]], -1)
        points_of_level = centres[:, None] + offsets
        scores.append(scores_of_level[is_face])
        boxes.append(boxes_of_level[is_face])
        points.append(points_of_level[is_face])
    return torch.cat(scores), torch.cat(boxes), torch.cat(points)


def _levels_by_kind(outputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns for each kind in `NUMBERS` its outputs at the levels of `STRIDES`, each of shape (anchors, numbers)."""
    levels_by_kind = []
    for kind, numbers in enumerate(NUMBERS):
        # the model returns all levels of one kind before the next kind
        start = kind * len(STRIDES)
        stop = start + len(STRIDES)
        levels = [output.reshape(-1, numbers) for output in outputs[start:stop]]
        levels_by_kind.append(levels)
    return levels_by_kind


def suppress(boxes: torch.Tensor, scores: torch.Tensor, overlap: float) -> torch.Tensor:
    """Non-maximum suppression: returns the indices of the remaining boxes, best score first.

    A box removes all boxes with a lower score whose intersection over union with it exceeds `overlap`.

    Args:
        boxes: (n, 4) as left, top, right, bottom.
        scores: (n,).
        overlap: largest intersection over union of two remaining boxes.
    """
    order = scores.argsort(descending=True)
    remaining = []
    while len(order):
        best = order[0]
        order = order[1:]
        remaining.append(best)

        best_box = boxes[best]
        other_boxes = boxes[order]
        left_top = torch.maximum(best_box[:2], other_boxes[:, :2])
        right_bottom = torch.minimum(best_box[2:], other_boxes[:, 2:])
        intersection = (right_bottom - left_top).clamp_min(0).prod(-1)
        union = _areas(best_box) + _areas(other_boxes) - intersection
        # the bound is for boxes without area, which have no union
        overlaps = intersection / union.clamp_min(1e-12)
        order = order[overlaps <= overlap]
    if not remaining:
        return order
    return torch.stack(remaining)


def _areas(boxes: torch.Tensor) -> torch.Tensor:
    left, top, right, bottom = boxes.unbind(-1)
    return (right - left) * (bottom - top)


def load_onnx(path: str, option: str) -> nn.Module:
    """Loads an ONNX file as a frozen torch module.

    Args:
        path: the file.
        option: configuration key of the path, for messages.

    Raises:
        UserError: the file does not exist, onnx2torch is not installed or cannot convert the file.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{option}={path!r}: no such file (looked for {file.absolute()}); expected an ONNX file")
    convert = _onnx2torch(option)
    try:
        return convert(file).eval().requires_grad_(False)
    except NotImplementedError as error:
        raise UserError(f"{option}={path!r}: onnx2torch cannot convert it: {error}") from error


def _onnx2torch(option: str) -> Callable[[Path], nn.Module]:
    """Imports and returns onnx2torch's `convert`. Raises UserError if it is not installed."""
    stand_ins: dict[str, ModuleType] = {}
    if importlib.util.find_spec("torchvision") is None:
        # onnx2torch imports torchvision for two operators that face models do not use, NonMaxSuppression and RoiAlign
        package = ModuleType("torchvision")
        operators = ModuleType("torchvision.ops")
        vars(package)["ops"] = operators
        for name in ("roi_align", "nms", "box_convert"):
            vars(operators)[name] = None
        stand_ins = {"torchvision": package, "torchvision.ops": operators}
    sys.modules.update(stand_ins)
    try:
        from onnx2torch import convert
    except ModuleNotFoundError as error:
        raise UserError(f"{option}: {error.name} is missing: pip install verl_lite[diffusion]") from None
    finally:
        # other libraries must not believe that torchvision is installed
        for name in stand_ins:
            del sys.modules[name]
    return convert


def _is_flipped(role: str, channels: str) -> bool:
    """Returns True if a model takes blue first, unlike the frames. Raises UserError for another order of channels."""
    if channels not in ("rgb", "bgr"):
        raise UserError(f"reward.kwargs.{role} channels={channels!r}; expected rgb or bgr")
    return channels == "bgr"
