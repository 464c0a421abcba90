"""The reward is tried on the clips before anything heavy starts: a gradient, and something to compare with in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.clips.dataset import Clip
from trainer.clips.table import VideoRow
from trainer.diffusion.trial import require_gradient, try_reward
from verl_lite.config.diffusion import FlowRewardConfig
from verl_lite.errors import UserError
from verl_lite.visual_rewards.base import VisualReward, VisualScore


class Clips:
    """Grey clips of rising brightness; as a `VideoDataset`."""

    def __init__(self, count: int) -> None:
        self.read = 0
        self.rows = [VideoRow(Path(f"clip{row}.mp4"), "a clip", f"data.train_files: row {row}") for row in range(count)]

    def __getitem__(self, row: int) -> Clip:
        self.read += 1
        return Clip(np.full((5, 4, 4, 3), 40 * row + 20, dtype=np.uint8), "a clip", row, self.rows[row].path)


class Brightness:
    """Rises with brightness; finds nothing in what is brighter than `limit`."""

    limit, value_of = 1.0, staticmethod(torch.mean)

    def prepare(self, reference_frames: torch.Tensor) -> float:
        if float(reference_frames.mean()) > self.limit:
            raise ValueError("no face in any of the 4 reference frames after the first")
        return float(reference_frames.mean())

    def score(self, frames: torch.Tensor, reference: float) -> VisualScore:
        return VisualScore(self.value_of(frames))

    def to(self, device: Any) -> Brightness:
        return self


class NoFace(Brightness):
    limit = 0.2


class Detached(Brightness):
    value_of = staticmethod(lambda frames: frames.detach().mean())


class Rounded(Brightness):
    value_of = staticmethod(lambda frames: (frames * 4).round().mean())


class OfAnotherTensor(Brightness):
    value_of = staticmethod(lambda frames: torch.zeros(3, requires_grad=True).sum())


def trial(kind: type, clips: Clips, **more: Any) -> list[str]:
    told: list[str] = []
    data: Any = clips
    try_reward(FlowRewardConfig(name=f"{__name__}:{kind.__name__}"), data, told.append, **more)
    return told


def test_a_differentiable_reward_passes_and_every_clip_is_looked_at() -> None:
    clips = Clips(4)
    assert trial(Brightness, clips) == [] and clips.read == 4


def test_a_clip_without_a_face_is_named_by_row_and_file() -> None:
    with pytest.raises(UserError, match=r"data.train_files: row 1, clip1.mp4: no face in any .* Take this clip out"):
        trial(NoFace, Clips(3))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Detached, "is not differentiable"),
        (Rounded, "towards the frames of the first clip it gives one that is 0"),
        (OfAnotherTensor, "towards the frames of the first clip it gives none"),
    ],
)
def test_a_reward_without_a_gradient_is_refused(kind: type, told: str) -> None:
    with pytest.raises(UserError, match=told):
        trial(kind, Clips(1))


def test_an_unknown_reward_is_refused() -> None:
    data: Any = Clips(1)
    with pytest.raises(UserError, match="did you mean cosine_identity"):
        try_reward(FlowRewardConfig(name="cosine_identit"), data, print)


def test_a_slow_reward_is_tried_on_some_clips_and_that_is_said() -> None:
    clips = Clips(4)
    assert trial(Brightness, clips, budget_s=-1.0) == [
        "the reward was tried on 1 of 4 clips in -1 s; the others come untried"
    ]
    assert clips.read == 1


def test_a_score_that_does_not_count_says_nothing_about_the_gradient() -> None:
    class Blind(Brightness):
        def score(self, frames: torch.Tensor, reference: float) -> VisualScore:
            return VisualScore(torch.zeros(()), counted=False)

    reward: VisualReward = Blind()
    require_gradient(reward, "blind", torch.zeros(5, 3, 4, 4), 0.0)
