"""Whether an answer has the form that was asked for: sections in tags, each exactly once and in order, or a pattern.

With the default tags, `<think>...</think><answer>...</answer>` and nothing but white space around. It says nothing
about what is in the sections; give it a small weight beside a reward that does (`reward.functions`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl_lite.rewards.dispatch import register_reward


@register_reward("rule/format")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    tags: Sequence[str] = ("think", "answer"),
    pattern: str | None = None,
    opened: bool = False,
    text_outside: bool = False,
    empty: bool = False,
) -> float:
    """1.0 if the answer has the form, else 0.0. The ground truth is not read.

    tags: names of the sections, in order. opened: the prompt ends with the first opening tag, so the answer begins
    inside it. text_outside: anything may stand around the sections. empty: sections may be empty.
    pattern: in place of tags, a regular expression for the whole answer without white space at its ends (dot matches
    line ends too). Raises ValueError for tags that are not names, and re.error for a wrong pattern.
    """
    if pattern is not None:
        return float(re.fullmatch(pattern, solution_str.strip(), re.DOTALL) is not None)
    return float(has_sections(solution_str, tuple(tags), opened=opened, text_outside=text_outside, empty=empty))


def has_sections(
    text: str, tags: tuple[str, ...], *, opened: bool = False, text_outside: bool = False, empty: bool = False
) -> bool:
    """Whether each of the sections is there exactly once, in order, and none in another. Arguments as above."""
    if not tags or not all(re.fullmatch(r"\w[\w-]*", tag) for tag in tags) or len(set(tags)) < len(tags):
        raise ValueError(f"tags={list(tags)}: different names are expected, such as [think, answer]")
    text = f"<{tags[0]}>{text}" if opened else text
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if any(text.count(mark) != 1 for mark in marks):
        return False
    places = [text.index(mark) for mark in marks]
    if places != sorted(places):
        return False
    ends = [place + len(mark) for place, mark in zip(places, marks, strict=True)]
    borders = [0, *(border for pair in zip(places, ends, strict=True) for border in pair), len(text)]
    pieces = [text[start:end].strip() for start, end in zip(borders[::2], borders[1::2], strict=True)]
    outside, inside = pieces[::2], pieces[1::2]
    return (text_outside or not any(outside)) and (empty or all(inside))
