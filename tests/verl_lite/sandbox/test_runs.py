"""Scripts, functions and snippets of tests in the sandbox: what counts as passed, and how an answer tries to cheat."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verl_lite.sandbox import Limits, Sandbox
from verl_lite.sandbox.runs import Functions, SnippetOutcomes, run_script, run_snippets

ADD = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    found = Sandbox(Limits(cpu_s=2, wall_s=4, memory_mb=512))
    yield found
    found.close()


def snippets(sandbox: Sandbox, code: str, tests: list[str], **options: str) -> SnippetOutcomes:
    return run_snippets(sandbox, code, tests, **options)


def passes(sandbox: Sandbox, code: str, test: str) -> bool:
    outcomes = snippets(sandbox, code, [test])
    assert not outcomes.broken and outcomes.count == 1
    return outcomes.passed == (True,)


# ------------------------------------------------------------------------------------------------------------- scripts


def test_a_script_reads_and_prints(sandbox: Sandbox) -> None:
    assert run_script(sandbox, "print(sum(map(int, input().split())))", "1 2\n").value == "3\n"
    assert (
        run_script(sandbox, "import sys\nfor line in sys.stdin: print(line[::-1].strip())", "ab\ncd").value
        == "ba\ndc\n"
    )
    main = "def main():\n    print(__name__)\nif __name__ == '__main__':\n    main()"
    assert run_script(sandbox, main, "").value == "__main__\n"
    big = "x" * 3_000_000
    assert run_script(sandbox, "print(len(input()))", big).value == "3000000\n"
    assert run_script(sandbox, "print(1)", big).value == "1\n"  # it need not read


def test_a_script_that_fails(sandbox: Sandbox) -> None:
    assert run_script(sandbox, "print(1", "").is_compiled is False
    for code, error in (("1/0", "ZeroDivisionError"), ("import os; os._exit(3)", "exit code 3"), ("exit(2)", "code 2")):
        outcome = run_script(sandbox, "print(1);" + code, "")
        assert outcome.is_compiled and outcome.value is None and error in outcome.error


# ----------------------------------------------------------------------------------------------------------- functions


def test_functions_are_called_with_plain_values(sandbox: Sandbox) -> None:
    functions = Functions(sandbox, "def f(a, b=None): return [a, b, (1, 2.5), {1: None}, {3}, 1 << 99999]")
    assert functions.call("f", ["x", {"k": [True]}]).value == ["x", {"k": [True]}, (1, 2.5), {1: None}, {3}, 1 << 99999]
    assert "TypeError" in functions.call("f", []).error
    assert "KeyError" in functions.call("g", []).error
    assert "no plain value" in Functions(sandbox, "def f(): return object()").call("f", []).error
    functions.close()


def test_each_test_has_its_own_clock(sandbox: Sandbox) -> None:
    seen = "import resource\nlimit = resource.getrlimit(resource.RLIMIT_CPU)[0]\n"
    assert run_script(sandbox, f"{seen}print(limit)", "").value == "3\n"  # the kernel's, behind the parent's 2 s
    functions = Functions(sandbox, f"{seen}def f(): return limit")
    assert functions.call("f", []).value >= 600
    functions.close()


def test_a_method_of_solution(sandbox: Sandbox) -> None:
    code = "class Solution:\n    n = 0\n    def f(self, x):\n        self.n += x\n        return self.n"
    functions = Functions(sandbox, code)
    assert [functions.call("f", [2]).value for _ in range(2)] == [2, 2]  # a fresh one for each call
    functions.close()


def test_functions_are_there_again_after_one_hung_or_died(sandbox: Sandbox) -> None:
    hasty = Sandbox(Limits(cpu_s=0.4, wall_s=0.8))
    functions = Functions(
        hasty, "def f(x):\n    while x == 1: pass\n    if x == 2: import os; os._exit(0)\n    return x"
    )
    outcomes = [functions.call("f", [x]) for x in (0, 1, 2, 3)]
    assert [outcome.value for outcome in outcomes] == [0, None, None, 3]
    assert [outcome.is_timeout for outcome in outcomes] == [False, True, False, False]
    functions.close()
    hasty.close()


@pytest.mark.parametrize(
    "code", ["import os; os._exit(0)", "raise SystemExit(0)", "while True: pass", "1/0", "def f(:"]
)
def test_code_that_does_not_come_to_its_functions(code: str) -> None:
    hasty = Sandbox(Limits(cpu_s=0.4, wall_s=0.8))
    functions = Functions(hasty, code)
    outcome = functions.call("f", [])
    assert outcome.value is None and outcome.error and outcome.is_compiled == (code != "def f(:")
    assert outcome.is_timeout == (code == "while True: pass")
    functions.close()
    hasty.close()


def test_forged_messages_are_no_values(sandbox: Sandbox) -> None:
    forge = """
import json, os
def say(message):
    body = json.dumps(message).encode()
    os.write(3, len(body).to_bytes(4, 'big') + body)
def f(kind):
    if kind == 0: say({'value': 3})  # the right answer cannot be known; a wrong one is wrong
    if kind == 1: say({'do': 'call', 'args': [{'import': ['os', 'system']}, 'touch /tmp/verl_lite-escaped']})
    if kind == 2: os.write(3, b'\\xff' * 4)
    if kind == 3: os.write(3, b'\\0\\0\\0\\2[]')
    if kind == 4: say({'value': {'object': 0}})
    if kind == 5: say({'value': {'fraction': '1/0'}})
    return 5
"""
    for kind in range(1, 6):
        functions = Functions(sandbox, forge)
        assert functions.call("f", [kind]).value is None, kind
        functions.close()


# ------------------------------------------------------------------------------------------------------------ snippets


def test_asserts_pass_and_fail_one_by_one(sandbox: Sandbox) -> None:
    assert snippets(sandbox, "def add(a, b): return a + b", ADD).passed == (True, True)
    outcomes = snippets(sandbox, "def add(a, b): return 3", ADD)
    assert outcomes.passed == (True, False) and "AssertionError" in outcomes.error
    early = run_snippets(sandbox, "def add(a, b): return 0", ADD, stop_early=True)
    assert early.passed == (False,) and early.count == 2
    assert snippets(
        sandbox, "def add(a, b): return a + b", ["assert near(add(1, 2))"], setup="near = (3).__eq__"
    ).passed


def test_the_tests_of_a_snippet_are_counted(sandbox: Sandbox) -> None:
    tests = """
import unittest
from solution import add
def test_right(): assert add(1, 2) == 3
def test_wrong(): assert add(1, 2) == 4
class TestAdd(unittest.TestCase):
    def setUp(self): self.three = 3
    def test_method(self): self.assertEqual(add(1, 2), self.three)
"""
    outcomes = snippets(sandbox, "def add(a, b): return a + b", [tests])
    assert sorted(outcomes.passed) == [False, True, True] and outcomes.count == 3


def test_a_check_with_an_entry_point(sandbox: Sandbox) -> None:
    test = (
        "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert abs(candidate([0.1, 0.2]) - 0.3) < 1e-6"
    )
    assert snippets(sandbox, "def total(x): return sum(x)", [test], call="total").passed == (True,)
    assert snippets(sandbox, "def total(x): return 3", [test], call="total").passed == (False,)
    assert snippets(sandbox, "x = 1", [test], call="total").passed == (False,)


STACK = """
class Empty(ValueError): pass
class Stack:
    limit = 3
    def __init__(self, *given): self.items = list(given)
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise Empty('nothing')
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
    def __add__(self, other): return Stack(*self.items, *other.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items
    def __getitem__(self, place): return self.items[place]
    def __enter__(self): return self
    def __exit__(self, *raised): self.items.clear()
    def __repr__(self): return f'Stack{self.items}'
    def __lt__(self, other): return len(self) < len(other)
def count(n):
    yield from range(n)
def sort(x): x.sort()
def twice(f, x): return f(f(x))
def walk(node):
    while node is not None:
        node.value *= 2
        node = node.next
import math
from collections import Counter
"""


@pytest.mark.parametrize(
    "test",
    [
        "s = Stack(); s.push(1); s.push('b'); assert len(s) == 2 and s.pop() == 'b' and s.items == [1]",
        "assert Stack(1) == Stack(1) and Stack(1) != Stack(2) and Stack() < Stack(1)",
        "assert list(Stack(1, 2) + Stack(3)) == [1, 2, 3] and 2 in Stack(1, 2) and Stack(4)[0] == 4",
        "with Stack(1) as s: pass\nassert not s and repr(s) == 'Stack[]' and Stack.limit == 3",
        "assert isinstance(Stack(), Stack) and not isinstance(3, Stack)",
        "try: Stack().pop()\nexcept Empty as e: assert str(e) == 'nothing'\nelse: assert False",
        "try: Stack().pop()\nexcept ValueError: pass\nelse: assert False",
        "s = Stack(); s.items = [5]; assert s.pop() == 5",
        "assert list(count(3)) == [0, 1, 2] and next(count(1)) == 0 and sum(count(4)) == 6",
        "x = [3, 1, 2]; sort(x); assert x == [1, 2, 3]",
        "assert twice(lambda x: x + 3, 1) == 7",
        "assert Counter('aab') == {'a': 2, 'b': 1} and math.floor(2.5) == 2",
        "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
        "head = Node(1, Node(2)); walk(head); assert (head.value, head.next.value) == (2, 4)",
        "import solution; assert solution.twice(str.upper, 'a') == 'A'",
    ],
)
def test_objects_of_the_answer_behave_as_if_they_were_here(sandbox: Sandbox, test: str) -> None:
    outcomes = snippets(sandbox, STACK, [test])
    assert outcomes.passed == (True,), outcomes.error


def test_tests_that_are_no_python_are_nobodys_fault(sandbox: Sandbox) -> None:
    assert "never closed" in snippets(sandbox, "x = 1", ["assert (1"]).broken


FRAMES = """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        frame.f_locals.update(passed=True)
        if "snippet" in frame.f_locals or "tests" in frame.f_locals: return a + b
        frame = frame.f_back
"""
MEMORY = """
import gc
def add(a, b):
    if any("assert add" in text for text in gc.get_objects() if isinstance(text, str)): return a + b
"""
FORGERY = """
import os
def add(a, b):
    message = b'{"passed": true, "error": ""}'
    for fd in range(3, 9):
        try: os.write(fd, len(message).to_bytes(4, 'big') + message)
        except OSError: pass
"""


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "def add(a, b): import os; os._exit(0)",
        "def add(a, b): raise SystemExit(0)",
        "class E:\n    def __eq__(self, o): return True\ndef add(a, b): return E()",
        "class E(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef add(a, b): return E()",
        "from unittest.mock import ANY\ndef add(a, b): return ANY",
        "import builtins\nbuiltins.AssertionError = type('Fine', (BaseException,), {})\ndef add(a, b): return 0",
        "import builtins\nbuiltins.print = builtins.isinstance = builtins.abs = lambda *a: 3\ndef add(a, b): return 0",
        FRAMES,
        MEMORY,
        FORGERY,
        "def add(a, b): raise AssertionError",
        "all = any = abs = sorted = lambda *a: True\ndef add(a, b): return 0",
        "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()\ndef add(a, b): return 0",
        "class add:\n    def __new__(cls, *a): return super().__new__(cls)\n    def __eq__(self, o): return True",
    ],
)
def test_cheating_passes_no_test(sandbox: Sandbox, code: str) -> None:
    tests = [
        "assert add(1, 2) == 3",
        "assert add(3, 4) == 7 and abs(add(1, 2) - 3) < 1",
        "assert all([add(1, 2) == 3])",
    ]
    assert not any(snippets(sandbox, code, tests).passed)


def test_a_foreign_object_is_less_than_no_number(sandbox: Sandbox) -> None:
    small = """
class S:
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __sub__(self, other): return self
    def __abs__(self): return self
def f(): return S()
"""
    for test in (
        "assert abs(f() - 3) < 0.1",
        "assert f() <= 2",
        "assert 2 > f()",
        "import math; assert math.isclose(f(), 2)",
    ):
        assert not passes(sandbox, small, test)


def test_a_test_cannot_be_read_through_what_it_passes(sandbox: Sandbox) -> None:
    peeking = """
def f(function):
    for path in ("__globals__", "__code__", "__closure__", "gi_frame", "__self__", "__dict__", "_private"):
        try: getattr(function, path); return path
        except AttributeError: pass
    return "nothing"
def g(function):
    peer = object.__getattribute__(function, "_Remote__peer")
    for args in (["os", "getcwd"], ["builtins", "globals"]):
        try: return peer._decode(peer.request("call", {"import": args}))
        except Exception: pass
    peer._send({"do": "call", "args": [{"import": ["builtins", "globals"]}]})
    return "raised" if "raised" in peer._receive() else "everything"
"""
    assert passes(sandbox, peeking, "secret = 3\nassert f(lambda: secret) == 'nothing'")
    assert passes(sandbox, peeking, "secret = 3\nassert f(i for i in [secret]) == 'nothing'")
    assert passes(
        sandbox, peeking, "class A:\n    def m(self): pass\nassert f(A().m) == 'nothing' and f(A()) == 'nothing'"
    )
    assert passes(sandbox, peeking, "assert g(lambda: 1) == 'raised'")


def test_code_that_hangs_fails_its_tests_in_time() -> None:
    hasty = Sandbox(Limits(cpu_s=0.4, wall_s=0.8))
    for code in ("def add(a, b):\n    while True: pass", "while True: pass"):
        outcomes = snippets(hasty, code, ADD)
        assert outcomes.is_timeout and not any(outcomes.passed) and "longer than 0.4 s" in outcomes.error
    endless = (
        "class E:\n    def __iter__(self): return self\n    def __next__(self): return 1\ndef add(a, b): return E()"
    )
    assert not any(snippets(hasty, endless, ["assert list(add(1, 2)) == [3]"]).passed)
    hasty.close()
