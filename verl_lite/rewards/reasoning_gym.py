"""Tasks of the package reasoning-gym, scored by its own scorers.

A row of the dataset `chain_sum` has data_source "reasoning_gym/chain_sum" and in extra_info["entry"] the JSON text of
the entry that the generator made.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from typing import Any

from verl_lite.rewards.dispatch import register_reward


@register_reward("reasoning_gym/*")
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """The scorer's number, 0 to 1. Some tasks give part marks; with extra_info["full_marks_only"] they count as 0.

    Raises ValueError for an unknown task or no entry.
    """
    entry = (extra_info or {}).get("entry")
    if not isinstance(entry, str):
        raise ValueError(
            f"data_source={data_source!r} needs extra_info['entry'], the JSON text of reasoning-gym's entry; "
            f"found extra_info={extra_info!r}"
        )
    scorer = _scorer(data_source.partition("/")[2])
    score = float(scorer(answer=solution_str.strip(), entry=json.loads(entry)))
    return score if score >= 1 or not (extra_info or {}).get("full_marks_only") else 0.0


@functools.cache
def _scorer(task: str) -> Callable[..., float]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # a dependency's, at its first compilation
            from reasoning_gym import get_score_answer_fn
    except ImportError as error:
        raise ImportError(
            f"data_source 'reasoning_gym/{task}' is scored by reasoning-gym, which cannot be imported ({error}): "
            "pip install reasoning-gym"
        ) from error
    return get_score_answer_fn(task)
