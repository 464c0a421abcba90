r"""Rewards by rule: what an answer has to be, end with, look like or match. Those with packages of their own
(math-verify, reasoning-gym) import them at first use. Each search takes one pass over the text, whatever is in it.
"""

import functools
import json
import re
import string
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from verl_lite.rewards import mathematics
from verl_lite.rewards.registry import register_reward

Info = dict[str, Any] | None
Report = dict[str, float | str]

_BOX = "\\boxed{"
_BRACE = re.compile(r"[{}]")


def last_boxed(text: str) -> str | None:
    r"""What stands in the last complete `\boxed{...}` of a text, braces matched; None if there is none."""
    found = None
    open_at: list[int] = []  # for each brace that is open, where its content begins, -1 if it has no \boxed
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            open_at.append(brace.end() if text.endswith(_BOX, 0, brace.end()) else -1)
        elif open_at:
            start = open_at.pop()
            if start >= 0 and (found is None or start > found[0]):
                found = (start, brace.start())
    return None if found is None else text[found[0] : found[1]]


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


@register_reward("verl_lite/sort", "verl_lite/add", "exact_match", "exact_match/*", "rule/exact_match")
def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None) -> float:
    """1.0 if the stripped answer is the stripped ground truth, else 0.0. A ground truth that is a number is compared as
    text."""
    return float(solution_str.strip() == str(ground_truth).strip())


SEARCHED_CHARACTERS = 300
"""The answer is looked for in so many last characters: a long text cannot list candidates, and the search is fast."""

_GSM8K_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")


@register_reward("openai/gsm8k", "rule/gsm8k")
def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None) -> float:
    """1.0 if the number after the last `#### ` is the ground truth, both without commas; else 0.0.

    Source: verl's strict rule: `####5`, `#### 5.` and `#### $5` are wrong for it.
    """
    found = _GSM8K_STRICT.findall(solution_str[-SEARCHED_CHARACTERS:])
    truth = str(ground_truth).replace(",", "")  # "" if there is none, which "#### ," must not equal
    return float(bool(found and truth) and found[-1].replace(",", "") == truth)


SEARCHED_FOR_BOX = 100
NO_ANSWER = "[INVALID]"

_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
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
_REWRITTEN = (
    (r"[^\n]*?\$([^\n]*?)\$[^\n]*", r"$\1$"),  # of text with $mathematics$ in it, the mathematics
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
)


@register_reward("math_dapo", "math", "math_dapo_reasoning", "aime*", "rule/math_dapo")
def math_dapo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None, strict_box_verify: bool = False
) -> Report:
    r"""score: 1.0 if the answer is the ground truth, else -1.0; acc: the same as 1.0 and 0.0; pred: the answer as it
    was read, "[INVALID]" if there is none.

    The last `Answer:` among the last 300 characters counts, up to the end of its line; without one the last
    \boxed{...} among them. Compared as text: a right value that is written otherwise (0.5 for \frac{1}{2}) is wrong
    here; reward `math_verify` compares as mathematics.
    strict_box_verify: take \boxed{...} among the last 100 characters in place of `Answer:`, and compare it as it is.

    Source: verl's math_dapo; normalised as for Minerva (Lewkowycz et al. 2022, appendix D).
    """
    if strict_box_verify:
        boxed = last_boxed(solution_str[-SEARCHED_FOR_BOX:])
        pred, right = NO_ANSWER if boxed is None else boxed, bool(boxed) and boxed == str(ground_truth)
    else:
        end, truth = solution_str[-SEARCHED_CHARACTERS:], normalize_answer(str(ground_truth))
        found = _ANSWER_LINE.findall(end) or [last_boxed(end) or NO_ANSWER]
        pred = normalize_answer(found[-1])
        right = bool(truth) and pred == truth
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}


def normalize_answer(answer: str) -> str:
    """An answer to competition mathematics in the form in which two of them are compared: what stands before the last
    `=` goes, so do units, filler words, spaces and LaTeX that says nothing. An answer of nothing else stays itself."""
    text, answer = answer.strip(), answer.rsplit("=", 1)[-1]
    for before, after in (*_REPLACED, *((word, "") for word in (*_WORDS, *_LATEX))):
        answer = answer.replace(before, after)
    for pattern, replacement in _REWRITTEN:
        answer = re.sub(pattern, replacement, answer)
    answer = answer.replace("$", "")
    return (answer.replace(",", "") if answer.replace(",", "").isdigit() else answer).strip() or text


_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math*", "numina_*")


@register_reward(*_MATH, "rule/math_verify")
def math_verify(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None, strict: bool = True
) -> Report:
    r"""score 1.0 if the answer equals the ground truth mathematically, by math-verify, else 0.0; pred: the answer as it
    was read: the last `\boxed{...}` where there is one, else what math-verify finds in the last 2000 characters.

    strict: the answer has to be in its final form. It carries out every operation with numbers that the ground truth
    carries out, solves a relation that the ground truth solves, and is compared as text if both consist of words.
    Without strict any equal form is right, also one that math-verify finds inside of a box that it cannot read.

    An answer that is too large or takes too long (`mathematics`) is wrong. Raises ValueError if that holds for the
    ground truth, or if it is not an expression: no answer could be right.
    """
    boxed = last_boxed(solution_str)
    answer = solution_str[-mathematics.MOST_CHARACTERS :] if boxed is None else boxed
    right, pred = mathematics.compare(str(ground_truth), answer, boxed is not None, strict)
    return {"score": float(right), "pred": pred}


MOST_TAGS = 10
"""An answer with more opening or closing tags than this is worth a quarter: it tries answers out."""

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SEARCH_R1 = "nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle".split()


@register_reward(*(f"searchR1_{name}" for name in _SEARCH_R1), "rule/exact_answer")
def exact_answer(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None) -> Report:
    """score: 1.0 if the last <answer> is one of the right ones, 0.25 if it is among more than 10 tags, else 0.0; acc:
    whether it is one of them; pred: the answer. Compared without case, punctuation, articles and repeated white space.

    ground_truth: a text, a list of texts, or a dict with these under "target". Raises ValueError for anything else.
    """
    found = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    targets = [found] if isinstance(found, str) else list(found) if isinstance(found, Iterable) else []
    targets = [target for target in targets if target != "" and not str(target).isspace()]
    if not targets or not all(isinstance(target, str) for target in targets):
        raise ValueError(f'ground_truth={ground_truth!r}: a text, a list of texts or {{"target": ...}} is expected')
    answer = last_tagged(solution_str, "answer")
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    pred = _short_form(answer)
    right = pred in map(_short_form, targets)
    is_guessing = max(solution_str.count("<answer>"), solution_str.count("</answer>")) > MOST_TAGS
    return {"score": float(right) * (0.25 if is_guessing else 1.0), "acc": float(right), "pred": pred}


def _short_form(text: str) -> str:
    """The form in which two answers are compared. It is empty for an empty text alone: "The" and "!!!" stay."""
    lower = text.lower()
    plain = lower.translate(_PUNCTUATION)
    forms = (" ".join(form.split()) for form in (_ARTICLE.sub(" ", plain), plain, lower))
    return next(filter(None, forms), "")


LETTERS = "ABCDEFGHIJ"

# each run is taken whole (*+), so that a long one is read once
_CHOICE = re.compile(r"(?i:answer)[ \t*_`]*+(?i:is)?+[ \t*_`]*+:?+[ \t*_`$(]*+([A-J])(?=[*_`$]*+(?:\Z|[.):,;\n]))")
_BOXED = re.compile(r"[ \t({]*+(?:\\text\w*\{)?+[ (]*+([A-J])(?=\Z|[ .):}])")


@register_reward("rule/multiple_choice")
def multiple_choice(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None) -> Report:
    r"""score and acc: 1.0 if the answer settles on the right letter, else 0.0; pred: the letter, "" if there is none.

    It is the last box's (`\boxed{B}`, `\boxed{B. Paris}`), without a box that of the last "answer" with a letter behind
    it, and behind that a mark or the line's end (`Answer: B`, `The correct answer is (B).`, but not `Answer: A or B`).
    Inside <answer>...</answer> nothing else is read.
    ground_truth: the letter (`B`, `(b)`), or the place of the right choice counted from 0 (1, "1"). The letters are A
    to J, or with extra_info["choices"], a list of the choices, as many of them as there are choices.
    Raises ValueError for a ground truth that is none of the letters.
    """
    choices = (extra_info or {}).get("choices")
    letters = LETTERS[: len(choices)] if isinstance(choices, list | tuple) else LETTERS
    truth = str(ground_truth).strip().strip("().").upper()
    if truth.isascii() and truth.isdigit() and not isinstance(ground_truth, bool) and int(truth) < len(letters):
        truth = letters[int(truth)]
    if len(truth) != 1 or truth not in letters:
        raise ValueError(
            f"ground_truth={ground_truth!r}: one of the letters {', '.join(letters)} is expected, or a place from 0 to "
            f"{len(letters) - 1}"
        )
    tagged = last_tagged(solution_str, "answer")
    text = solution_str if tagged is None else f"answer: {tagged.strip()}"
    boxed = last_boxed(text)
    found = _CHOICE.findall(text) if boxed is None else _BOXED.match(boxed)
    pred = "" if not found else found[-1] if boxed is None else found[1]
    return {"score": float(pred == truth), "acc": float(pred == truth), "pred": pred}


@register_reward("rule/format")
def format(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Info = None,
    tags: Sequence[str] = ("think", "answer"),
    opened: bool = False,
) -> float:
    """1.0 if the answer has the form, else 0.0: each section in its tags exactly once, in order, none in another, none
    empty, and nothing around them.

    The ground truth is not read. tags: names of the sections, in order. opened: the prompt ends with the first opening
    tag, so the answer begins inside it. Raises ValueError for tags that are not names.
    """
    if not tags or not all(re.fullmatch(r"\w[\w-]*", tag) for tag in tags) or len(set(tags)) < len(tags):
        raise ValueError(f"tags={list(tags)}: different names are expected, such as [think, answer]")
    text = f"<{tags[0]}>{solution_str}" if opened else solution_str
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    places = [text.find(mark) for mark in marks]
    if any(text.count(mark) != 1 for mark in marks) or places != sorted(places):
        return 0.0
    ends = [0, *(place + len(mark) for place, mark in zip(places, marks, strict=True))]
    pieces = [text[start:end].strip() for start, end in zip(ends, [*places, len(text)], strict=True)]
    return float(not any(pieces[::2]) and all(pieces[1::2]))


@register_reward("rule/regex")
def regex(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Info = None,
    pattern: str | None = None,
    group: int | str | None = None,
) -> Report:
    """score: 1.0 or 0.0. pred: the last match, or its group; "" if nothing matched.

    pattern: the expression, with flags at its beginning, such as (?is), looked for in the answer without white space at
    its ends (`\\A...\\Z` for the whole of it); without it the row's ground truth is the expression.
    group: number or name of a group. With it the score says whether the group's text is the ground truth, both without
    white space at their ends, and acc says the same; without it, whether the expression matches.
    Raises ValueError for a group without a pattern, IndexError for one that the pattern does not have, re.error for a
    wrong pattern.
    """
    if pattern is None and group is not None:
        raise ValueError(f"group={group!r} needs a pattern: without one the ground truth is the pattern")
    compiled = re.compile(str(ground_truth) if pattern is None else pattern)
    found: re.Match[str] | None
    *_, found = (None, *compiled.finditer(solution_str.strip()))
    if group is None:
        return {"score": float(found is not None), "pred": "" if found is None else found[0]}
    if group not in compiled.groupindex and not (isinstance(group, int) and 0 <= group <= compiled.groups):
        raise IndexError(f"group={group!r}: the pattern has {compiled.groups} groups {sorted(compiled.groupindex)}")
    pred = ((found[group] or "") if found is not None else "").strip()
    right = found is not None and pred == str(ground_truth).strip()
    return {"score": float(right), "acc": float(right), "pred": pred}


@register_reward("reasoning_gym/*")
def reasoning_gym(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None) -> float:
    """The number of reasoning-gym's own scorer, 0 to 1. Some tasks give part marks; with extra_info["full_marks_only"]
    they count as 0.

    A row of the dataset `chain_sum` has data_source "reasoning_gym/chain_sum" and in extra_info["entry"] the JSON text
    of the entry that the generator made. Raises ValueError for an unknown task or no entry.
    """
    entry = (extra_info or {}).get("entry")
    if not isinstance(entry, str):
        raise ValueError(
            f"data_source={data_source!r} needs extra_info['entry'], the JSON text of reasoning-gym's entry; "
            f"found extra_info={extra_info!r}"
        )
    scorer = _gym_scorer(data_source.partition("/")[2])
    score = float(scorer(answer=solution_str.strip(), entry=json.loads(entry)))
    return score if score >= 1 or not (extra_info or {}).get("full_marks_only") else 0.0


@functools.cache
def _gym_scorer(task: str) -> Callable[..., float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a dependency's, at its first compilation
        from reasoning_gym import get_score_answer_fn
    scorer: Callable[..., float] = get_score_answer_fn(task)
    return scorer
