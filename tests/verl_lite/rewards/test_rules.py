r"""The rules that answers are marked by without a model, against answers marked by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_lite.rewards import default_compute_score, read_score
from verl_lite.rewards.code import extract_code
from verl_lite.rewards.rules import last_boxed, last_tagged


def mark(rule: str, answer: str, truth: Any = "", extra_info: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    return default_compute_score(f"rule/{rule}", answer, truth, extra_info, **kwargs)


PIECES = [
    "\\boxed{", "\\text{", "}", "{", "$", "=", "<answer>", "</answer>", "<think>", "</think>", "```json\n", "```", "\n",
    "Answer: ", "(", ")", "A", "B", "or", "frac", "sqrt", "####", "72", ".", ",", "[", "]", '"', "NaN", "1e999", "null",
    "\ud800", "\x00", "٣", "İ",
]  # fmt: skip
TRUTHS = {
    "exact_match": "72", "gsm8k": "72", "math_dapo": "72", "exact_answer": "72", "multiple_choice": "B", "format": "",
    "regex": r"\d+",
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join))
def test_no_answer_makes_a_rule_fail(answer: str) -> None:
    """A reward that raises is a failed sample: the policy must not be able to bring that about."""
    for rule, truth in TRUTHS.items():
        score, _ = read_score(mark(rule, answer, truth))
        assert score in (-1.0, 0.0, 0.25, 1.0)


# ----------------------------------------------------------------------------------------------------- final answers


def test_marks_are_found_in_one_pass_whatever_the_text() -> None:
    started = time.process_time()
    for text in ("\\boxed{" * 50_000, "<answer>" * 50_000, "```json\n" * 50_000, "Answer:" * 50_000):
        assert last_boxed(text) is None and last_tagged(text, "answer") is None
        assert mark("multiple_choice", text, "A")["pred"] == ""
        extract_code(text)
    assert time.process_time() - started < 10  # square in the text would be minutes


# --------------------------------------------------------------------------------------------------- multiple choice


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"so \boxed{B}", "B"),
        (r"\boxed{B. Paris}", "B"),
        (r"\boxed{A} no, \boxed{B}", "B"),
        (r"\boxed{A, B}", None),
        ("The correct answer is (B).", "B"),
        ("**Final answer:** B) Paris, of course", "B"),
        ("Answer: A\nOn second thought, answer: B", "B"),
        ("Answer: A or B", None),
        ("Answer: A dog", None),
        ("(A) one (B) two (C) three", None),
        (r"\boxed{\text{(B)}}", "B"),
        ("answer " * 9 + " " * 100_000, None),
        ("The answer is (B), not (A).", "B"),
        ("A man walks into a bar", None),
        ("<think>Answer: A</think><answer>B</answer>", "B"),
        ("<answer>A</answer> or rather \\boxed{B}", "A"),
        ("Answer: B, because A dog barks", "B"),
    ],
)
def test_the_letter_that_an_answer_settles_on(text: str, letter: str | None) -> None:
    assert mark("multiple_choice", text, "B") == {"score": letter == "B", "acc": letter == "B", "pred": letter or ""}


def test_multiple_choice_takes_letters_and_places_as_ground_truth() -> None:
    for truth in ("B", " (b). ", 1, "1"):
        assert mark("multiple_choice", "Answer: B", truth) == {"score": 1.0, "acc": 1.0, "pred": "B"}
    assert mark("multiple_choice", "no idea", "B") == {"score": 0.0, "acc": 0.0, "pred": ""}
    assert mark("multiple_choice", "Answer: A", 0)["score"] == 1.0


@pytest.mark.parametrize("truth", ["Z", "", None, 9, True, "AB", -1])
def test_a_ground_truth_that_is_no_letter_is_an_error_and_not_a_zero(truth: Any) -> None:
    with pytest.raises(ValueError, match="letters A, B, C, D is expected"):
        mark("multiple_choice", "Answer: B", truth, {"choices": ["w", "x", "y", "z"]})


# ------------------------------------------------------------------------------------------------------------ format


GOOD = "<think>2 and 2</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, 1),
        (f"So: {GOOD}", 0),
        (f"{GOOD} done", 0),
        ("<answer>4</answer><think>2 and 2</think>", 0),
        ("<think>2<answer>4</answer></think>", 0),
        ("<think>say </think> now</think><answer>4</answer>", 0),
        ("<think>2</think><answer> </answer>", 0),
    ],
)
def test_sections_in_tags(text: str, expected: float) -> None:
    assert mark("format", text) == expected


def test_options_of_the_format() -> None:
    assert mark("format", "2 and 2</think><answer>4</answer>", opened=True) == 1
    assert mark("format", GOOD, opened=True) == 0, "the section would be opened twice"
    assert mark("format", "<sql>select 1</sql>", tags=["sql"]) == 1
    for tags in ([], ["a", "a"], ["a b"]):
        with pytest.raises(ValueError, match="different names are expected"):
            mark("format", "", tags=tags)


# ------------------------------------------------------------------------------------------------------------- regex


@pytest.mark.parametrize(
    ("answer", "truth", "kwargs", "score", "pred"),
    [
        ("x = 4, x = 5", "5", {"pattern": r"x = (\d)", "group": 1}, 1, "5"),
        ("so 5", "5", {"pattern": r"\A\d", "group": 0}, 0, ""),
        (" 5\n", "5", {"pattern": r"\A\d\Z", "group": 0}, 1, "5"),
        ("nothing", "", {"pattern": r"(\d)", "group": 1}, 0, ""),  # an empty ground truth is not what did not match
        ("b", "", {"pattern": r"(a)?b", "group": 1}, 1, ""),
        ("no", "", {"pattern": r"(?i)\byes\b"}, 0, ""),
        ("the 12th", r"\d+th", {}, 1, "12th"),
    ],
)
def test_regular_expressions(answer: str, truth: str, kwargs: dict[str, Any], score: float, pred: str) -> None:
    result = mark("regex", answer, truth, **kwargs)
    assert (result["score"], result["pred"]) == (score, pred)
    assert result.get("acc", score) == score and ("acc" in result) == ("group" in kwargs)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"pattern": "(a)", "group": 2}, "group=2: the pattern has 1 groups"),
        ({"pattern": "(a)", "group": "x"}, "group='x'"),
        ({"group": 1}, "needs a pattern"),
        ({"pattern": "(a"}, "unterminated"),
    ],
)
def test_wrong_options_of_a_regex_are_errors(kwargs: dict[str, Any], reason: str) -> None:
    with pytest.raises((ValueError, IndexError, re.error), match=reason):
        mark("regex", "a", "a", **kwargs)


# --------------------------------------------------------------------------------------------------------- math_dapo


@pytest.mark.parametrize(
    ("answer", "truth", "pred", "right"),
    [
        ("so\nAnswer: 34", "34", "34", True),
        ("Answer: 3 or so\nANSWER :  34 ", "34", "34", True),
        ("Answer: $34$.", "34", "34", True),
        ("Answer: feet", "degrees", "feet", False),  # units alone are not taken away
        ("Answer: degrees", "degrees", "degrees", True),
        ("Answer:  ", "", "", False),
        ("Answer: 1,234", "1234", "1234", True),
        (r"Answer: \frac12", r"\frac{1}{2}", r"\frac{1}{2}", True),
        ("Answer: 0.5", r"\frac{1}{2}", "0.5", False),  # compared as text
        (r"so \boxed{34}", "34", "34", True),  # the box where there is no such line, as in verl
        (r"\boxed{3} so \boxed{\frac12}", r"\frac{1}{2}", r"\frac{1}{2}", True),
        (r"\boxed{a \boxed{b} c}", "b", "b", True),
        ("boxed{3}", "3", "[INVALID]", False),
        (r"Answer: 5, no \boxed{34}", "34", r"5,no34", False),
        ("Answer: 34" + " " * 300, "34", "[INVALID]", False),  # further than 300 characters from the end
        ("Answer: 34", 34, "34", True),
    ],
)
@pytest.mark.parametrize("source", ["math_dapo", "aime2024"])
def test_math_dapo(source: str, answer: str, truth: Any, pred: str, right: bool) -> None:
    expected = {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}
    assert default_compute_score(source, answer, truth) == expected


def test_math_dapo_by_the_box() -> None:
    assert mark("math_dapo", r"Answer: 3, \boxed{34}", "34", strict_box_verify=True)["score"] == 1
    assert mark("math_dapo", r"\boxed{34}" + " " * 100, "34", strict_box_verify=True)["pred"] == "[INVALID]"
    assert mark("math_dapo", r"\boxed{34.}", "34", strict_box_verify=True)["score"] == -1


# ------------------------------------------------------------------------------------------------------ exact answers

        *(("<answer></answer>", truth, 0.0) for truth in ("A", "The", "!!!", ["", "A"])),
        ("<answer>the</answer>", "A", 0.0),
        ("<answer>(a)</answer>", "A", 1.0),
        ("<answer>The</answer>", "The", 1.0),
        ("<answer>?!</answer>", "!!!", 0.0),
        ("<answer> !!!</answer>", "!!!", 1.0),

@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("<answer>The Beatles!</answer>", "beatles", 1.0),
        ("<answer> a  beatle,s </answer>", {"target": ["x", "Beatles"]}, 1.0),
        ("<answer>x</answer> no <answer>Beatles</answer>", ["Beatles"], 1.0),
        ("The Beatles", "Beatles", 0.0),
        ("<answer>x</answer>" * 10 + "<answer>Beatles</answer>", "Beatles", 0.25),
        ("<answer>x</answer>" * 9 + "<answer>Beatles</answer>", "Beatles", 1.0),
    ],
)
def test_exact_answers(answer: str, truth: Any, score: float) -> None:
    for source in ("searchR1_nq", "rule/exact_answer"):
        result = default_compute_score(source, answer, truth)
        assert (result["score"], result["acc"]) == (score, float(score > 0))


@pytest.mark.parametrize("truth", [None, [], [3], {"target": None}, "", [" "]])
def test_no_right_answer_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match="a text, a list of texts"):
        mark("exact_answer", "<answer>3</answer>", truth)


# ------------------------------------------------------------------------ exact match, GSM8K, MATH, reasoning-gym


@pytest.mark.parametrize(
    ("sources", "answer", "truth", "expected"),
        ("openai/gsm8k", "#### ,", "", 0.0),
    [
        ("verl_lite/sort exact_match/mine", "1234", "1234", 1.0),
        ("verl_lite/sort exact_match/mine", " 1234\n", "1234", 1.0),
        ("verl_lite/sort exact_match/mine", "1243", "1234", 0.0),
        ("verl_lite/sort exact_match/mine", "", "1", 0.0),
        ("verl_lite/sort exact_match/mine", "7", 7, 1.0),
        ("openai/gsm8k", "He has 70+2 = 72. #### 72", "72", 1.0),
        ("openai/gsm8k", "#### 72.", "72", 0.0),  # verl's strict rule
        ("openai/gsm8k", "####72", "72", 0.0),
        ("openai/gsm8k", "#### $72", "72", 0.0),
        ("openai/gsm8k", "first #### 5 then #### 6", "6", 1.0),
        ("openai/gsm8k", "#### 72" + " " * 300, "72", 0.0),  # further than 300 characters from the end
        ("lighteval/MATH numina_cn_k12", r"thus \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("lighteval/MATH numina_cn_k12", r"\boxed{3} no, \boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        ("lighteval/MATH numina_cn_k12", r"\boxed{x^2+2x+1}", r"(x+1)^2", 1.0),
        ("lighteval/MATH numina_cn_k12", "I do not know", "4", 0.0),
        ("lighteval/MATH numina_cn_k12", "The final answer is $12$.", "12", 1.0),
    ],
)
def test_answers_of_data_sources(sources: str, answer: str, truth: object, expected: float) -> None:
    for source in sources.split():
        score, extra = read_score(default_compute_score(source, answer, truth))
        assert (score, "pred" in extra) == (expected, "MATH" in sources)


def test_math_ground_truth_that_is_no_expression_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="ground_truth=''"):
        default_compute_score("lighteval/MATH", r"\boxed{1}", "")


def test_reasoning_gym_scores_with_the_entry() -> None:
    entry = {"question": "4 - 1 - 7 =", "answer": "-4", "metadata": {}}
    extra_info = {"entry": json.dumps(entry)}
    assert default_compute_score("reasoning_gym/chain_sum", " -4\n", "-4", extra_info) == 1.0
    assert default_compute_score("reasoning_gym/chain_sum", "17", "-4", extra_info) < 0.5


def test_part_marks_count_as_nothing_where_only_full_marks_do() -> None:
    entry = {"question": "Spell this word backward (example: sun -> nus): crane", "answer": "enarc"}
    extra_info = {"entry": json.dumps(entry | {"metadata": {"word": "crane"}})}
    assert 0 < default_compute_score("reasoning_gym/spell_backward", "enarx", "enarc", extra_info) < 1
    strict = extra_info | {"full_marks_only": True}
    assert default_compute_score("reasoning_gym/spell_backward", "enarx", "enarc", strict) == 0
    assert default_compute_score("reasoning_gym/spell_backward", "enarc", "enarc", strict) == 1


def test_rewards_never_import_torch() -> None:
    code = (
        "import sys, verl_lite.rewards as r, workers.rewards.pool\n"
        "call = lambda s, e=None: r.default_compute_score(s, '1', '1', e)\n"
        "call('verl_lite/sort'), call('openai/gsm8k'), call('lighteval/MATH')\n"
        "call('reasoning_gym/chain_sum', {'entry': '{\"answer\": \"1\"}'})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
