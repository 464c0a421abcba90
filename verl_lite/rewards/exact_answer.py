"""Exact match of short answers to questions, as for SQuAD and Search-R1: the text in the last <answer>...</answer>.

Both sides are compared without case, punctuation, the articles a, an, the, and repeated white space.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from typing import Any

from verl_lite.rewards.dispatch import register_reward
from verl_lite.rewards.marks import last_tagged

MOST_TAGS = 10
"""An answer with more opening or closing tags than this is worth a quarter: it tries answers out."""

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@register_reward(
    "searchR1_nq",
    "searchR1_triviaqa",
    "searchR1_popqa",
    "searchR1_hotpotqa",
    "searchR1_2wikimultihopqa",
    "searchR1_musique",
    "searchR1_bamboogle",
    "rule/exact_answer",
)
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float | str]:
    """score: 1.0 if the answer is one of the right ones, 0.25 if it is among more than 10 tags, else 0.0; acc: whether
    it is one of them; pred: the answer, normalised.

    ground_truth: a text, a list of texts, or a dict with these under "target". Raises ValueError for anything else.
    """
    targets = {normalize(target) for target in _targets(ground_truth)}
    found = last_tagged(solution_str, "answer")
    if found is None:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    pred = normalize(found)
    right = pred in targets
    is_guessing = max(solution_str.count("<answer>"), solution_str.count("</answer>")) > MOST_TAGS
    return {"score": float(right) * (0.25 if is_guessing else 1.0), "acc": float(right), "pred": pred}


def normalize(text: str) -> str:
    """A short answer in the form in which two of them are compared."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _targets(ground_truth: Any) -> list[str]:
    found = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    targets = [found] if isinstance(found, str) else list(found) if isinstance(found, Iterable) else []
    if not targets or not all(isinstance(target, str) for target in targets):
        raise ValueError(f'ground_truth={ground_truth!r}: a text, a list of texts or {{"target": ...}} is expected')
    return targets
