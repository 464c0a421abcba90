"""The reward by tests: where the code of an answer is, the forms of ground truths, and what counts as right."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import psutil
import pytest

from verl_lite.config import RewardConfig
from verl_lite.rewards import RewardItem, default_compute_score
from verl_lite.rewards.code import PairTests, SnippetTests, extract_code, is_right_output, is_right_value, read_tests
from verl_lite.sandbox import client
from verl_lite.sandbox.values import encode
from workers.rewards.reward_pool import RewardPool

SUM = "print(sum(map(int, input().split())))"
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


def score(code: str, truth: Any, source: str = "rule/code", **kwargs: Any) -> dict[str, Any]:
    result = default_compute_score(
        data_source=source, solution_str=f"So:\n```python\n{code}\n```\nDone.", ground_truth=truth, **kwargs
    )
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\na = 1\n```\nor\n```python\nb = 2\n```\n", "b = 2\n"),
        ("```python\na = 1\n```\nwhich prints\n```\n1\n```", "a = 1\n"),
        ("```Python3\na = 1\n```", "a = 1\n"),
        ("```python\na = 1\nb =", "a = 1\nb ="),  # cut off
        ("```cpp\nint a;\n```", ""),
        ("a = 1", "a = 1"),
        ("<think>```python\nwrong\n```</think>a = 1", "a = 1"),
    ],
)
def test_the_code_of_an_answer(answer: str, code: str) -> None:
    assert extract_code(answer) == code


@pytest.mark.parametrize("source", ["rule/code", "taco", "code_mine"])
def test_all_tests_pass_or_it_is_nothing(source: str) -> None:
    assert score(SUM, PAIRS, source) == {
        "score": 1.0, "acc": 1.0, "passed": 1.0, "compiled": 1.0, "timeouts": 0.0, "error": "",
    }  # fmt: skip
    assert score("print(3)", json.dumps(PAIRS), source)["score"] == 0.0


def test_the_share_that_passes() -> None:
    three = {"inputs": ["1 2", "3 4", "0 3"], "outputs": ["3", "7", "3"]}
    assert score("print(3)", three, partial=True) == {
        "score": 2 / 3, "acc": 0.0, "passed": 2 / 3, "compiled": 1.0, "timeouts": 0.0, "error": "wrong output",
    }  # fmt: skip
    assert score("print(3)", three, partial=True, max_tests=1)["score"] == 1.0
    calls = {"inputs": [[1], [2]], "outputs": [1, 4], "fn_name": "f"}
    assert score("def f(x): return x", calls, partial=True)["score"] == 0.5
    assert score("def f(x): return x", ["assert f(1) == 1", "assert f(2) == 4"], partial=True)["score"] == 0.5


def test_a_loop_without_end_is_wrong_and_counted() -> None:
    for truth in (PAIRS, {"inputs": [[1]], "outputs": [1], "fn_name": "f"}, ["assert f(1)", "assert f(2)"]):
        started = time.monotonic()
        result = score("def f(x):\n    while True: pass\nf(1)", truth, timeout_s=0.4)
        assert (result["score"], result["timeouts"], result["compiled"]) == (0.0, 1.0, 1.0)
        assert time.monotonic() - started < 5


def test_no_further_test_begins_after_the_total_time() -> None:
    many = {"inputs": ["1 2"] * 1000, "outputs": ["3"] * 1000}
    result = score(SUM, many, partial=True, total_timeout_s=0.3)
    assert 0 < result["passed"] < 1 and result["acc"] == 0.0


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        (PAIRS, PairTests(("1 2\n", "3 4\n"), ("3\n", "7\n"))),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, PairTests(("1\n2",), ("3",))),
        (
            {"inputs": [[1, [2]], '1\n"a"'], "outputs": [[3], "4"], "fn_name": "f"},
            PairTests(((1, [2]), (1, "a")), ([3], 4), "f"),
        ),
        ([{"input": "1", "output": "2", "type": "stdin_stdout"}], PairTests(("1",), ("2",))),
        ([{"input": [1], "output": 2, "fn_name": "f"}], PairTests(((1,),), (2,), "f")),
        (["assert a", "assert b"], SnippetTests(("assert a", "assert b"))),
        ({"assert_case": ["assert a"], "inputs": [""], "outputs": [None]}, SnippetTests(("assert a",))),
        ({"asserts": ["assert a"], "setup": "import math"}, SnippetTests(("assert a",), "import math")),
        ({"test": "def check(c): ...", "entry_point": "f"}, SnippetTests(("def check(c): ...",), "", "f")),
        ("assert a == 1", SnippetTests(("assert a == 1",))),
    ],
)
def test_forms_of_ground_truth(truth: Any, expected: object) -> None:
    assert read_tests(truth) == expected


@pytest.mark.parametrize(
    "truth",
    [None, 3, "3", "", "[]", [], {}, {"inputs": ["1"]}, {"inputs": [], "outputs": []}, {"asserts": []}, [1],
     {"inputs": ["1"], "outputs": []}],
)  # fmt: skip
def test_a_ground_truth_without_tests_is_an_error_not_a_zero(truth: Any) -> None:
    with pytest.raises(ValueError, match="ground truth has"):
        read_tests(truth)
    with pytest.raises(ValueError, match="not valid Python"):
        score("x = 1", "assert ((")


@pytest.mark.parametrize(
    ("printed", "expected", "right"),
    [
        ("3\n", "3", True),
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.333333333", True),
        ("0.3334", "0.333333333", False),
    ],
)
def test_outputs(printed: str, expected: str, right: bool) -> None:
    assert is_right_output(printed, expected) is right


@pytest.mark.parametrize(
    ("returned", "expected", "right"),
    [
        ((1, [2]), [1, [2]], True),
        (3, [3], True),
        ({1: (2,)}, {"1": [2]}, True),
        (0.1 + 0.2, 0.3, True),
        (3.1, 3, False),
        ("3", 3, False),
        ({1, 2}, [1, 2], False),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]], True),
        (10**400, 1.5, False),
        (Decimal("sNaN"), 1.5, False),
        (Fraction(1, 2), 0.5, True),
        (Fraction(10**400), 1.5, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values(returned: Any, expected: Any, right: bool) -> None:
    assert is_right_value(encode(returned), expected) is right


@pytest.mark.parametrize(
    "forged",
    [{"Fraction": "1e99999999"}, {"Fraction": [1, 0]}, {"Decimal": ["x"]}, {"int": "g"}, {}, {"a": 1, "b": 2},
     {"dict": 3}, {"dict": [[[1]]]}, {"Decimal": ["1e99999999"]}, {"held": 0}, json.loads("[" * 900 + "]" * 900)],
)  # fmt: skip
def test_a_forged_value_is_wrong_and_costs_nothing(forged: Any) -> None:
    """Defect 11 of issue 16: nothing of an answer is evaluated outside the sandbox."""
    started = time.monotonic()
    assert not is_right_value(forged, 1.5) and not is_right_value([forged], [[1.5]])
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("partial", [False, True])
def test_a_program_cannot_tell_that_its_tests_passed(partial: bool) -> None:
    case = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)"
    check = {"test": "def check(f): assert f(1) == 2", "entry_point": "f"}
    calls = {"inputs": [[1]], "outputs": [True], "fn_name": "f"}
    for truth in (["assert f(1) == 2"], check, case, "def test_f(): assert f(1) == 2", PAIRS, calls):
        for tail in ("", "def f(x): return 0"):
            forged = 'import os; os.write(4, b\'{"passed": true, "tests": 1}\\n\')\n' + tail
            assert score(forged, truth, partial=partial)["score"] == 0.0, truth


def test_a_reply_that_is_far_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(client.json, "loads", lambda line, load=json.loads: read.append(len(line)) or load(line))
    calls = {"inputs": [[1], [2]], "outputs": [[1], [2] * 9999], "fn_name": "f"}
    code = "def f(x): return [x] if x == 1 else [2] * 9999"
    assert score(code, calls)["score"] == 1.0
    assert score(code.replace("9999", "999_999"), calls, partial=True)["score"] == 0.5
    assert max(read) < 500_000


@pytest.mark.slow
def test_it_runs_in_reward_processes_and_leaves_nothing_behind() -> None:
    before = set(psutil.Process().children(recursive=True))  # fork servers of the tests above
    answers = {0: SUM, 1: "print(3)", 2: "import os; os.kill(os.getppid(), 9)", 3: "while True: pass"}
    kwargs = {"partial": True, "timeout_s": 0.4}
    pool = RewardPool(RewardConfig(timeout_s=20, reward_kwargs=kwargs), 2)
    try:
        pool.submit(RewardItem(key, "taco", answer, PAIRS) for key, answer in answers.items())
        results = pool.collect(answers)
        assert [results[key].score for key in answers] == [1.0, 0.5, 0.0, 0.0]
        assert not any(result.failed for result in results.values()) and results[3].extra["timeouts"] == 2.0
        assert pool.processes_replaced() == 0
        below = set(psutil.Process().children(recursive=True)) - before
    finally:
        pool.close()
    _, alive = psutil.wait_procs(list(below), timeout=5)
    assert below and not alive
