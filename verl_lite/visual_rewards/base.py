"""What a visual reward is: it prepares what it wants to know of a reference clip, then scores generated frames.

`@register_visual_reward("name")` files a class (or a function that makes the object) under `reward.name`;
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
    """What one generated clip is worth.

    value: scalar tensor, differentiable in the frames. counted: False = this clip shows nothing to score (no face in
    any frame); it is left out of the loss, and its value is 0 without a gradient.
    """

    value: torch.Tensor
    counted: bool = True


class Faces(NamedTuple):
    """The largest face of each frame. found: (F,) bool. keypoints: (F, 5, 2), x and y in pixels, in the template's
    order, pixel centres at whole numbers; what stands where nothing was found is never read."""

    found: torch.Tensor
    keypoints: torch.Tensor


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

    Raises:
        UserError: an unknown name, arguments it does not take, or an object without `prepare`, `score` and `to`.
    """
    try:
        make = VISUAL_REWARDS.get_fn(config.name)
        inspect.signature(make).bind(**config.kwargs)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward.name={config.name!r}, reward.kwargs={dict(config.kwargs)}: {error}") from None
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
    """`reward.score`, and that its answer can be learnt from; a clip that does not count comes back as 0.

    Args:
        frames: (F, 3, H, W) in [-1, 1].

    Raises:
        UserError: the value is no finite scalar, or frames have a gradient and the value has none.
    """
    score = reward.score(frames, reference)
    name = f"{type(reward).__name__}.score"
    if not isinstance(score, VisualScore) or not isinstance(score.value, torch.Tensor):
        raise UserError(f"{name} gave {type(score).__name__}; expected VisualScore(value=tensor, counted=bool)")
    if not score.counted:
        return VisualScore(torch.zeros((), device=frames.device), counted=False)
    if score.value.shape != () or not bool(torch.isfinite(score.value)):
        raise UserError(f"{name} gave {score.value}; expected a finite scalar, shape ()")
    if frames.requires_grad and not score.value.requires_grad:
        raise UserError(
            f"{name} is not differentiable: compute it by torch operations on the frames, without detach(), item(), "
            "numpy, argmax or no_grad; for a reward without a gradient use recipes/flow_grpo"
        )
    return score


def as_pixels(frames: torch.Tensor) -> torch.Tensor:
    """Frames of [-1, 1] as reference frames are: fp32 in [0, 1]."""
    return (frames.float() + 1) / 2
