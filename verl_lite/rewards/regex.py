"""A regular expression: whether the answer matches, or whether what it matched is the ground truth."""

from __future__ import annotations

import re
from typing import Any

from verl_lite.rewards.dispatch import register_reward

MODES = ("search", "match", "fullmatch")


@register_reward("rule/regex")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    pattern: str | None = None,
    mode: str = "search",
    group: int | str | None = None,
    first: bool = False,
) -> dict[str, float | str]:
    """score: 1.0 or 0.0. pred: what matched, or the group; "" if nothing did.

    pattern: the expression, with flags at its beginning, such as (?is); without it the row's ground truth is the
    expression. mode: search finds the last match in the answer (with `first` the first), match one at its beginning,
    fullmatch the whole of it, each in the answer without white space at its ends.
    group: number or name of a group. With it the score says whether the group's text is the ground truth, both without
    white space at their ends, and acc says the same; without it, whether the expression matches.
    Raises ValueError for an unknown mode or a group without a pattern, IndexError for a group that the pattern does not
    have, re.error for a wrong pattern.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: one of {', '.join(MODES)} is expected")
    if pattern is None and group is not None:
        raise ValueError(f"group={group!r} needs a pattern: without one the ground truth is the pattern")
    compiled = re.compile(str(ground_truth) if pattern is None else pattern)
    found = _found(compiled, solution_str.strip(), mode, first)
    if group is None:
        return {"score": float(found is not None), "pred": "" if found is None else found[0]}
    if group not in compiled.groupindex and not (isinstance(group, int) and 0 <= group <= compiled.groups):
        raise IndexError(f"group={group!r}: the pattern has {compiled.groups} groups {sorted(compiled.groupindex)}")
    pred = ((found[group] or "") if found is not None else "").strip()
    right = found is not None and pred == str(ground_truth).strip()
    return {"score": float(right), "acc": float(right), "pred": pred}


def _found(compiled: re.Pattern[str], text: str, mode: str, first: bool) -> re.Match[str] | None:
    if mode != "search":
        found: re.Match[str] | None = getattr(compiled, mode)(text)
        return found
    if first:
        return compiled.search(text)
    matches = list(compiled.finditer(text))
    return matches[-1] if matches else None
