"""Differentiable rewards for generated clips.

`base` defines the interface of a reward, `identity` scores the similarity of faces, and `arcface` loads real face
models. The guide is trainer/DIFFUSION.md.
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
