r"""Rule-based rewards, which compare the answer in a response with the ground truth, a form or a pattern.

Packages that only one reward needs (math-verify, reasoning-gym) are imported at its first use. Every search reads the
text once, even if the text is adversarial.
"""

import functools
import json
import re
import string
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from verl_lite import gym_scores
from verl_lite.json_types import ExtraInfo, GroundTruth
from verl_lite.rewards import mathematics
from verl_lite.rewards.registry import register_reward

Info: TypeAlias = ExtraInfo | None
Report: TypeAlias = dict[str, float | str]

_BOX = "\\boxed{"
_BRACE = re.compile(r"[{}]")


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete `\boxed{...}` in a text, with matched braces; None if there is none."""
    last_start = -1
    last_end = -1
    # for each open brace the start of its content, or -1 without a preceding \boxed
    open_at: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            start = brace.end()
            is_box = text.endswith(_BOX, 0, start)
            open_at.append(start if is_box else -1)
        elif open_at:
            start = open_at.pop()
            # the box that begins last: inside another box, the inner one
            if start > last_start:
                last_start = start
                last_end = brace.start()
    if last_start < 0:
        return None
    return text[last_start:last_end]


def last_tagged(text: str, tag: str) -> str | None:
    """Returns the content of the last <tag>...</tag> in a text; None if there is none."""
    opening = f"<{tag}>"
    closing = f"</{tag}>"
    content = None
    start = text.find(opening)
    while start >= 0:
        end = text.find(closing, start)
        if end < 0:
            break
        content = text[start + len(opening) : end]
        start = text.find(opening, end + len(closing))
    return content


@register_reward("verl_lite/sort", "verl_lite/add", "exact_match", "exact_match/*", "rule/exact_match")
def exact_match(data_source: str, solution_str: str, ground_truth: GroundTruth, extra_info: Info = None) -> float:
    """Returns 1.0 if the stripped response equals the text of the ground truth, also stripped; else 0.0."""
    return float(solution_str.strip() == str(ground_truth).strip())


SEARCHED_CHARACTERS = 300
"""Number of characters at the end of a response that are searched for the answer. The limit prevents a long list of
candidates and keeps the search fast."""

_GSM8K_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")


@register_reward("openai/gsm8k", "rule/gsm8k")
def gsm8k(data_source: str, solution_str: str, ground_truth: GroundTruth, extra_info: Info = None) -> float:
    """Returns 1.0 if the number after the last `#### ` equals the ground truth, both without commas; else 0.0.

    Source: verl's strict rule, which rejects `####5`, `#### 5.` and `#### $5`.
    """
    end = solution_str[-SEARCHED_CHARACTERS:]
    answers = _GSM8K_STRICT.findall(end)
    truth = str(ground_truth).replace(",", "")
    # an empty ground truth must not equal "#### ,"
    if not answers or not truth:
        return 0.0
    answer = answers[-1].replace(",", "")
    return float(answer == truth)


SEARCHED_FOR_BOX = 100
NO_ANSWER = "[INVALID]"

_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
# the steps of `normalize_answer`, in its order: texts and what replaces them, units and filler words, LaTeX without
# meaning, and patterns
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
    # keeps only the $mathematics$ in a text
    (r"[^\n]*?\$([^\n]*?)\$[^\n]*", r"$\1$"),
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
)


@register_reward("math_dapo", "math", "math_dapo_reasoning", "aime*", "rule/math_dapo")
def math_dapo(
    data_source: str,
    solution_str: str,
    ground_truth: GroundTruth,
    extra_info: Info = None,
    strict_box_verify: bool = False,
) -> Report:
    r"""Compares the final answer with the ground truth as text, after normalisation.

    The answer is the rest of the line after the last `Answer:` in the last 300 characters, else the last \boxed{...} in
    them. An equal value in another form (0.5 for \frac{1}{2}) is wrong; reward `math_verify` compares as mathematics.

    Source: verl's math_dapo, with the normalisation of Minerva (Lewkowycz et al. 2022, appendix D).

    Args:
        data_source, extra_info: not read.
        solution_str: the response.
        ground_truth: the correct answer.
        strict_box_verify: True to read only \boxed{...} in the last 100 characters and to compare it without
            normalisation.

    Returns:
        score, 1.0 or -1.0; acc, 1.0 or 0.0; pred, the answer, "[INVALID]" if there is none.
    """
    if strict_box_verify:
        boxed = last_boxed(solution_str[-SEARCHED_FOR_BOX:])
        pred = NO_ANSWER if boxed is None else boxed
        is_right = bool(boxed) and boxed == str(ground_truth)
    else:
        end = solution_str[-SEARCHED_CHARACTERS:]
        answers = _ANSWER_LINE.findall(end)
        answer = answers[-1] if answers else last_boxed(end)
        pred = normalize_answer(answer or NO_ANSWER)
        truth = normalize_answer(str(ground_truth))
        # an empty answer is not right, even if the ground truth is empty by mistake
        is_right = bool(truth) and pred == truth
    score = 1.0 if is_right else -1.0
    return {"score": score, "acc": float(is_right), "pred": pred}


def normalize_answer(answer: str) -> str:
    """Normalises an answer to competition mathematics so that equal answers become equal texts.

    Removes the text before the last `=`, units, filler words, spaces and LaTeX without meaning. An answer that would
    become empty is returned unchanged, except for white space at its ends.
    """
    text = answer.rsplit("=", 1)[-1]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for removed in (*_WORDS, *_LATEX):
        text = text.replace(removed, "")
    for pattern, replacement in _REWRITTEN:
        text = re.sub(pattern, replacement, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    if without_commas.isdigit():
        text = without_commas
    return text.strip() or answer.strip()


_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math*", "numina_*")


@register_reward(*_MATH, "rule/math_verify")
def math_verify(
    data_source: str, solution_str: str, ground_truth: GroundTruth, extra_info: Info = None, strict: bool = True
) -> Report:
    r"""Compares the answer with the ground truth mathematically, by math-verify.

    The answer is the content of the last `\boxed{...}`, else the expression that math-verify finds in the last 2000
    characters. An answer that exceeds a limit of `mathematics` is wrong.

    Args:
        data_source, extra_info: not read.
        solution_str: the response.
        ground_truth: the correct answer.
        strict: True to require the final form: the answer leaves no operation on numbers and no relation open that the
            ground truth does not. If both consist of words, they are compared as text. False accepts every equal form,
            also an expression that is only a part of the box's content.

    Returns:
        score, 1.0 or 0.0, and pred, the parsed answer.

    Raises:
        ValueError: if the ground truth is not an expression or exceeds a limit, because no answer could be right.
    """
    answer = last_boxed(solution_str)
    is_boxed = answer is not None
    if answer is None:
        answer = solution_str[-mathematics.MOST_CHARACTERS :]
    is_right, pred = mathematics.compare(str(ground_truth), answer, is_boxed, strict)
    return {"score": float(is_right), "pred": pred}


MOST_TAGS = 10
"""Largest number of opening or closing tags at full score. A response with more tags is guessing and scores 0.25."""

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SEARCH_R1 = "nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle".split()


@register_reward(*(f"searchR1_{name}" for name in _SEARCH_R1), "rule/exact_answer")
def exact_answer(data_source: str, solution_str: str, ground_truth: GroundTruth, extra_info: Info = None) -> Report:
    """Compares the last <answer> with each correct answer, ignoring case, punctuation, articles and repeated spaces.

    Args:
        data_source, extra_info: not read.
        solution_str: the response.
        ground_truth: a text, a list of texts, or a dict with these under "target".

    Returns:
        score: 1.0 if the answer is correct, 0.25 if it is correct in a response with more than 10 opening or closing
        tags, else 0.0; acc, 1.0 or 0.0; pred, the answer.

    Raises:
        ValueError: if the ground truth has another form.
    """
    # before the answer is read, so that an invalid ground truth fails every sample of its prompt
    targets = _targets(ground_truth)
    answer = last_tagged(solution_str, "answer")
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "pred": ""}

    pred = _short_form(answer)
    acc = float(pred in map(_short_form, targets))
    score = acc
    num_tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    if num_tags > MOST_TAGS:
        score = 0.25 * acc
    return {"score": score, "acc": acc, "pred": pred}


def _targets(ground_truth: GroundTruth) -> list[str]:
    """Returns the correct answers that are not blank. Raises ValueError if there are none, or one is not text."""
    entries = ground_truth
    if isinstance(entries, dict):
        entries = entries.get("target")
    if isinstance(entries, str):
        entries = [entries]
    elif not isinstance(entries, Iterable):
        entries = []
    # a blank one would make an empty answer right
    targets = [entry for entry in entries if entry != "" and not str(entry).isspace()]
    if not targets or not all(isinstance(target, str) for target in targets):
        raise ValueError(f'ground_truth={ground_truth!r}: a text, a list of texts or {{"target": ...}} is expected')
    return targets


def _short_form(text: str) -> str:
    """Normalises an answer for comparison. Only an empty text becomes empty: "The" and "!!!" remain."""
    lower = text.lower()
    without_punctuation = lower.translate(_PUNCTUATION)
    without_articles = _ARTICLE.sub(" ", without_punctuation)
    for form in (without_articles, without_punctuation, lower):
        words = form.split()
        if words:
            return " ".join(words)
    return ""


LETTERS = "ABCDEFGHIJ"

# what follows a letter if the answer names another one, too: "A or B", "A, B", "(A) (B)", "A) B)", "A B"
_FURTHER_CHOICE = (
    r"(?:[ \t*_`$)}]*+(?:[,;/&|]|(?:\\text\w*\{)?+[ \t]*+(?i:or|and)\b)[ \t*_`${}(]*+(?:\\text\w*\{)?+[ \t(]*+[A-J]"
    r"(?=[*_`$]*+(?:\Z|[.):,;}\n]|[ \t]+(?i:or|and)\b))"
    r"|\)[ \t]*\([A-J]\)|\)[ \t]+[A-J]\)|[ \t]+[A-J][ \t}]*\Z)"
)
# The possessive quantifiers (*+) prevent backtracking, so a long run of characters is read once.
_CHOICE = re.compile(
    r"(?i:answer)[ \t*_`]*+(?i:is)?+[ \t*_`]*+:?+[ \t*_`$(]*+([A-J])(?=[*_`$]*+(?:\Z|[.):,;\n]))"
    rf"(?!{_FURTHER_CHOICE})"
)
_BOXED = re.compile(rf"[ \t({{]*+(?:\\text\w*\{{)?+[ (]*+([A-J])(?=\Z|[ .):}}])(?!{_FURTHER_CHOICE})")


@register_reward("rule/multiple_choice")
def multiple_choice(data_source: str, solution_str: str, ground_truth: GroundTruth, extra_info: Info = None) -> Report:
    r"""Compares the letter that the response chooses with the right letter.

    The chosen letter is that of the last box (`\boxed{B}`, `\boxed{B. Paris}`). Without a box it is the letter after
    the last "answer", followed by a punctuation mark or the end of the line (`Answer: B`, `The answer is (B).`). An
    answer that names several letters (`Answer: A or B`, `\boxed{(A), (B)}`) chooses none. If the response has an
    <answer>...</answer>, only its content is read.

    Args:
        data_source: not read.
        solution_str: the response.
        ground_truth: the letter (`B`, `(b)`), or the position of the right choice counted from 0 (1, "1").
        extra_info: its list "choices" sets the number of letters; without the list the letters are A to J.

    Returns:
        score and acc, 1.0 or 0.0; pred, the letter, "" if there is none.

    Raises:
        ValueError: if the ground truth is not one of the letters.
    """
    info = extra_info or {}
    choices = info.get("choices")
    letters = LETTERS
    if isinstance(choices, list | tuple):
        letters = LETTERS[: len(choices)]
    truth = _right_letter(ground_truth, letters)

    text = solution_str
    tagged = last_tagged(solution_str, "answer")
    if tagged is not None:
        # in the form that the pattern of a choice expects, because the tag alone may contain just the letter
        text = f"answer: {tagged.strip()}"
    pred = _chosen_letter(text)
    score = float(pred == truth)
    return {"score": score, "acc": score, "pred": pred}


def _right_letter(ground_truth: GroundTruth, letters: str) -> str:
    """Returns the letter of a ground truth. Raises ValueError if it is not one of the letters or their positions."""
    truth = str(ground_truth).strip().strip("().").upper()
    # isdigit alone is true for ² as well, which `int` refuses
    is_position = truth.isascii() and truth.isdigit()
    if is_position and int(truth) < len(letters):
        truth = letters[int(truth)]
    if len(truth) != 1 or truth not in letters:
        raise ValueError(
            f"ground_truth={ground_truth!r}: expected one of the letters {', '.join(letters)}, or a position from 0 to "
            f"{len(letters) - 1}"
        )
    return truth


def _chosen_letter(text: str) -> str:
    """Returns the letter of the last box, or without a box the one after the last "answer"; "" if there is none."""
    boxed = last_boxed(text)
    if boxed is None:
        letters = _CHOICE.findall(text)
    else:
        # at the beginning of the box only: a letter inside \boxed{Paris (B)} may be a part of the choice's text
        match = _BOXED.match(boxed)
        letters = [match[1]] if match else []
    return letters[-1] if letters else ""


@register_reward("rule/format")
def format(
    data_source: str,
    solution_str: str,
    ground_truth: GroundTruth,
    extra_info: Info = None,
    tags: Sequence[str] = ("think", "answer"),
    opened: bool = False,
) -> float:
    """Returns 1.0 if the response has the required form, else 0.0. The ground truth is not read.

    The form: each tag encloses exactly one section, in order, none of them nested or empty, with only white space
    outside the sections.

    Args:
        data_source, ground_truth, extra_info: not read.
        solution_str: the response.
        tags: names of the sections, in order.
        opened: True if the prompt ends with the first opening tag, so the response begins inside the first section.

    Raises:
        ValueError: if a tag is not a name, or occurs twice.
    """
    are_names = all(re.fullmatch(r"\w[\w-]*", tag) for tag in tags)
    if not tags or not are_names or len(set(tags)) < len(tags):
        raise ValueError(f"tags={list(tags)}: expected different names, such as [think, answer]")
    text = solution_str
    if opened:
        text = f"<{tags[0]}>{solution_str}"

    outside = []  # the text around the sections
    sections = []
    rest = text
    for tag in tags:
        opening = f"<{tag}>"
        closing = f"</{tag}>"
        # in the whole text, also inside the sections of other tags
        if text.count(opening) != 1 or text.count(closing) != 1:
            return 0.0
        before, _, after_opening = rest.partition(opening)
        section, is_closed, rest = after_opening.partition(closing)
        if not is_closed:  # the tags are not in order
            return 0.0
        outside.append(before.strip())
        sections.append(section.strip())
    outside.append(rest.strip())
    return float(not any(outside) and all(sections))


@register_reward("rule/regex")
def regex(
    data_source: str,
    solution_str: str,
    ground_truth: GroundTruth,
    extra_info: Info = None,
    pattern: str | None = None,
    group: int | str | None = None,
) -> Report:
    """Searches the response, without white space at its ends, for the last match of a regular expression.

    Args:
        data_source, extra_info: not read.
        solution_str: the response.
        ground_truth: without `pattern` the expression; with `group` the expected text; else not read.
        pattern: expression, which may begin with flags such as (?is); `\\A...\\Z` matches the whole response.
        group: number or name of a group of the pattern. The score is then 1.0 if the group's text equals the ground
            truth, both stripped. Without `group`, it is 1.0 if the expression matches.

    Returns:
        score, 1.0 or 0.0; pred, the last match or its group, "" without a match; with `group` also acc.

    Raises:
        ValueError: for a group without a pattern.
        IndexError: for an unknown group.
        re.error: for an invalid pattern.
    """
    if pattern is None and group is not None:
        raise ValueError(f"group={group!r} needs a pattern: without one the ground truth is the pattern")
    if pattern is None:
        pattern = str(ground_truth)
    compiled = re.compile(pattern)
    last_match: re.Match[str] | None = None
    for match in compiled.finditer(solution_str.strip()):
        last_match = match
    if group is None:
        pred = "" if last_match is None else last_match[0]
        return {"score": float(last_match is not None), "pred": pred}

    is_number_of_group = isinstance(group, int) and 0 <= group <= compiled.groups
    if group not in compiled.groupindex and not is_number_of_group:
        raise IndexError(f"group={group!r}: the pattern has {compiled.groups} groups {sorted(compiled.groupindex)}")
    if last_match is None:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    # None if the group did not take part in the match
    pred = (last_match[group] or "").strip()
    is_right = pred == str(ground_truth).strip()
    return {"score": float(is_right), "acc": float(is_right), "pred": pred}


@register_reward("reasoning_gym/*")
def reasoning_gym(data_source: str, solution_str: str, ground_truth: GroundTruth, extra_info: Info = None) -> float:
    """Returns the score of reasoning-gym's scorer for the task, from 0 to 1, as `verl_lite.gym_scores` limits it.

    Args:
        data_source: "reasoning_gym/" and the name of the task, such as "reasoning_gym/chain_sum".
        solution_str: the response.
        ground_truth: not read.
        extra_info: "entry" is the JSON text of the generated entry. If "full_marks_only" is true, scores below 1, which
            some tasks give, become 0.

    Raises:
        ValueError: if the task is unknown or the entry is missing.
        Exception: what the scorer raises for the entry's own answer. An answer for which it raises scores 0.
    """
    info = extra_info or {}
    entry = info.get("entry")
    if not isinstance(entry, str):
        raise ValueError(
            f"data_source={data_source!r} needs extra_info['entry'], the JSON text of reasoning-gym's entry; "
            f"found extra_info={extra_info!r}"
        )
    _, _, task = data_source.partition("/")
    score = gym_scores.score(task, _gym_scorer(task), solution_str.strip(), json.loads(entry))
    has_full_marks = score >= 1
    if info.get("full_marks_only") and not has_full_marks:
        return 0.0
    return score


@functools.cache
def _gym_scorer(task: str) -> Callable[..., float]:
    with warnings.catch_warnings():
        # raised by a dependency when it is first compiled
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym import get_score_answer_fn
    scorer: Callable[..., float] = get_score_answer_fn(task)
    return scorer
