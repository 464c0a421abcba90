"""What a visual reward is: it prepares what it wants to know of a reference clip, then scores generated frames.

`@register_visual_reward("name")` files a class (or a function that makes the object) under `reward.name`;
`reward.name=my_pkg.module:MyReward` needs no registration. `reward.kwargs` are its arguments. `build_visual_reward`
makes the one that a configuration names, `score_frames` is the one door through which its scores come.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from verl_lite.config.diffusion import FlowRewardConfig
from verl_lite.errors import UserError
from verl_lite.registry import Registry


@dataclass(frozen=True)
class VisualScore:
    """What one generated clip is worth.

    value: scalar tensor, differentiable in the frames. counted: False = this clip shows nothing to score (no face in
    any frame); it is left out of the loss, and its value is 0 without a gradient.
    """

    value: torch.Tensor
    counted: bool = True


class VisualReward(Protocol):
    """An nn.Module or a plain object. Its weights are frozen by `build_visual_reward`."""

    def prepare(self, reference_frames: torch.Tensor) -> Any:
        """What `score` needs of the reference clip, tensors on the frames' device; once per clip, without gradient.

        reference_frames: (F, 3, H, W) in [0, 1]. Raises ValueError if nothing in them can be compared with.
        """

    def score(self, frames: torch.Tensor, reference: Any) -> VisualScore:
        """frames: (F, 3, H, W) in [-1, 1], with gradient. reference: from `prepare`."""

    def to(self, device: Any) -> Any:
        """Moves what it holds, in place, as nn.Module.to does."""


VISUAL_REWARDS: Registry[Callable[..., VisualReward]] = Registry("visual reward")
register_visual_reward = VISUAL_REWARDS.register


def build_visual_reward(config: FlowRewardConfig) -> VisualReward:
    """The reward that config.name and config.kwargs say, frozen.

    Raises UserError for an unknown name (with the nearest), arguments it does not take, or an object without `prepare`,
    `score` and `to`; what its constructor raises is raised.
    """
    try:
        make = VISUAL_REWARDS.get_fn(config.name)
    except ValueError as error:
        raise UserError(f"reward.name={config.name!r}: {error}") from None
    if not callable(make):
        raise UserError(f"reward.name={config.name!r} is {make!r}; expected a class or function that makes the reward")
    try:
        inspect.signature(make).bind(**config.kwargs)
    except TypeError as error:
        raise UserError(
            f"reward.kwargs={dict(config.kwargs)}: {error}; {config.name} takes {inspect.signature(make)}"
        ) from None
    reward = make(**config.kwargs)
    missing = [method for method in ("prepare", "score", "to") if not callable(getattr(reward, method, None))]
    if missing:
        raise UserError(
            f"reward.name={config.name!r} makes a {type(reward).__name__} without {', '.join(missing)}; a visual "
            "reward has prepare(reference_frames), score(frames, reference) and to(device)"
        )
    if isinstance(reward, torch.nn.Module):
        reward.eval().requires_grad_(False)
    return reward


def score_frames(reward: VisualReward, frames: torch.Tensor, reference: Any) -> VisualScore:
    """`reward.score`, and that its answer can be learnt from.

    frames: (F, 3, H, W) in [-1, 1]. A clip that does not count comes back as 0 without a gradient. Raises UserError if
    the value is no finite scalar, or frames have a gradient and the value has none.
    """
    score = reward.score(frames, reference)
    name = type(reward).__name__
    if not isinstance(score, VisualScore) or not isinstance(score.value, torch.Tensor):
        raise UserError(f"{name}.score gave {type(score).__name__}; expected VisualScore(value=tensor, counted=bool)")
    if not score.counted:
        return VisualScore(torch.zeros((), device=frames.device), counted=False)
    if score.value.shape != ():
        raise UserError(f"{name}.score gave a value of shape {tuple(score.value.shape)}; expected a scalar, shape ()")
    if not bool(torch.isfinite(score.value)):
        raise UserError(f"{name}.score gave {score.value.item()}; expected a finite number")
    if frames.requires_grad and not score.value.requires_grad:
        raise UserError(
            f"{name}.score is not differentiable: its value has no gradient towards the frames, so reward flow cannot "
            "learn from it. Compute it by torch operations on the frames, without detach(), item(), numpy, argmax or "
            "no_grad; for a reward without a gradient use recipes/flow_grpo"
        )
    return score


def as_pixels(frames: torch.Tensor) -> torch.Tensor:
    """Frames of [-1, 1] as reference frames are: fp32 in [0, 1]."""
    return (frames.float() + 1) / 2
