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
        ("1. So:\n   ```python\n   if a:\n       b = 2\n   ```\n2. Done", "if a:\n    b = 2\n"),
        ("- ```python\n  a = 1\n\n  b = 2\n  ```", "a = 1\n\nb = 2\n"),
        ("- a\n    - ```py\n      a = 1\n      ```", "a = 1\n"),
        ("\t```python\n\tif a:\n\t\tb = 2\n\t```", "if a:\n\tb = 2\n"),
        ("```python\n    if a:\n        b = 2\n```", "if a:\n    b = 2\n"),
        ('  ```python\n  a = """\ntext\n  """\n  ```', 'a = """\ntext\n"""\n'),
        ("> ```python\n> if a:\n>     b = 2\n> ```", "if a:\n    b = 2\n"),
        ("    a = 1\n    b = 2", "a = 1\nb = 2"),
        ("~~~python\na = 1\n```\n~~~", "a = 1\n```\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("```py\na = 1\n```", "a = 1\n"),
        ("```python3.11 title=x\na = 1\n```", "a = 1\n"),
        ("```{python}\na = 1\n```", "a = 1\n"),
        ("```{.python .numberLines}\na = 1\n```", "a = 1\n"),
        ("``` python\na = 1\n```", "a = 1\n"),
        ("```python\r\na = 1\r\nb = 2\r\n```\r\n", "a = 1\nb = 2\n"),
        ("```\na = 1\n```\n```text\n1\n```", "a = 1\n"),
        ("```java\na\n```\n```\nb = 1\n```", "b = 1\n"),
        ("Write ```a``` as:\n```python\na = 1\n```", "a = 1\n"),
        ("```python\na = 1\n```\n```python\nb = ", "b = "),
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
        ("2.0", "2", True),
        ("2", "2.0", True),
        ("2.0000000001", "2", True),
        ("2.00001", "2", False),
        ("2000000.5", "2000000", False),
        ("2000000", "2000000.5", False),
        ("1e5", "100000", True),
        ("100000", "1e+05", True),
        ("1000000000000000000000000000001.0", "1000000000000000000000000000000", False),
        ("1000000000000000000000000000000.0", "1000000000000000000000000000000", True),
        ("12345678901234567891", "12345678901234567890", False),
        ("007", "7", False),
        ("+7", "7", False),
        ("1e999", "2e999", False),
        ("1e99999999999999999999", "7", False),
        ("inf", "inf", True),
        ("nan", "0.0", False),
        ("٢.0", "2", False),
        ("2_0.0", "20", False),
        ("True", "true", False),
        ("a 2.0", "a 2", True),
        ("b 2.0", "a 2", False),
        ("1\r\n2\r\n", "1\n2", True),
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
        (2.0, 2, True),
        (2, 2.0, True),
        (2.0000000001, 2, True),
        (2, 2.0000000001, True),
        (2000000.5, 2000000, False),
        (2000000, 2000000.5, False),
        ([1.0, (2, 0.1 + 0.2)], [1, [2.0, 0.3]], True),
        (True, 1, True),
        (None, None, True),
        (None, 0, False),
        ("", None, False),
        ("2", "2.0", False),
        (float("nan"), 0.0, False),
        (float("inf"), 1e308, False),
        (10**5000, 10**5000, True),
        (10**5000 + 1, 10**5000, False),
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


LEETCODE = """class Solution:
    def twoSum(self, nums: List[int], target: int) -> Optional[List[int]]:
        queue, seen = deque(nums), defaultdict(list)
        assert math.sqrt(4) == sqrt(4) == 2 and inf > 1 and gcd(4, 6) == 2 and reduce(operator.add, nums) == sum(nums)
        for place, number in enumerate(queue):
            if seen[target - number]:
                return [seen[target - number][0], place]
            seen[number].append(place)
"""


def test_answers_can_use_the_usual_modules_without_importing_them() -> None:
    calls = {"inputs": [[[2, 7, 11], 9]], "outputs": [[0, 1]], "fn_name": "twoSum"}
    assert score(LEETCODE, calls)["score"] == 1.0
    assert score(LEETCODE, ["assert Solution().twoSum([2, 7, 11], 9) == [0, 1]"])["score"] == 1.0
    script = "count = Counter(sys.stdin.read().split())\nheap = [3]\nheappush(heap, 1)\nprint(heap[0], *sorted(count))"
    assert score(script, {"inputs": ["b a b"], "outputs": ["1 a b"]})["score"] == 1.0


def test_names_of_modules_are_neither_names_of_the_answer_nor_replace_its_own_and_the_builtins() -> None:
    """`math` and `operator` have a `pow`, and `math` has an `sqrt`, which is not the answer's."""
    assert score("def f(x): return pow(x, 2, 5)", ["assert f(3) == 4"])["score"] == 1.0
    assert score("def sqrt(x): return 0\ndef f(x): return sqrt(x)", ["assert f(4) == 0"])["score"] == 1.0
    assert score("x = 1", {"inputs": [[4]], "outputs": [2], "fn_name": "sqrt"})["score"] == 0.0
    assert "sqrt" in score("x = 1", ["assert sqrt(4) == 2"])["error"]


def test_integers_of_thousands_of_digits() -> None:
    """Python converts at most 4300 digits by default. 10**5000 has 5001."""
    digits = "1" + "0" * 5000
    assert score("print(int(input()) + 0)", {"inputs": [digits], "outputs": [digits]})["score"] == 1.0
    calls = f'{{"inputs": [[{digits}]], "outputs": [{digits}], "fn_name": "f"}}'
    assert score("def f(x): return x", calls)["score"] == 1.0
    assert score("def f(x): return x + 1", calls)["score"] == 0.0
    assert score(f"def f(x): return len(str(x + {digits}))", {"inputs": [[1]], "outputs": [5001], "fn_name": "f"})[
        "acc"
    ]
    assert score("def f(x): return str(10**x)", ["assert f(5000) == str(10**5000)"])["score"] == 1.0


def test_a_conversion_of_millions_of_digits_exceeds_the_time_limit() -> None:
    result = score("print(str(int(10) ** 20_000_000)[0])", PAIRS, timeout_s=0.5)
    assert (result["score"], result["timeouts"]) == (0.0, 1.0)


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
        assert [results[key].score for key in answers] == [1.0, 0.5, 0.0, 0.0], results
        assert not any(result.failed for result in results.values()) and results[3].extra["timeouts"] == 2.0
        assert pool.processes_replaced() == 0
        below = set(psutil.Process().children(recursive=True)) - before
    finally:
        pool.close()
    _, alive = psutil.wait_procs(list(below), timeout=5)
    assert below and not alive
