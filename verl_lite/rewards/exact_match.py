"""Rewards an answer that equals the ground truth, apart from white space at both ends."""

from __future__ import annotations

from typing import Any

from verl_lite.rewards.dispatch import register_reward


@register_reward("verl_lite/sort", "verl_lite/add", "exact_match", "exact_match/*", "rule/exact_match")
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 if the stripped answer is the stripped ground truth, else 0.0. A ground truth that is a number is compared as
    text."""
    return float(solution_str.strip() == str(ground_truth).strip())
