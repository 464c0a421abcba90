r"""How models mark their final answer: `\boxed{...}` and <answer>...</answer>. Each search takes one pass over the
text, whatever is in it."""

from __future__ import annotations

import re

_START = "\\boxed{"
_BRACE = re.compile(r"[{}]")


def last_boxed(text: str) -> str | None:
    r"""The last complete `\boxed{...}` of a text, braces matched; None if there is none."""
    found = None
    open_at: list[int] = []  # for each brace that is open, where its \boxed begins, -1 if it has none
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            start = brace.end() - len(_START)
            open_at.append(start if start >= 0 and text.startswith(_START, start) else -1)
        elif open_at:
            start = open_at.pop()
            if start >= 0 and (found is None or start > found[0]):
                found = (start, brace.end())
    return None if found is None else text[found[0] : found[1]]


def boxed_content(boxed: str) -> str:
    r"""What stands between the braces of `\boxed{...}`."""
    return boxed[len(_START) : -1]


def last_tagged(text: str, tag: str) -> str | None:
    """What stands in the last <tag>...</tag> of a text; None if there is none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    found, place = None, 0
    while (start := text.find(opening, place)) >= 0:
        end = text.find(closing, start)
        if end < 0:
            break
        found, place = text[start + len(opening) : end], end + len(closing)
    return found
