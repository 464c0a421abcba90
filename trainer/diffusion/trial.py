"""Tries the reward on the data before anything heavy starts: that each reference clip can be compared with, and that a
score can be learnt from.

The first clip is scored with a gradient; further ones are only prepared, as long as that takes no more than a moment
(on a CPU a real face detector takes seconds for a clip). Those that are left the workers see when they come.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from trainer.clips.dataset import VideoDataset, collate
from verl_lite.config.diffusion import FlowRewardConfig
from verl_lite.errors import UserError
from verl_lite.visual_rewards.base import VisualReward, build_visual_reward, score_frames

_NOISE = 0.02  # of the trial's frames beside the reference: far enough from the best score for a gradient


def try_reward(
    options: FlowRewardConfig, data: VideoDataset, tell: Callable[[str], None], budget_s: float = 20.0
) -> None:
    """Raises UserError for a reward that cannot be made, gives no gradient, or finds nothing to compare with in a clip,
    whose file and row are named. tell: hears how many clips were not tried in `budget_s` seconds."""
    reward = build_visual_reward(options)
    started = time.monotonic()
    count = len(data.rows)
    for row in range(count):
        frames = collate([data[row]], [0]).batch["video"][0]
        try:
            with torch.no_grad():
                reference = reward.prepare(frames)
        except ValueError as error:
            place = f"{data.rows[row].place}, {data.rows[row].path}"
            raise UserError(f"{place}: {error}. Take this clip out, or choose another reward.name") from error
        if row == 0:
            require_gradient(reward, options.name, frames, reference)
        if time.monotonic() - started > budget_s and row + 1 < count:
            tell(f"the reward was tried on {row + 1} of {count} clips in {budget_s:g} s; the others come untried")
            return


def require_gradient(reward: VisualReward, name: str, frames: torch.Tensor, reference: object) -> None:
    """Raises UserError unless the score of the clip itself, a little disturbed, has a finite gradient that is not 0."""
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal(frames.shape, dtype=np.float32))
    given = (2 * frames - 1 + _NOISE * noise).clamp(-1, 1).requires_grad_()
    score = score_frames(reward, given, reference)
    if not score.counted:  # it saw nothing in its own reference clip: the workers count such samples
        return
    [gradient] = torch.autograd.grad(score.value, given, allow_unused=True)
    if gradient is None or not bool(gradient.isfinite().all()) or not bool(gradient.any()):
        what = "none" if gradient is None else "one that is not finite" if bool(gradient.any()) else "one that is 0"
        raise UserError(
            f"reward.name={name!r} cannot be learnt from: of the gradient of its score towards the frames of the first "
            f"clip it gives {what}. Compute the score by differentiable torch operations on the frames; for a reward "
            "without a gradient use recipes/flow_grpo"
        )
