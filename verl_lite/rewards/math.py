r"""Competition mathematics: the answer is compared with the ground truth as a mathematical object, by math-verify.

The last `\boxed{...}` counts where there is one, else the final answer that math-verify finds. math-verify's own time
limits are off: they use signals, which do not work outside a main thread, and a reward process is killed from outside
when its time is over (`reward.timeout_s`).

verl scores `numina_*` by prime_math and MATH by comparing strings; here all of them are compared as mathematics.
`math`, `math_dapo` and `aime*` are math_dapo's, as in verl.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from verl_lite.rewards.dispatch import register_reward
from verl_lite.rewards.marks import last_boxed


@register_reward(
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "math*",
    "numina_*",
    "rule/math_verify",
)
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float | str]:
    """score 1.0 if the answer equals the ground truth mathematically, else 0.0; pred: the answer as it was read.

    Raises ValueError if the ground truth is not an expression: no answer could be right.
    """
    parse, verify = _math_verify()
    gold = _parse_ground_truth(str(ground_truth))
    answer = parse(last_boxed(solution_str) or solution_str, parsing_timeout=None)
    right = bool(answer) and verify(gold, answer, timeout_seconds=None)
    return {"score": float(right), "pred": str(answer[-1]) if answer else ""}


@functools.lru_cache(maxsize=4096)
def _parse_ground_truth(ground_truth: str) -> list[Any]:
    parse, _ = _math_verify()
    text = ground_truth if "\\boxed" in ground_truth else f"\\boxed{{{ground_truth}}}"
    gold = parse(text, parsing_timeout=None)
    if not gold:
        raise ValueError(f"ground_truth={ground_truth!r} cannot be read as a mathematical expression by math-verify")
    return gold


@functools.cache
def _math_verify() -> tuple[Any, Any]:
    """math-verify's parse and verify; imported at first use, because sympy is slow to import."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError(
            f"This data_source is scored by math-verify, which cannot be imported ({error}): pip install math-verify"
        ) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that its time limit is off
    return parse, verify
