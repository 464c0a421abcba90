"""GSM8K: the answer is the number after the last `####`, which has to stand near the end of the text."""

from __future__ import annotations

import re
from typing import Any

from verl_lite.rewards.dispatch import register_reward

SEARCHED_CHARACTERS = 300
"""The answer is looked for in so many last characters: a long text cannot list candidates, and the search is fast."""

_ANSWER = re.compile(r"#### *(-?\$?-?[0-9.,]+)")


def extract_answer(solution_str: str) -> str | None:
    """The number after the last `####`, without commas, dollar signs and final full stop; None if there is none."""
    found = _ANSWER.findall(solution_str[-SEARCHED_CHARACTERS:])
    return _clean(found[-1]) if found else None


@register_reward("openai/gsm8k", "rule/gsm8k")
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 if the extracted number is the ground truth, written alike; else 0.0."""
    answer = extract_answer(solution_str)
    return float(answer is not None and answer == _clean(str(ground_truth)))


def _clean(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "").rstrip(".")
