"""Face models for the identity reward, loaded from ONNX files: SCRFD detects faces, ArcFace embeds them.

    reward.name=cosine_identity
    'reward.kwargs={embedder: /models/antelopev2/glintr100.onnx, detector: /models/antelopev2/scrfd_10g_bnkps.onnx}'

This project neither contains nor downloads these files. ROLL's reward flow was measured with InsightFace's antelopev2,
which its authors license for non-commercial research only; the user who sets these paths is responsible for the licence
of the weights. `onnx2torch` converts the files to torch modules, so that gradients flow through the embedder.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from verl_lite.errors import UserError
from verl_lite.visual_rewards.base import Faces

STRIDES = (8, 16, 32)
ANCHORS = 2
NUMBERS = (1, 4, 10)
"""Numbers per anchor in the three kinds of outputs: score, distances of the box, distances of the five points."""


class ArcFaceEmbedder(nn.Module):
    """Embeds crops as face vectors, differentiably, with ArcFace or a successor from InsightFace's ONNX files.

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
        ordered = crops.flip(-3) if self.is_flipped else crops
        return self.network(ordered * 2 - 1).flatten(1)


class ScrfdDetector(nn.Module):
    """Detects the largest face of each frame and its five points with SCRFD (Guo et al. 2021) from an ONNX file.

    path: FILE.onnx of an InsightFace model with nine outputs: scores, box distances and point distances, each at the
        strides 8, 16, 32.
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
        self.threshold, self.overlap, self.size = threshold, overlap, size
        self.is_flipped = _is_flipped("detector", channels)
        self.network = load_onnx(path, "reward.kwargs.detector")

    @torch.no_grad()
    def forward(self, frames: torch.Tensor) -> Faces:
        """Returns the largest face of each frame. frames: (F, 3, H, W) in [0, 1], RGB."""
        height, width = frames.shape[-2:]
        ratio = self.size / max(height, width)
        inside = max(round(height * ratio), 1), max(round(width * ratio), 1)
        shrunk = F.interpolate(frames.float(), inside, mode="bilinear", antialias=True, align_corners=False)
        canvas = ((shrunk.flip(-3) if self.is_flipped else shrunk) * 255 - 127.5) / 128
        canvas = F.pad(canvas, (0, self.size - inside[1], 0, self.size - inside[0]), value=-127.5 / 128)  # black
        # InsightFace's files accept only one picture per call
        largest = [self.largest(self.network(picture[None])) for picture in canvas]
        points = torch.stack([shrunk.new_zeros(5, 2) if one is None else one for one in largest])
        scale = shrunk.new_tensor([width / inside[1], height / inside[0]])
        found = torch.tensor([one is not None for one in largest], device=frames.device)
        return Faces(found, (points + 0.5) * scale - 0.5)

    def largest(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns the five points (5, 2) of the largest face in one picture, or None if there is no face."""
        scores, boxes, points = decode_scrfd(outputs, self.size, self.threshold)
        kept = suppress(boxes, scores, self.overlap)
        return points[kept[_areas(boxes[kept]).argmax()]] if len(kept) else None


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
    sizes = [part.numel() for part in outputs]
    if sizes != expected:
        raise UserError(
            f"reward.kwargs.detector: the model has {len(outputs)} outputs of sizes {sizes}; "
            f"expected 9 of sizes {expected} for {size} x {size} pixels (scores, boxes and five points at strides 8, "
            "16, 32). Use an SCRFD file with points, such as scrfd_10g_bnkps.onnx"
        )
    found = []
    for level, stride in enumerate(STRIDES):
        scores, distances, offsets = (
            outputs[level + len(STRIDES) * kind].reshape(-1, numbers) for kind, numbers in enumerate(NUMBERS)
        )
        steps = torch.arange(size // stride, device=scores.device, dtype=torch.float32) * stride
        centres = torch.cartesian_prod(steps, steps).flip(-1).repeat_interleave(ANCHORS, 0)  # (column, row)
        boxes = torch.cat([centres - distances[:, :2] * stride, centres + distances[:, 2:] * stride], -1)
        points = centres[:, None] + offsets.unflatten(-1, (5, 2)) * stride
        good = scores[:, 0] >= threshold
        found.append((scores[good, 0], boxes[good], points[good]))
    scores, boxes, points = (torch.cat(parts) for parts in zip(*found, strict=True))
    return scores, boxes, points


def suppress(boxes: torch.Tensor, scores: torch.Tensor, overlap: float) -> torch.Tensor:
    """Non-maximum suppression: returns the indices of the kept boxes, best score first.

    A kept box removes all boxes with a lower score whose intersection over union with it exceeds `overlap`.
    boxes: (n, 4) as left, top, right, bottom. scores: (n,).
    """
    order = scores.argsort(descending=True)
    kept = []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        corners = torch.maximum(boxes[best, :2], boxes[order, :2]), torch.minimum(boxes[best, 2:], boxes[order, 2:])
        common = (corners[1] - corners[0]).clamp_min(0).prod(-1)
        whole = _areas(boxes[best]) + _areas(boxes[order]) - common
        order = order[common / whole.clamp_min(1e-12) <= overlap]
    return torch.stack(kept) if kept else order


def _areas(boxes: torch.Tensor) -> torch.Tensor:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def load_onnx(path: str, option: str) -> nn.Module:
    """Loads an ONNX file as a frozen torch module. option: configuration key of the path, for messages.

    Raises:
        UserError: the file does not exist, onnx2torch is not installed or cannot convert the file.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{option}={path!r}: no such file (looked for {file.absolute()}); expected an ONNX file")
    stand_ins: dict[str, ModuleType] = {}
    if importlib.util.find_spec("torchvision") is None:
        # onnx2torch imports torchvision for two operators that face models do not use, NonMaxSuppression and RoiAlign
        operators = ModuleType("torchvision.ops")
        operators.__dict__.update(dict.fromkeys(("roi_align", "nms", "box_convert")))
        stand_ins = {"torchvision": ModuleType("torchvision"), "torchvision.ops": operators}
        stand_ins["torchvision"].__dict__["ops"] = operators
    sys.modules.update(stand_ins)
    try:
        from onnx2torch import convert
    except ModuleNotFoundError as error:
        raise UserError(f"{option}: {error.name} is missing: pip install verl_lite[diffusion]") from None
    finally:
        for name in stand_ins:
            del sys.modules[name]
    try:
        return convert(file).eval().requires_grad_(False)
    except NotImplementedError as error:
        raise UserError(f"{option}={path!r}: onnx2torch cannot convert it: {error}") from error


def _is_flipped(role: str, channels: str) -> bool:
    if channels not in ("rgb", "bgr"):
        raise UserError(f"reward.kwargs.{role} channels={channels!r}; expected rgb or bgr")
    return channels == "bgr"
