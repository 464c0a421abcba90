"""A response to be scored, and its score: the values that pass between the trainer and a reward function."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import SupportsFloat, SupportsIndex

from verl_lite.errors import UserError
from verl_lite.json_types import ChatMessage, ExtraInfo, GroundTruth, JsonMapping

READ_BY_REWARDS = ("data_source", "reward_model", "extra_info", "raw_prompt")
"""Columns of a batch that `RewardItem.of_row` reads."""

SCORE = "a finite number in the range of float32"
_EXTRA_CHARACTERS = 10_000
_ERROR_CHARACTERS = 20_000
_FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class RewardItem:
    """A response to be scored.

    Attributes:
        key: identifier that is unique among the pending samples.
        data_source: name of the row's dataset or task.
        solution_str: decoded response, without the prompt.
        ground_truth: `reward_model["ground_truth"]` of the row.
        extra_info: further data of the row.
        prompt: chat messages of the prompt.
        images: encoded files of the prompt's images.
    """

    key: Hashable
    data_source: str
    solution_str: str
    ground_truth: GroundTruth
    extra_info: ExtraInfo | None = None
    prompt: list[ChatMessage] | None = None
    images: tuple[bytes, ...] = ()

    @classmethod
    def of_row(cls, key: Hashable, row: JsonMapping, answer: str, images: Sequence[bytes] = ()) -> RewardItem:
        """Returns the item of an answer to a row of the data.

        Args:
            key: see `RewardItem`.
            row: data_source, reward_model with ground_truth, and optionally extra_info and the chat messages, which a
                batch calls raw_prompt and a dataset prompt.
            answer: the decoded response; empty if it does not exist yet.
            images: encoded files of the prompt's images.
        """
        reward_model = row.get("reward_model") or {}
        return cls(
            key=key,
            data_source=row["data_source"],
            solution_str=answer,
            ground_truth=reward_model.get("ground_truth"),
            extra_info=row.get("extra_info"),
            prompt=row.get("raw_prompt", row.get("prompt")),
            images=tuple(images),
        )


@dataclass(frozen=True)
class RewardResult:
    """The score of a response, or the failure to compute a score.

    Attributes:
        score: the score; NaN after a failure.
        extra: other numbers and strings that the function returned.
        failed: True if there is no score.
        error: reason of the failure, with the traceback.
        timed_out: True if the call exceeded reward.timeout_s.
    """

    score: float
    extra: dict[str, float | str] = field(default_factory=dict)
    failed: bool = False
    error: str | None = None
    timed_out: bool = False

    @classmethod
    def scored(cls, giver: str, score: float, extra: dict[str, float | str] | None = None) -> RewardResult:
        """Returns a result with this score, or a failure if the score is invalid.

        Args:
            giver: the source of the score, for the error.
            score: the score.
            extra: see `RewardResult`.
        """
        if not is_score(score):
            return cls.failure(f"{giver} gave {score:g}; expected {SCORE}")
        return cls(score, extra or {})

    @classmethod
    def failure(cls, error: str, *, timed_out: bool = False) -> RewardResult:
        """Returns a result without a score. The middle of a very long error is omitted."""
        excess = len(error) - _ERROR_CHARACTERS
        if excess > 0:
            # the beginning names the part, and the end of a traceback the exception
            half = _ERROR_CHARACTERS // 2
            error = f"{error[:half]}\n[{excess} characters omitted]\n{error[-half:]}"
        return cls(score=math.nan, failed=True, error=error, timed_out=timed_out)


def is_score(number: float) -> bool:
    """Returns True if float32, the dtype of scores, can hold the number: not NaN, magnitude at most 3.4e38."""
    # false for NaN, which compares with nothing
    return abs(number) <= _FLOAT32_MAX


def read_score(returned: object) -> tuple[float, dict[str, float | str]]:
    """Reads the score and the extra entries from the result of a reward function.

    Args:
        returned: a number in the range of float32, a bool, or a dict with one of these under "score". Other entries of
            the dict are kept if they are such numbers, bools or strings, which are cut to 10,000 characters.

    Raises:
        UserError: if the result has another form.
    """
    entries = returned if isinstance(returned, dict) else {"score": returned}
    if "score" not in entries:
        raise UserError(f"The reward function returned a dict without 'score': {returned!r:.200}")
    value = entries["score"]
    score = number_of(value)
    if not is_score(score):
        description = f"{value!r:.200} ({type(value).__name__})"
        if isinstance(returned, dict):
            description = f"a dict whose 'score' is {description}"
        raise UserError(f"The reward function returned {description}; expected {SCORE}")

    extra: dict[str, float | str] = {}
    for key, value in entries.items():
        # a name of a column and of a metric: files cannot hold half a surrogate pair
        name = str(key).encode(errors="replace").decode()
        if isinstance(value, str):
            extra[name] = value[:_EXTRA_CHARACTERS]
            continue
        # entries of other types cannot become a column or a metric
        number = number_of(value)
        if key != "score" and is_score(number):
            extra[name] = number
    return score, extra


def number_of(value: object) -> float:
    """Converts a number of Python, numpy or torch, without importing them; returns NaN for other values."""
    # float("3") would accept text, and a text of numpy has the method __float__
    is_text = isinstance(value, str | bytes | bytearray)
    if is_text or not isinstance(value, SupportsFloat | SupportsIndex):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
