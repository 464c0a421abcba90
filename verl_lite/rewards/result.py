"""One sample on its way through a reward function: what goes in and what comes out.

A reward has three outcomes: a score, no score (`failed`, with the reason), never a made-up 0.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

_EXTRA_CHARACTERS = 10_000
_ERROR_CHARACTERS = 20_000


@dataclass(frozen=True)
class RewardItem:
    """One answer to be scored.

    key: any name that is unique among the samples in flight. solution_str: the decoded answer, without the prompt.
    ground_truth: `reward_model["ground_truth"]` of the row. prompt: the chat messages that were answered.
    """

    key: Hashable
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] | None = None
    prompt: list[dict[str, str]] | None = None


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
        """A sample without a score. The middle of a very long error is left out."""
        if len(error) > _ERROR_CHARACTERS:
            half = _ERROR_CHARACTERS // 2
            error = f"{error[:half]}\n[{len(error) - 2 * half} characters left out]\n{error[-half:]}"
        return cls(score=math.nan, failed=True, error=error, timed_out=timed_out)


def read_score(returned: Any) -> tuple[float, dict[str, float | str]]:
    """The score and the extras in what a reward function returned.

    A finite number or bool, or a dict with one under "score". Of the dict's other entries finite numbers, bools and
    strings are kept, a string up to 10,000 characters. Raises ValueError for anything else.
    """
    if not isinstance(returned, dict):
        return _finite(returned, "The reward function returned"), {}
    if "score" not in returned:
        raise ValueError(f"The reward function returned a dict without 'score': {short(returned)}")
    score = _finite(returned["score"], "The reward function returned a dict whose 'score' is")
    extra: dict[str, float | str] = {}
    for key, value in returned.items():
        if key == "score":
            continue
        if isinstance(value, str):
            extra[str(key)] = value[:_EXTRA_CHARACTERS]
        elif (number := _number(value)) is not None and math.isfinite(number):
            extra[str(key)] = number
    return score, extra


def short(value: Any) -> str:
    """A value as the text of an error shows it."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _finite(value: Any, what: str) -> float:
    number = _number(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{what} {short(value)} ({type(value).__name__}); expected a finite number")
    return number


def _number(value: Any) -> float | None:
    """Numbers of Python, numpy and torch alike, without importing either; None for what is no number."""
    if isinstance(value, str | bytes | bytearray):  # float("3") would read these
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
