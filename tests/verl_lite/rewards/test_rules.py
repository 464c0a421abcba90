r"""The rules that answers are marked by without a model, against answers marked by hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_lite.rewards import default_compute_score, mathematics, read_score


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
        # several letters, of which the right one is the first
        (r"\boxed{B or C}", None),
        (r"\boxed{B \text{ or } C}", None),
        (r"\boxed{\text{B and C}}", None),
        (r"\boxed{(B), (C)}", None),
        (r"\boxed{(B)(C)(D)}", None),
        (r"\boxed{B) C) D)}", None),
        (r"\boxed{B C}", None),
        ("Answer: B, C", None),
        ("Answer: (B) or (C)", None),
        ("Answer: **B**, **C** and **D**", None),
        ("Answer: B) C) D)", None),
        ("Answer: B; D.", None),
        ("<answer>B, C</answer>", None),
        # one letter, and the text of its choice
        (r"\boxed{B. C}", "B"),
        (r"\boxed{B. Vitamin A or C}", "B"),
        (r"\boxed{B: A and C are true}", "B"),
        ("Answer: B, A is wrong", "B"),
        ("Answer: B. A, C and D are wrong", "B"),
        ("Answer: B) C", "B"),
        ("Answer: B\nC is wrong", "B"),
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
    with pytest.raises(ValueError, match="expected one of the letters A, B, C, D, or"):
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
        with pytest.raises(ValueError, match="expected different names"):
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
        ("Answer: feet", "degrees", "feet", False),  # units alone are not taken away
        ("Answer: degrees", "degrees", "degrees", True),
        ("Answer:  ", "", "", False),
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


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("<answer>The Beatles!</answer>", "beatles", 1.0),
        ("<answer> a  beatle,s </answer>", {"target": ["x", "Beatles"]}, 1.0),
        ("<answer>x</answer> no <answer>Beatles</answer>", ["Beatles"], 1.0),
        ("The Beatles", "Beatles", 0.0),
        ("<answer>x</answer>" * 10 + "<answer>Beatles</answer>", "Beatles", 0.25),
        ("<answer>x</answer>" * 9 + "<answer>Beatles</answer>", "Beatles", 1.0),
        *(("<answer></answer>", truth, 0.0) for truth in ("A", "The", "!!!", ["", "A"])),
        ("<answer>the</answer>", "A", 0.0),
        ("<answer>(a)</answer>", "A", 1.0),
        ("<answer>The</answer>", "The", 1.0),
        ("<answer>?!</answer>", "!!!", 0.0),
        ("<answer> !!!</answer>", "!!!", 1.0),
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
        ("openai/gsm8k", "#### ,", "", 0.0),
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


@pytest.mark.parametrize("truth", ["", "9^{9^9}", "7" * 2001, "(" * 11 + "7" + ")" * 11])
def test_math_ground_truth_that_cannot_be_compared_is_an_error_not_a_zero(truth: str) -> None:
    with pytest.raises(ValueError, match="ground_truth="):
        default_compute_score("lighteval/MATH", r"\boxed{1}", truth)


FORMS = r"""
7 | 7; 7.0; $7$; \(7\); x=7; f(3)=7; 7 cm; 7 \text{ cm}^2; 7\%; 7^\circ; 7 degrees; \$7 | 3=7; \ge 7; 700\%; 3+4; 14/2
7 | \mathbf{7} | \frac{14}{2}; \log_2 128; \sqrt{49}; x=3+4; x=3+4=7; x=3=7; 2x=14; \gcd(7, 14); |-7|; \int_0^7 1 dx
56088 | 56{,}088; 56,088; x=56088 | 123 \cdot 456; 123 \times 456; 56087+1; 2^3 \cdot 7011
5050 | 5050 | \sum_{n=1}^{100} n; \frac{100 \cdot 101}{2}; \binom{101}{2}; \dbinom{101}{2}
120 | 120 | \binom{10}{3}; 5!; 2^7-8
1024 | 1024 | 2^{10}; (2^5)^2
2^{10} | 1024; 2^{10}; 4^5 | 2 \cdot 512
\binom{10}{3} | 120; \binom{10}{7} | 4 \cdot 30
3000000 | 3 \times 10^6; 3{,}000{,}000 | 3 \times 1000^2
\frac{1}{2} | 0.5; 1/2; \frac12; \frac{2}{4}; x=\frac{1}{2} | 1-\frac{1}{2}; \frac{1}{4} \cdot 2; \sin(\frac{\pi}{6})
-\frac{3}{4} | -3/4; \frac{-3}{4}; -0.75 | \frac{3}{4}
2\frac{1}{2} | 2.5; \frac{5}{2} | 2+\frac{1}{2}
2\sqrt{3} | 2\sqrt{3}; \sqrt{12}; 2\sqrt3 | \sqrt{4}\sqrt{3}
\frac{1+\sqrt{5}}{2} | \frac{1+\sqrt5}{2}; \frac12+\frac{\sqrt5}{2} | \frac{1+\sqrt{2+3}}{2}
\frac{\pi}{4} | \pi/4; \frac{1}{4}\pi | \arctan 1
\ln 2 | \ln 2; \frac{\ln 4}{2} | \ln 3
5\% | 5\%; 5; 5 percent | 0.05; 500
x^2+1 | x^2+1; 1+x^2; f(x)=x^2+1 | x^2-1
(x+1)^2 | x^2+2x+1 | \int (2x+2) dx
x=5 | x=5; 5 | y=5; 2x+1=11; x=2+3
x>3 | x>3; 3<x; (3,\infty) | x+1>4; x \ge 3
y=2x+1 | y=2x+1; 2x-y+1=0 | y=2x
(1,2) | (1,2); 1,2 | (2,1)
\{1,2\} | \{2,1\}; 1,2; 1 \text{ and } 2; x=1, x=2 | \{1,3-1\}
[0,1) | [0,1) | (0,1)
\text{east} | east; \text{East}; \mathrm{east} | seat; \text{seat}
east | east; \text{east} | seat; e a s t s
\text{(B)} | B; (B) | C
"""
PAIRS = [
    (truth, answer, index == 0)
    for line in FORMS.strip().splitlines()
    for truth, *columns in [re.split(r" \| ", line)]
    for index, column in enumerate(columns)
    for answer in column.split("; ")
]


@pytest.mark.parametrize(("truth", "answer", "right"), PAIRS)
def test_an_expression_has_to_be_in_its_final_form(truth: str, answer: str, right: bool) -> None:
    assert mark("math_verify", f"So it is \\boxed{{{answer}}}.", truth)["score"] == right


@pytest.mark.parametrize(
    ("truth", "answer"),
    [("56088", r"123 \cdot 456"), ("120", r"\binom{10}{3}"), ("7", "3=7"), ("7", r"\ge 7"), ("7", r"700\%")],
)
def test_any_equal_form_is_right_without_strict(truth: str, answer: str) -> None:
    assert mark("math_verify", f"\\boxed{{{answer}}}", truth, strict=False)["score"] == 1


HUGE = [
    "9^{9^{9^{9}}}", "99999999!", "9**9**9**9", "((9!)!)!", r"\sum_{n=1}^{10^9} n", "(x+y+z+w)^{200}",
    r"\sin(10^{10^8})", r"e^{10^{10}}", r"[9^{9^9}, 3)", r"9^{9^9} < x < 3", ",".join(map(str, range(20_000))),
    "(" * 20_000 + "7" + ")" * 20_000,
    r"\cup".join(f"({n},{n + 1})" for n in range(0, 800, 2)), r"\frac{1}{" * 3000 + "7" + "}" * 3000,
]  # fmt: skip


@pytest.mark.parametrize("strict", [True, False])
def test_an_answer_that_is_too_large_is_wrong_and_is_not_evaluated(strict: bool) -> None:
    mark("math_verify", r"\boxed{7}", "7")
    before = mathematics._process(os.getpid())
    for answer in HUGE:
        assert mark("math_verify", f"\\boxed{{{answer}}}", "7", strict=strict)["score"] == 0, answer
    assert mathematics._process(os.getpid()) is before, "the process was killed"


@pytest.mark.parametrize(("truth", "answer"), [(r"\log_2 3", "10^{30}"), (r"\log_2 3", "1e-999"), (r"\ln 5", "1e99")])
def test_a_number_of_another_size_is_wrong_without_being_simplified(truth: str, answer: str) -> None:
    mark("math_verify", r"\boxed{7}", "7")
    before = mathematics._process(os.getpid())
    assert mark("math_verify", f"\\boxed{{{answer}}}", truth)["score"] == 0
    assert mathematics._process(os.getpid()) is before, "the process was killed"


@pytest.mark.slow
def test_an_answer_that_takes_too_long_is_wrong_in_any_thread() -> None:
    """A failure would be masked, and a policy can learn to bring that about."""
    with ThreadPoolExecutor(1) as threads:
        for answer in (r"\binom{10^9}{5e8}", "x^" * 300 + "2"):
            slow = threads.submit(mark, "math_verify", f"\\boxed{{{answer}}}", "7", strict=False)
            assert slow.result(timeout=60) == {"score": 0, "pred": answer}
    assert mark("math_verify", r"\boxed{7}", "7")["score"] == 1


def test_a_fault_of_the_comparison_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "_reply", lambda request: ["null\n", '[false, "", "Traceback: no sympy"]'])
    with pytest.raises(RuntimeError, match="no sympy"):
        mark("math_verify", r"\boxed{7}", "7")


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


@pytest.mark.parametrize(
    ("task", "right", "metadata", "hostile"),
    [
        ("prime_factorization", "2 × 3", {}, "two and three"),
        ("coin_flip", "0.5", {}, "1e400"),
        ("game_of_life", "[[0, 1], [1, 0]]", {}, "{}"),
    ],
)
def test_an_answer_for_which_the_scorer_raises_is_wrong(
    task: str, right: str, metadata: dict[str, Any], hostile: str
) -> None:
    extra_info = {"entry": json.dumps({"question": "?", "answer": right, "metadata": metadata})}
    assert default_compute_score(f"reasoning_gym/{task}", right, right, extra_info) == 1
    assert default_compute_score(f"reasoning_gym/{task}", hostile, right, extra_info) == 0


def test_an_answer_that_fools_the_scorer_is_wrong() -> None:
    extra_info = {"entry": json.dumps({"question": "?", "answer": "5*6*1 - 6", "metadata": {}})}
    assert default_compute_score("reasoning_gym/puzzle24", "4*6*1*1", "", extra_info) == 0
    assert default_compute_score("reasoning_gym/puzzle24", "6*5*1-6", "", extra_info) == 1


def test_an_entry_for_which_the_scorer_raises_is_a_failure() -> None:
    extra_info = {"entry": json.dumps({"question": "?", "answer": "six", "metadata": {}})}
    with pytest.raises(ValueError, match="invalid literal for int"):
        default_compute_score("reasoning_gym/prime_factorization", "2 × 3", "six", extra_info)


def test_rewards_never_import_torch() -> None:
    code = (
        "import sys, verl_lite.rewards as r, workers.rewards.reward_pool\n"
        "call = lambda s, e=None: r.default_compute_score(s, '1', '1', e)\n"
        "call('verl_lite/sort'), call('openai/gsm8k'), call('lighteval/MATH')\n"
        "call('reasoning_gym/chain_sum', {'entry': '{\"answer\": \"1\"}'})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
