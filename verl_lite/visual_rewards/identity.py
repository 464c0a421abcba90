"""The likeness of a generated face to the face of a reference clip, differentiable in the generated frames.

A detector finds a face's five points in each frame, without gradient; the frame is turned and scaled so that they lie
on the template of ArcFace, and an embedder makes a vector of the crop, both with gradient; the score is the mean cosine
between the vectors of generated and reference frames. Real detectors and embedders come from ONNX files (`arcface`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl_lite.errors import UserError
from verl_lite.registry import find_entry
from verl_lite.visual_rewards.arcface import ArcFaceEmbedder, ScrfdDetector
from verl_lite.visual_rewards.base import VisualScore, as_pixels, register_visual_reward
from verl_lite.visual_rewards.faces import TEMPLATE_SIZE, Faces, align, whole_frame

Detector = Callable[[torch.Tensor], Faces]
"""Frames (F, 3, H, W) in [0, 1], RGB, to faces; called without gradient."""

Embedder = Callable[[torch.Tensor], torch.Tensor]
"""Crops (n, 3, S, S) in [0, 1], RGB, to vectors (n, D) of any length; differentiable. Its attribute `crop_size` says S
(112 if it has none)."""


@register_visual_reward("cosine_identity")
class CosineIdentityReward(nn.Module):
    """Mean cosine between the face vectors of generated and reference frames, by `pooled_similarity`.

    embedder, detector: an object, or how to make it: FILE.onnx (see `arcface`), pkg.module:object for a class or
    function without arguments, or {name: one of both, ...: its arguments}. detector=None: the face fills the frame.
    """

    def __init__(
        self,
        embedder: Embedder | str | Mapping[str, Any],
        detector: Detector | str | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.embedder: Embedder = make_part("embedder", embedder)
        self.detector: Detector = whole_frame if detector is None else make_part("detector", detector)
        self.crop_size = int(getattr(self.embedder, "crop_size", TEMPLATE_SIZE))

    @torch.no_grad()
    def prepare(self, reference_frames: torch.Tensor) -> torch.Tensor:
        """(F, D), zero where a frame has no face.

        reference_frames: (F, 3, H, W) in [0, 1]. Raises ValueError if no frame after the first, which is the condition
        and does not count, has a face.
        """
        found, vectors = self.embed(reference_frames.float())
        if not bool(found[1:].any()):
            raise ValueError(f"no face in any of the {max(len(found) - 1, 0)} reference frames after the first")
        rows = vectors.new_zeros(len(found), vectors.shape[-1])
        rows[found] = vectors
        return rows

    def score(self, frames: torch.Tensor, reference: torch.Tensor) -> VisualScore:
        """frames: (F, 3, H, W) in [-1, 1]. reference: (R, D) of `prepare`. Without a face in any frame the clip does
        not count."""
        found, vectors = self.embed(as_pixels(frames))
        if not bool(found.any()):
            return VisualScore(torch.zeros((), device=frames.device), counted=False)
        return VisualScore(pooled_similarity(vectors, reference))

    def embed(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """found (F,) and the vectors (n, D) of the n frames with a face. pixels: (F, 3, H, W) in [0, 1]."""
        with torch.no_grad():
            faces = self.detector(pixels.detach())
        crops = align(pixels[faces.found], faces.keypoints[faces.found].to(pixels), self.crop_size)
        return faces.found, self.embedder(crops).float()


def pooled_similarity(vectors: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Mean over generated frames of the mean cosine to the reference frames that count; a scalar.

    vectors: (n, D), of the generated frames with a face (the first frame too). reference: (R, D); row 0, the frame that
    is given as condition, and rows of zeros (no face) do not count. As ROLL's reward flow pools, whose small constants
    in the denominators are not needed here: no row at all is an error of the caller.
    """
    counts = reference.abs().sum(-1) > 0  # (R,)
    counts[0] = False
    cosines = F.normalize(vectors, dim=-1) @ F.normalize(reference[counts].to(vectors), dim=-1).T  # (n, r)
    return cosines.mean()


def make_part(role: str, given: Any) -> Any:
    """The embedder or detector that `CosineIdentityReward` was given, or given a name of."""
    if not isinstance(given, str | Mapping):
        return given
    arguments = {"name": given} if isinstance(given, str) else dict(given)
    name = str(arguments.pop("name", ""))
    if name.endswith(".onnx"):
        make: Callable[..., Any] = {"embedder": ArcFaceEmbedder, "detector": ScrfdDetector}[role]
        return make(path=name, **arguments)
    try:
        if ":" not in name:
            raise ValueError(f"{given!r}; expected FILE.onnx, pkg.module:object, or {{name: one of both, ...}}")
        found: Any = find_entry({}, role, name)
    except ValueError as error:
        raise UserError(f"reward.kwargs.{role}: {error}") from None
    return found(**arguments)
