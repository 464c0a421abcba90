"""The built-in reward functions against answers marked by hand."""

import json
import subprocess
import sys

import pytest

from verl_lite.rewards import default_compute_score, rules
from verl_lite.rewards.rules import extract_number


def score(data_source: str, answer: str, truth: object, extra_info: dict | None = None) -> object:
    return default_compute_score(
        data_source=data_source, solution_str=answer, ground_truth=truth, extra_info=extra_info
    )


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [("1234", "1234", 1.0), (" 1234\n", "1234", 1.0), ("1243", "1234", 0.0), ("", "1", 0.0), ("7", 7, 1.0)],
)
@pytest.mark.parametrize("source", ["verl_lite/sort", "exact_match/mine"])
def test_exact_match(source: str, answer: str, truth: object, expected: float) -> None:
    assert score(source, answer, truth) == expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("He has 70+2 = 72. #### 72", "72", 1.0),
        ("#### 72.", "72", 0.0),  # verl's strict rule
        ("####72", "72", 0.0),
        ("#### $72", "72", 0.0),
        ("first #### 5 then #### 6", "6", 1.0),
        ("The answer is 72", "72", 0.0),
        ("#### 72" + " " * 300, "72", 0.0),  # further than 300 characters from the end
    ],
)
def test_gsm8k(answer: str, truth: str, expected: float) -> None:
    assert score("openai/gsm8k", answer, truth) == expected


def test_the_lenient_rule_has_its_own_name() -> None:
    for answer in ("#### 72", "#### 72.", "####72", "#### $72", "#### 7,2"):
        assert score("rule/gsm8k_lenient", answer, "72") == 1.0
    assert score("rule/gsm8k_lenient", "72", "72") == 0.0
    assert extract_number("so #### $12,345.50.") == "12345.50"
    assert extract_number("so 12") is None


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        (r"thus \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{3} no, \boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{x^2+2x+1}", r"(x+1)^2", 1.0),
        ("I do not know", "4", 0.0),
        ("The final answer is $12$.", "12", 1.0),
    ],
)
@pytest.mark.parametrize("source", ["lighteval/MATH", "numina_cn_k12"])
def test_math(source: str, answer: str, truth: str, expected: float) -> None:
    result = score(source, answer, truth)
    assert isinstance(result, dict) and result["score"] == expected and isinstance(result["pred"], str)


def test_math_ground_truth_that_is_no_expression_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="ground_truth=''"):
        score("lighteval/MATH", r"\boxed{1}", "")


def test_reasoning_gym_scores_with_the_entry() -> None:
    entry = {"question": "4 - 1 - 7 =", "answer": "-4", "metadata": {}}
    extra_info = {"entry": json.dumps(entry)}
    assert score("reasoning_gym/chain_sum", " -4\n", "-4", extra_info) == 1.0
    assert score("reasoning_gym/chain_sum", "17", "-4", extra_info) < 0.5


def test_part_marks_count_as_nothing_where_only_full_marks_do() -> None:
    entry = {"question": "Spell this word backward (example: sun -> nus): crane", "answer": "enarc"}
    extra_info = {"entry": json.dumps(entry | {"metadata": {"word": "crane"}})}
    assert 0 < score("reasoning_gym/spell_backward", "enarx", "enarc", extra_info) < 1
    strict = extra_info | {"full_marks_only": True}
    assert score("reasoning_gym/spell_backward", "enarx", "enarc", strict) == 0
    assert score("reasoning_gym/spell_backward", "enarc", "enarc", strict) == 1


def test_reasoning_gym_errors_name_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"extra_info\['entry'\]"):
        rules.reasoning_gym("reasoning_gym/chain_sum", "1", "1", {})
    with pytest.raises(ValueError, match="nonsense"):
        rules.reasoning_gym("reasoning_gym/nonsense", "1", "1", {"entry": "{}"})


def test_rewards_never_import_torch() -> None:
    code = (
        "import sys, verl_lite.rewards as r, workers.rewards.pool\n"
        "call = lambda s, e=None: r.default_compute_score(s, '1', '1', e)\n"
        "call('verl_lite/sort'), call('openai/gsm8k'), call('lighteval/MATH')\n"
        "call('reasoning_gym/chain_sum', {'entry': '{\"answer\": \"1\"}'})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
