r"""DAPO's rule for competition answers, as verl has it: `Answer: ...` compared as text, +1 or -1.

The last `Answer:` among the last 300 characters counts, up to the end of its line. Both sides are normalised as for
Minerva (Lewkowycz et al. 2022, appendix D): what stands before the last `=` goes, so do units, filler words, spaces and
LaTeX that says nothing; `\frac12` and `\sqrt2` get their braces, whole numbers lose their commas. A right value that is
written otherwise (0.5 for \frac{1}{2}) is wrong here: reward `math_verify` compares as mathematics, and reads \boxed.
"""

from __future__ import annotations

import re
from typing import Any

from verl_lite.rewards.dispatch import register_reward
from verl_lite.rewards.marks import boxed_content, last_boxed

SEARCHED_CHARACTERS = 300
SEARCHED_FOR_BOX = 100
NO_ANSWER = "[INVALID]"

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_WORDS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
).split()
_LATEX = (
    "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}",
    "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[^\n]*?\$([^\n]*?)\$[^\n]*", r"$\1$"),  # of text with $mathematics$ in it, the mathematics
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
    )
)


@register_reward("math_dapo", "math", "math_dapo_reasoning", "aime*", "rule/math_dapo")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    strict_box_verify: bool = False,
) -> dict[str, float | str]:
    r"""score: 1.0 if the answer is the ground truth, else -1.0; acc: the same as 1.0 and 0.0; pred: the answer as it
    was read, "[INVALID]" if there is none.

    strict_box_verify: take \boxed{...} among the last 100 characters in place of `Answer:`, and compare it as it is.
    """
    if strict_box_verify:
        boxed = last_boxed(solution_str[-SEARCHED_FOR_BOX:])
        pred, truth = NO_ANSWER if boxed is None else boxed_content(boxed), str(ground_truth)
    else:
        found = _ANSWER.findall(solution_str[-SEARCHED_CHARACTERS:])
        pred, truth = normalize(found[-1] if found else NO_ANSWER), normalize(str(ground_truth))
    right = pred == truth
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}


def normalize(answer: str) -> str:
    """An answer in the form in which two of them are compared."""
    answer = answer.rsplit("=", 1)[-1]
    for before, after in (*_REPLACED, *((word, "") for word in (*_WORDS, *_LATEX))):
        answer = answer.replace(before, after)
    for pattern, replacement in _REWRITTEN:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    return answer.replace(",", "").strip() if answer.replace(",", "").isdigit() else answer.strip()
