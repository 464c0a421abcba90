"""What every visual reward promises, as a check for one of your own.

from verl_lite.visual_rewards.contract import check_visual_reward
check_visual_reward(MyReward())
"""

from __future__ import annotations

import torch

from verl_lite.contracts import BrokenPromise
from verl_lite.errors import UserError
from verl_lite.visual_rewards.base import VisualReward, score_frames


def random_clip(seed: int, frames: int = 3, height: int = 48, width: int = 32) -> torch.Tensor:
    """(F, 3, H, W) in [0, 1]: coloured stains that move, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    stains = torch.rand(1, 3, 6, 4, generator=generator).repeat(frames, 1, 1, 1)
    stains = (stains + 0.1 * torch.rand(stains.shape, generator=generator)) / 1.1
    return torch.nn.functional.interpolate(stains, (height, width), mode="bilinear")


def check_visual_reward(
    reward: VisualReward,
    clip: torch.Tensor | None = None,
    other: torch.Tensor | None = None,
    *,
    depends_on_reference: bool = True,
) -> None:
    """Raises `BrokenPromise` (an AssertionError), which says the promise, unless the reward does what a run relies on.

    Args:
        clip, other: (F, 3, H, W) in [0, 1], two clips that differ in what is scored; None = random colours.
        depends_on_reference: False for a reward that judges a clip by itself.
    """
    clip = random_clip(1) if clip is None else clip
    other = random_clip(2) if other is None else other
    reference, foreign = reward.prepare(clip), reward.prepare(other)
    frames = clip * 2 - 1
    leaf = frames.clone().requires_grad_()
    try:
        score = score_frames(reward, leaf * 0.9, reference)
        again, own, half = (score_frames(reward, x, reference).value for x in (frames, frames, frames.bfloat16()))
    except UserError as error:
        raise BrokenPromise(str(error)) from None
    (gradient,) = torch.autograd.grad(score.value, leaf, allow_unused=True) if score.counted else (None,)
    promises = {
        "the clip that it was prepared for counts": score.counted,
        "the score is differentiable in the frames": gradient is not None and bool(gradient.abs().sum() > 0),
        "the gradient is finite": gradient is not None and bool(torch.isfinite(gradient).all()),
        "the same frames have the same score": torch.equal(own, again),
        "the score is fp32, of frames of any precision": {own.dtype, half.dtype} == {torch.float32},
    }
    if depends_on_reference:
        unlike, moved = score_frames(reward, other * 2 - 1, reference), score_frames(reward, frames, foreign)
        promises |= {
            "the reference's own frames score best (prepare takes them in [0, 1], score in [-1, 1])": bool(
                unlike.value < own
            ),
            "the score depends on the reference": not torch.equal(moved.value, own),
        }
    for promise, holds in promises.items():
        if not holds:
            raise BrokenPromise(f"broken promise: {promise}")
