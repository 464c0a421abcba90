"""Real face models as a visual reward: SCRFD finds faces, ArcFace makes vectors, both from ONNX files of your own.

    reward.name=cosine_identity
    'reward.kwargs={embedder: /models/antelopev2/glintr100.onnx, detector: /models/antelopev2/scrfd_10g_bnkps.onnx}'

The files are not part of this project and it fetches none. InsightFace's antelopev2, which ROLL's reward flow was
measured with, is licensed by its authors for non-commercial research only; whoever sets these paths answers for the
licence of the weights. `onnx2torch` makes torch modules of the files, so that the gradient passes through the embedder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl_lite.errors import UserError
from verl_lite.visual_rewards.faces import Faces

STRIDES = (8, 16, 32)
ANCHORS = 2
DETECTION_SIZE = 640
CHANNELS = ("rgb", "bgr")


class ArcFaceEmbedder(nn.Module):
    """Crops to face vectors, differentiable; ArcFace and its successors in InsightFace's ONNX files.

    path: FILE.onnx of a model that takes (n, 3, 112, 112), (pixel - 127.5) / 127.5, and gives (n, D).
    channels: order that the model is given. InsightFace feeds its own models rgb; ROLL's reward flow turns to bgr.
    """

    crop_size = 112

    def __init__(self, path: str, channels: str = "rgb") -> None:
        super().__init__()
        self.channels = _known_channels("embedder", channels)
        self.network = load_onnx(path, "reward.kwargs.embedder")

    def forward(self, crops: torch.Tensor) -> torch.Tensor:
        """crops: (n, 3, 112, 112) in [0, 1], RGB. Gives (n, D)."""
        given = _ordered(crops, self.channels) * 2 - 1
        return self.network(given).flatten(1)


class ScrfdDetector(nn.Module):
    """The largest face of each frame by SCRFD (Guo et al. 2021) with five points, from InsightFace's ONNX files.

    path: FILE.onnx of a model with nine outputs, of strides 8, 16, 32: scores, then box distances, then point
    distances. threshold: least score. overlap: intersection over union from which the lower score is dropped.
    size: of the square that the frame is scaled into. channels: as for `ArcFaceEmbedder`.
    """

    def __init__(
        self,
        path: str,
        threshold: float = 0.5,
        overlap: float = 0.4,
        size: int = DETECTION_SIZE,
        channels: str = "rgb",
    ) -> None:
        super().__init__()
        if size <= 0 or size % STRIDES[-1]:
            raise UserError(f"reward.kwargs.detector size={size}; expected a multiple of {STRIDES[-1]}")
        self.threshold, self.overlap, self.size = threshold, overlap, size
        self.channels = _known_channels("detector", channels)
        self.network = load_onnx(path, "reward.kwargs.detector")

    @torch.no_grad()
    def forward(self, frames: torch.Tensor) -> Faces:
        """frames: (F, 3, H, W) in [0, 1], RGB."""
        height, width = frames.shape[-2:]
        ratio = self.size / max(height, width)
        inside = max(round(height * ratio), 1), max(round(width * ratio), 1)
        shrunk = F.interpolate(frames.float(), inside, mode="bilinear", antialias=True, align_corners=False)
        canvas = (_ordered(shrunk, self.channels) * 255 - 127.5) / 128
        right, below = self.size - inside[1], self.size - inside[0]
        canvas = F.pad(canvas, (0, right, 0, below), value=-127.5 / 128)  # black
        # the files of InsightFace take one picture at a time
        largest = [self.largest(self.network(picture[None])) for picture in canvas]
        points = torch.stack([shrunk.new_zeros(5, 2) if one is None else one for one in largest])
        scale = shrunk.new_tensor([width / inside[1], height / inside[0]])
        found = torch.tensor([one is not None for one in largest], device=frames.device)
        return Faces(found, (points + 0.5) * scale - 0.5)

    def largest(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The five points (5, 2) of the largest face in one picture, or None."""
        scores, boxes, points = decode_scrfd(outputs, self.size, self.threshold)
        kept = suppress(boxes, scores, self.overlap)
        if len(kept) == 0:
            return None
        boxes, points = boxes[kept], points[kept]
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        return points[area.argmax()]


def decode_scrfd(
    outputs: Sequence[torch.Tensor], size: int, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores (n,), boxes (n, 4) as left, top, right, bottom, and points (n, 5, 2), in pixels, of what scores at least
    `threshold`.

    outputs: nine, for strides 8, 16, 32 each: scores, box distances, point distances; (cells * ANCHORS, 1 | 4 | 10) or
    the same with a leading 1. Cells run along rows; a cell's anchors stand at (column, row) * stride; distances are in
    units of the stride. Raises UserError if there are not nine, or of another size.
    """
    levels = len(STRIDES)
    if len(outputs) != 3 * levels:
        raise UserError(
            f"reward.kwargs.detector: the model gives {len(outputs)} outputs; expected {3 * levels} (scores, boxes and "
            "five points at strides 8, 16, 32). Use an SCRFD file with points, as scrfd_10g_bnkps.onnx"
        )
    found = []
    for level, stride in enumerate(STRIDES):
        side = size // stride
        parts = [outputs[level + levels * kind] for kind in range(3)]
        wanted = side * side * ANCHORS
        shapes = [tuple(part.shape) for part in parts]
        if [part.numel() for part in parts] != [wanted, 4 * wanted, 10 * wanted]:
            raise UserError(
                f"reward.kwargs.detector: at stride {stride} the model gives {shapes} for {size} x {size} pixels; "
                f"expected {wanted} anchors with 1, 4 and 10 numbers"
            )
        scores, distances, offsets = parts[0].reshape(-1), parts[1].reshape(-1, 4), parts[2].reshape(-1, 5, 2)
        steps = torch.arange(side, device=scores.device, dtype=torch.float32) * stride
        rows, columns = torch.meshgrid(steps, steps, indexing="ij")
        centres = torch.stack([columns, rows], -1).reshape(-1, 1, 2).expand(-1, ANCHORS, 2).reshape(-1, 2)
        boxes = torch.cat([centres - distances[:, :2] * stride, centres + distances[:, 2:] * stride], -1)
        points = centres[:, None] + offsets * stride
        good = scores >= threshold
        found.append((scores[good], boxes[good], points[good]))
    scores, boxes, points = (torch.cat(parts) for parts in zip(*found, strict=True))
    return scores, boxes, points


def suppress(boxes: torch.Tensor, scores: torch.Tensor, overlap: float) -> torch.Tensor:
    """Indices of the boxes that stay, best first: each drops those after it whose intersection over union with it is
    above `overlap`. boxes: (n, 4) as left, top, right, bottom. scores: (n,)."""
    order = scores.argsort(descending=True)
    boxes = boxes[order]
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    corner = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    opposite = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    common = (opposite - corner).clamp_min(0).prod(-1)  # (n, n)
    share = common / (area[:, None] + area[None, :] - common).clamp_min(1e-12)
    stays = torch.ones(len(boxes), dtype=torch.bool, device=boxes.device)
    for index in range(len(boxes)):
        if stays[index]:
            stays[index + 1 :] &= share[index, index + 1 :] <= overlap
    return order[stays]


def load_onnx(path: str, option: str) -> nn.Module:
    """The model of an ONNX file as a frozen torch module. option: the key that names it, for messages.

    Raises UserError if there is no such file, onnx2torch is not installed, or it cannot convert the file.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{option}={path!r}: no such file (looked for {file.absolute()}); expected an ONNX file")
    with _stand_in_for_torchvision():
        try:
            from onnx2torch import convert
        except ModuleNotFoundError as error:
            raise UserError(
                f"{option} is an ONNX file, and {error.name} is not installed, which makes a torch module of it: "
                "pip install verl_lite[diffusion]"
            ) from None
    try:
        return convert(file).eval().requires_grad_(False)
    except NotImplementedError as error:
        raise UserError(f"{option}={path!r}: onnx2torch cannot convert it: {error}") from error


@contextmanager
def _stand_in_for_torchvision() -> Iterator[None]:
    """onnx2torch imports torchvision for two operators, NonMaxSuppression and RoiAlign, which no face model here has
    (NMS is done above). Where torchvision is not installed, its import is given an empty one, and nothing else is."""
    import importlib.util

    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        yield
        return
    package, operators = ModuleType("torchvision"), ModuleType("torchvision.ops")

    def missing(*_: Any, **__: Any) -> Any:
        raise UserError("this ONNX model has an operator that needs torchvision: pip install torchvision")

    for name in ("roi_align", "nms", "box_convert"):
        setattr(operators, name, missing)
    package.ops = operators  # type: ignore[attr-defined]
    stand_ins = {"torchvision": package, "torchvision.ops": operators}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _known_channels(role: str, channels: str) -> str:
    if channels not in CHANNELS:
        raise UserError(f"reward.kwargs.{role} channels={channels!r}; expected one of {', '.join(CHANNELS)}")
    return channels


def _ordered(pixels: torch.Tensor, channels: str) -> torch.Tensor:
    """(..., 3, H, W) from RGB to the order asked for."""
    return pixels if channels == "rgb" else pixels.flip(-3)
