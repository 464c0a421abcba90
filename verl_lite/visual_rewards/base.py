"""The interface of visual rewards: a reward prepares a reference clip once, then scores generated frames.

`@register_visual_reward("name")` registers a class (or a factory function) for `reward.name`;
`reward.name=my_pkg.module:MyReward` needs no registration. `reward.kwargs` are its arguments.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from verl_lite.config.diffusion import FlowRewardConfig
from verl_lite.errors import UserError
from verl_lite.registry import Registry


@dataclass(frozen=True)
class VisualScore:
    """The score of one generated clip.

    Attributes:
        value: scalar tensor, differentiable with respect to the frames.
        counted: False if the clip shows nothing to score (no face in any frame). Such a clip is excluded from the loss,
            and `score_frames` sets its value to 0 without a gradient.
    """

    value: torch.Tensor
    counted: bool = True


class Faces(NamedTuple):
    """The largest face of each frame.

    Attributes:
        found: (F,) bool, True for frames with a face.
        keypoints: (F, 5, 2), x and y in pixels with pixel centres at whole numbers, in the order of `ARCFACE_TEMPLATE`;
            ignored in frames without a face.
    """

    found: torch.Tensor
    keypoints: torch.Tensor


def scaled_points(points: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Returns the places of a picture's points (..., 2) after the picture was scaled by `scale`."""
    # pixel centres are whole numbers, so the border of the picture, which stays in place, is at -0.5
    return (points + 0.5) * scale - 0.5


class VisualReward(Protocol):
    """A visual reward: an nn.Module, whose weights `build_visual_reward` freezes, or a plain object."""

    def prepare(self, reference_frames: torch.Tensor) -> object:
        """Computes the data of a reference clip that `score` needs; called once per clip, without gradient.

        Tensors in the result stay on the device of the frames.

        Args:
            reference_frames: (F, 3, H, W) in [0, 1].

        Raises:
            ValueError: the clip cannot serve as a reference.
        """

    def score(self, frames: torch.Tensor, reference: Any) -> VisualScore:
        """Scores frames (F, 3, H, W) in [-1, 1], with gradient. reference: result of `prepare`."""

    def to(self, device: torch.device) -> object:
        """Moves the reward's tensors to the device in place, like nn.Module.to."""


VISUAL_REWARDS: Registry[Callable[..., VisualReward]] = Registry("visual reward")
register_visual_reward = VISUAL_REWARDS.register


def build_visual_reward(config: FlowRewardConfig) -> VisualReward:
    """Builds the reward of config.name with config.kwargs, and freezes its weights.

    Raises:
        UserError: the name is unknown, the arguments do not match, or the object lacks `prepare`, `score` or `to`.
    """
    try:
        make = VISUAL_REWARDS.get_fn(config.name)
        # before the call, so that a TypeError inside the reward is not reported as wrong arguments
        inspect.signature(make).bind(**config.kwargs)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward.name={config.name!r}, reward.kwargs={dict(config.kwargs)}: {error}") from None
    # a factory can return any object, so its methods are looked up
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


def score_frames(reward: VisualReward, frames: torch.Tensor, reference: object) -> VisualScore:
    """Calls `reward.score` and checks its result. A clip that is not counted gets the value 0.

    Args:
        reward: the reward.
        frames: (F, 3, H, W) in [-1, 1].
        reference: result of `reward.prepare` for the reference clip.

    Raises:
        UserError: the value is not a finite scalar, or it does not require grad although the frames do.
    """
    score = reward.score(frames, reference)
    name = f"{type(reward).__name__}.score"
    if not isinstance(score, VisualScore) or not isinstance(score.value, torch.Tensor):
        raise UserError(f"{name} returned {type(score).__name__}; expected VisualScore(value=tensor, counted=bool)")
    # the value of such a clip has no meaning, and perhaps no gradient
    if not score.counted:
        return VisualScore(torch.zeros((), device=frames.device), counted=False)
    if score.value.shape != () or not bool(torch.isfinite(score.value)):
        raise UserError(f"{name} returned {score.value}; expected a finite scalar, shape ()")
    if frames.requires_grad and not score.value.requires_grad:
        raise UserError(
            f"{name} is not differentiable: compute it by torch operations on the frames, without detach(), item(), "
            "numpy, argmax or no_grad; for a reward without a gradient use recipes/flow_grpo"
        )
    return score


def as_pixels(frames: torch.Tensor) -> torch.Tensor:
    """Converts frames in [-1, 1] to fp32 in [0, 1], the range of reference frames."""
    return (frames.float() + 1) / 2
