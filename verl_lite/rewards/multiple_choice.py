r"""Multiple choice: the letter that an answer settles on is compared with the right one.

The first of these places that names a letter counts, and of several of its kind the last:

1. `\boxed{B}`, also `\boxed{\text{(B)}}` and `\boxed{B. Paris}`
2. after "answer": `Answer: B`, `The correct answer is (B).`, `**Final answer:** B) Paris`
3. the last line, if it is the letter: `B`, `(B)`, `**B.**`, `B) Paris`
4. a letter in parentheses in the last line, if only one letter is there in parentheses

Inside <answer>...</answer> nothing else is read. Two letters joined, as in `Answer: A or B`, are no answer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from verl_lite.rewards.dispatch import register_reward
from verl_lite.rewards.marks import boxed_content, last_boxed, last_tagged

LETTERS = "ABCDEFGHIJ"

_MARKUP = " \t*_`$"
_ANSWER = re.compile(
    r"(?i:answer\b[ \t*_`]*(?:is\b|:)?[ \t*_`]*:?[ \t*_`$]*(?:(?:option|choice|letter)\b[ \t*_`]*)?)([^\n]*)"
)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


@register_reward("rule/multiple_choice")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    letters: str = LETTERS,
) -> dict[str, float | str]:
    """score and acc: 1.0 if the answer settles on the right letter, else 0.0; pred: the letter, "" if there is none.

    ground_truth: the letter (`B`, `(b)`), or the place of the right choice counted from 0 (1, "1"). letters: those of
    the choices; with extra_info["choices"], a list of the choices, as many of them as there are choices.
    Raises ValueError for a ground truth that is none of the letters.
    """
    choices = (extra_info or {}).get("choices")
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        letters = letters[: len(choices)]
    right = right_letter(ground_truth, letters)
    found = find_letter(solution_str, letters)
    return {"score": float(found == right), "acc": float(found == right), "pred": found or ""}


def right_letter(ground_truth: Any, letters: str) -> str:
    """The letter that a ground truth names. Raises ValueError if it names none."""
    text = str(ground_truth).strip().strip("().").upper()
    if text.isascii() and text.isdigit() and not isinstance(ground_truth, bool) and int(text) < len(letters):
        return letters[int(text)]
    if len(text) == 1 and text in letters:
        return text
    raise ValueError(
        f"ground_truth={ground_truth!r}: one of the letters {', '.join(letters)} is expected, or a place from 0 to "
        f"{len(letters) - 1}"
    )


def find_letter(text: str, letters: str = LETTERS) -> str | None:
    """The letter that a text settles on; None if it settles on none."""
    tagged = last_tagged(text, "answer")
    text = text if tagged is None else tagged
    boxed = last_boxed(text)
    if boxed is not None:
        return _letter_at(_TEXT.sub(r"\1", boxed_content(boxed)), letters)
    for rest in reversed(_ANSWER.findall(text)):
        letter = _letter_at(rest, letters)
        if letter is not None or _joined(letters).search(rest):
            return letter
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    inside = set(re.findall(rf"\b([{letters}])\)", lines[-1]))
    if len(inside) > 1:  # a list of the choices
        return None
    in_parentheses = re.search(rf"\(([{letters}])\)", lines[-1])
    return _letter_at(lines[-1], letters) or (in_parentheses and in_parentheses[1])


def _letter_at(text: str, letters: str) -> str | None:
    """The letter that a text is or begins with: `b`, `(B)`, `**B.**`, `B) Paris`; None for `A dog`, `A or B`."""
    text = text.strip(_MARKUP + "\n")
    if _joined(letters).search(text):
        return None
    found = _beginning(letters).match(text)
    if found is not None:
        return found[1] or found[2]
    bare = text.strip("().:" + _MARKUP).upper()
    return bare if len(bare) == 1 and bare in letters else None


@functools.cache
def _beginning(letters: str) -> re.Pattern[str]:
    """A letter in parentheses, or one with the end or a mark after it."""
    return re.compile(rf"\(([{letters}])\)|([{letters}])(?=[*_`$]*(?:$|[.):,;\]}}\n]))")


@functools.cache
def _joined(letters: str) -> re.Pattern[str]:
    """A letter at the beginning, and another that is said in one breath with it: `A or B`, `(A), (B)`, `A/B`."""
    return re.compile(rf"^\(?([{letters}])\)?[*_`.]*\s*(?:,|/|&|\bor\b|\band\b)\s*[*_`]*\(?(?!\1)[{letters}]\b")
