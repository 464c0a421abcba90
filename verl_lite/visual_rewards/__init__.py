"""Differentiable rewards for generated clips.

Read `base.py` first: the interface of a reward and its registry. `identity.py` scores the similarity of faces, and
`arcface.py` loads real face models. The guide is trainer/DIFFUSION.md. Imports torch and the options of these
rewards.
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
