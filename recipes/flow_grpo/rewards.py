"""What a sample is worth: a function of frames and prompts, or a registered visual reward that needs no reference clip.

No gradient is asked for, so a reward may count, threshold, call a detector or a person.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch

from verl_lite.config.diffusion import FlowRewardConfig
from verl_lite.config.flow_grpo import FlowScoreConfig
from verl_lite.errors import UserError
from verl_lite.registry import find_entry
from verl_lite.visual_rewards import VISUAL_REWARDS, build_visual_reward


class Reward(Protocol):
    def __call__(self, frames: torch.Tensor, prompts: Sequence[str], **kwargs: Any) -> Sequence[float | None]:
        """A score for each sample; None or NaN = it cannot be scored. frames: (B, F, 3, H, W) in [0, 1]."""


def load_reward(options: FlowScoreConfig) -> Reward:
    """The reward that reward.name names. UserError if there is none, or it wants a reference clip."""
    name = str(options.name)
    if name in VISUAL_REWARDS:
        return _without_reference(options)
    try:
        found: Any = find_entry({}, "reward", name)
    except ValueError as error:
        raise UserError(f"reward.name={name!r}: {error} Or a visual reward: {', '.join(VISUAL_REWARDS)}") from None
    if not callable(found):
        raise UserError(f"reward.name={name!r} is no function")
    return cast("Reward", found)


def _without_reference(options: FlowScoreConfig) -> Reward:
    visual = build_visual_reward(FlowRewardConfig(name=str(options.name), kwargs=options.kwargs))
    try:
        needs_reference = visual.prepare(torch.zeros(2, 3, 16, 16)) is not None
    except ValueError:
        needs_reference = True
    if needs_reference:
        raise UserError(
            f"reward.name={options.name} compares with a reference clip, and prompts have none; see reward flow"
        )

    @torch.no_grad()
    def score(frames: torch.Tensor, prompts: Sequence[str], **kwargs: Any) -> list[float | None]:
        found = [visual.score(clip * 2 - 1, None) for clip in frames]
        return [float(each.value) if each.counted else None for each in found]

    return score
