"""Rewards for generated clips: how frames become a number through which the gradient flows.

`base` says what a reward is, `identity` scores a likeness, `arcface` is the door for real face models. The
guide: trainer/DIFFUSION.md.
"""

from verl_lite.visual_rewards.base import (
    VISUAL_REWARDS,
    Faces,
    VisualScore,
    as_pixels,
    build_visual_reward,
    register_visual_reward,
    score_frames,
)
from verl_lite.visual_rewards.identity import CosineIdentityReward
