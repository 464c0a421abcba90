"""One sample on its way through a reward function: what goes in, what comes out, and the guarded door between.

A reward has three outcomes: a score, no score (`failed`, with the reason), never a made-up 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from verl_lite.config import RewardConfig
from verl_lite.rewards.custom import load_reward_function
from verl_lite.rewards.dispatch import RewardFunction, default_compute_score


@dataclass(frozen=True)
class RewardItem:
    """One answer to be scored. key: any name that is unique among the samples in flight."""

    key: Hashable
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] | None = None


@dataclass(frozen=True)
class RewardResult:
    """score: nan if failed. extra: the other numbers and strings that the function returned. error: why it failed, with
    the traceback. timed_out: it failed because it took longer than reward.timeout_s."""

    score: float
    extra: dict[str, float | str] = field(default_factory=dict)
    failed: bool = False
    error: str | None = None
    timed_out: bool = False

    @classmethod
    def failure(cls, error: str, *, timed_out: bool = False) -> RewardResult:
        """A sample without a score."""
        return cls(score=math.nan, failed=True, error=error, timed_out=timed_out)


def load_reward(config: RewardConfig) -> RewardFunction:
    """The reward function of a run: the user's own if the configuration names one, else the dispatch by data_source.

    reward.reward_kwargs are added to every call; they win over the call's own arguments.
    """
    custom = config.custom_reward_function
    function = load_reward_function(custom.path, custom.name) if custom.path else default_compute_score
    kwargs = dict(config.reward_kwargs)
    return (lambda **call: function(**{**call, **kwargs})) if kwargs else function


def score_item(function: RewardFunction, item: RewardItem) -> RewardResult:
    """Scores one sample. Whatever the function raises or returns becomes a result; see `read_score`."""
    try:
        returned = function(
            data_source=item.data_source,
            solution_str=item.solution_str,
            ground_truth=item.ground_truth,
            extra_info=item.extra_info,
        )
        if inspect.isawaitable(returned):
            returned = asyncio.run(_await(returned))
        score, extra = read_score(returned)
    except Exception:  # the one door to untrusted code: what it raises is this sample's outcome, not the run's
        return RewardResult.failure(traceback.format_exc())
    return RewardResult(score, extra)


def read_score(returned: Any) -> tuple[float, dict[str, float | str]]:
    """The score and the extras in what a reward function returned.

    A finite number or bool, or a dict with one under "score". Of the dict's other entries finite numbers, bools and
    strings are kept. Raises ValueError for anything else.
    """
    if not isinstance(returned, dict):
        return _finite(returned, "The reward function returned"), {}
    if "score" not in returned:
        raise ValueError(f"The reward function returned a dict without 'score': {_short(returned)}")
    score = _finite(returned["score"], "The reward function returned a dict whose 'score' is")
    extra: dict[str, float | str] = {}
    for key, value in returned.items():
        if isinstance(value, str):
            extra[str(key)] = value
        elif key != "score" and (number := _number(value)) is not None and math.isfinite(number):
            extra[str(key)] = number
    return score, extra


def _finite(value: Any, what: str) -> float:
    number = _number(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{what} {_short(value)} ({type(value).__name__}); expected a finite number")
    return number


def _number(value: Any) -> float | None:
    """Numbers of Python, numpy and torch alike, without importing either; None for what is no number."""
    if isinstance(value, str | bytes | bytearray):  # float("3") would read these
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
