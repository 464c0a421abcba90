"""Scripts, functions and snippets of tests in the sandbox: what counts as passed, and how an answer tries to cheat."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from verl_lite.sandbox import Limits, Outcome, Sandbox
from verl_lite.sandbox.answer import EndOfTest, UntrustedCode
from verl_lite.sandbox.values import FORGED

ADD = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    found = Sandbox(Limits(cpu_s=2, wall_s=4, memory_mb=512))
    yield found
    found.close()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Sandbox]:
    found = Sandbox(Limits(cpu_s=0.4, wall_s=0.8))
    yield found
    found.close()


def values(outcomes: list[Outcome]) -> list[object]:
    return [outcome.value for outcome in outcomes]


def snippets(sandbox: Sandbox, code: str, tests: list[str], **options: str) -> list[bool]:
    return [outcome.value is True for outcome in sandbox.run_snippets(code, tests, **options)[0]]


# ------------------------------------------------------------------------------------------------------------- scripts


def test_a_script_reads_prints_and_fails(sandbox: Sandbox) -> None:
    for code, stdin, printed in (
        ("print(sum(map(int, input().split())))", "1 2\n", "3\n"),
        ("def main():\n    print(__name__)\nif __name__ == '__main__':\n    main()", "", "__main__\n"),
        ("print(1)", "x" * 3_000_000, "1\n"),  # it need not read
        ("import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    print(1)\nasyncio.run(f())", "", "1\n"),
    ):
        assert sandbox.run_script(code, stdin) == Outcome(True, printed)
    assert sandbox.run_script("print(1").is_compiled is False
    for code, error in (("1/0", "ZeroDivisionError"), ("import os; os._exit(3)", "exit code 3"), ("exit(2)", "code 2")):
        outcome = sandbox.run_script("print(1);" + code)
        assert outcome.is_compiled and outcome.value is None and error in outcome.error
    late = sandbox.run_script("import time; time.sleep(9)", total_s=0.2)
    assert late.is_timeout and "time" in late.error


# ----------------------------------------------------------------------------------------------------------- functions


def test_functions_are_called_with_plain_values(sandbox: Sandbox) -> None:
    code = "def f(a, b=None): return [a, b, 1 << 99]\nclass Solution:\n    n = 0\n"
    code += "    def g(self, x):\n        self.n += x\n        return self.n"
    assert values(sandbox.call(code, "f", [["x", {"k": [True]}], []])) == [
        ["x", {"dict": [[["k", [True]]]]}, 1 << 99],
        None,
    ]
    assert "TypeError" in sandbox.call(code, "f", [[]])[0].error
    assert "KeyError" in sandbox.call("x = 1", "h", [[]])[0].error
    assert "no plain value" in sandbox.call("def f(): return object()", "f", [[]])[0].error
    assert values(sandbox.call(code, "g", [[2], [2]])) == [2, 2]  # a fresh Solution for each call


def test_calls_end_with_the_process(hasty: Sandbox) -> None:
    code = "def f(x):\n    while x == 1: pass\n    if x == 2: import os; os._exit(0)\n    return x"
    for last, is_timeout in ((1, True), (2, False)):
        outcomes = hasty.call(code, "f", [[0], [last], [3]])
        assert values(outcomes) == [0, None] and outcomes[-1].is_timeout is is_timeout and outcomes[-1].error


def test_code_that_does_not_come_to_its_functions(hasty: Sandbox) -> None:
    for code in ("import os; os._exit(0)", "raise SystemExit(0)", "while True: pass", "1/0", "def f(:"):
        outcome = hasty.call(code, "f", [[]])[0]
        assert outcome.value is None and outcome.error and outcome.is_compiled == (code != "def f(:")
        assert outcome.is_timeout == (code == "while True: pass")
        assert not any(snippets(hasty, code, ADD))


FORGE = """
import os
def f(line):
    os.write(4, line.encode('latin-1') + b'\\n')
    return 5
"""


@pytest.mark.parametrize(
    "line", ["{}", "[]", "\xff", '{"value": {"held": 0}}', '{"call": "f", "args": [{"import": ["os", "system"]}]}',
             '{"value": {"Fraction": "1e99999999"}}', "9" * 99_999, '{"value": 5, "after": [null]}',
             '{"value": 5, "after": [null], "number": 2}', '{"value": 5, "after": [null], "object": 1, "number": 1}'],
)  # fmt: skip
def test_forged_messages_are_nothing(sandbox: Sandbox, line: str) -> None:
    assert [outcome.error != "" for outcome in sandbox.call(FORGE, "f", [[line]])] == [True]
    assert not any(snippets(sandbox, FORGE, [f"assert f({line!r}) == 5"]))


# ------------------------------------------------------------------------------------------------------------ snippets


def test_asserts_pass_and_fail_one_by_one(sandbox: Sandbox) -> None:
    assert snippets(sandbox, "def add(a, b): return a + b", ADD) == [True, True]
    outcomes, count = sandbox.run_snippets("def add(a, b): return 3", ADD)
    assert values(outcomes) == [True, None] and "AssertionError" in outcomes[1].error and count == 2
    early, count = sandbox.run_snippets("def add(a, b): return 0", ADD, stop_early=True)
    assert values(early) == [None] and count == 2
    with pytest.raises(ValueError, match="not valid Python: .*never closed"):
        sandbox.run_snippets("x = 1", ["assert (1"])


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
    outcomes, count = sandbox.run_snippets("def add(a, b): return a + b", [tests])
    assert values(outcomes) == [True, None, True] and count == 3


FIXTURES = """
import asyncio, unittest
import solution
from solution import *
state = []
def setUpModule(): state.append("module")
def tearDownModule(): assert state == ["module", "class"]
class Sync(unittest.TestCase):
    @classmethod
    def setUpClass(cls): state.append("class"); cls.base = add(1, 1)
    @classmethod
    def tearDownClass(cls): assert cls.base == 2
    def setUp(self): self.addCleanup(state.remove, "test"); state.append("test")
    def tearDown(self): assert state == ["module", "class", "test"]
    def test_base(self): self.assertEqual(add(self.base, 1), 3)
    def test_parts(self):
        for n in range(3):
            with self.subTest(n=n): self.assertEqual(add(n, 1), n + 1)
    @unittest.expectedFailure
    def test_failure(self): self.assertEqual(add(1, 2), 12)
    @staticmethod
    def test_static(): assert add(1, 1) == 2
    @unittest.skip("not here")
    def test_skipped(self): assert False
    def test_skips(self): self.skipTest("not here")
    async def test_async(self): self.assertEqual(await later(1), 2)
class Async(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self): self.one = await later(0)
    async def test_async(self): self.assertEqual(await asyncio.gather(later(self.one), later(2)), [2, 3])
class TestPlain:
    @classmethod
    def setup_class(cls): cls.one = add(0, 1)
    @classmethod
    def teardown_class(cls): assert cls.one == 1
    def setup_method(self): self.two = add(self.one, 1)
    def test_sum(self): assert add(self.one, self.two) == 3
async def test_async():
    await asyncio.sleep(0)
    assert await solution.later(1) == 2 and await Later().get(3) == 4
def testWithoutLine(): assert add(1, 1) == 2
unittest.main()
"""
LATER = """
import asyncio
async def later(x): await asyncio.sleep(0.001); return add(x, 1)
class Later:
    async def get(self, x): return await later(x)
def add(a, b): return a + b
"""


def test_all_that_unittest_and_pytest_would_run_is_run(sandbox: Sandbox) -> None:
    outcomes, count = sandbox.run_snippets(LATER, [FIXTURES])
    assert values(outcomes) == [True] * 9 and count == 9, outcomes
    wrong, count = sandbox.run_snippets(LATER.replace("a + b", "12"), [FIXTURES])
    assert values(wrong) == [None] * 11 and count == 11  # both tearDowns of a class, too, and the test that should fail


NEVER_RUN = [
    "async def test_it(): assert f(1) == 2",
    "import unittest\nclass T(unittest.TestCase):\n    async def test_it(self): assert f(1) == 2",
    "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test_it(self): assert f(1) == 2",
    "class TestIt:\n    def test_it(self): assert f(1) == 2",
    "def testIt(): assert f(1) == 2",
    "def test_it():\n    yield\n    assert f(1) == 2",
    "import unittest\n@unittest.skip('')\nclass T(unittest.TestCase):\n    def test_it(self): assert f(1) == 2",
    "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        if f(1) != 2: self.skipTest('')",
    "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): assert f(1) == 2\n"
    "    def test_it(self): pass",
    "import unittest\nclass T(unittest.TestCase):\n    def tearDown(self): assert f(1) == 2\n    def test(self): pass",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with self.subTest(): assert f(1) == 2",
    "with __import__('unittest').TestCase().assertRaises(ValueError): f(object())",  # object() does not reach f
]


@pytest.mark.parametrize("test", NEVER_RUN)
def test_a_test_that_would_not_run_passes_no_answer(sandbox: Sandbox, test: str) -> None:
    outcomes, count = sandbox.run_snippets("def f(x): return 0", [test])
    assert values(outcomes) == [None] and count == 1


HONEST = """
class Empty(ValueError): pass
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def pop(self): return pop(self.items)
class Solution:
    def f(self, x): return x + 1
def pop(items):
    if not items: raise Empty('nothing')
    return items.pop()
def count(n):
    yield from range(n)
def sort(x): x.sort()
def utf(x): return x.decode()
def one(x): return x
TABLE, LONG = {1: 'a'}, [False] * 10**7
import math, numpy
from collections import Counter
from functools import reduce as fold
def array(x): return numpy.array(x) / 2
"""


WHAT_TESTS_DO = [
    "assert list(count(3)) == [0, 1, 2] and next(count(1)) == 0 and sum(count(4)) == 6",
    "x = [3, 1, 2]; sort(x); assert x == [1, 2, 3]",
    "assert Counter('aab') == {'a': 2, 'b': 1} and math.floor(2.5) == 2 and TABLE[1] == 'a'",
    "assert array([2, 4]).tolist() == [1, 2] and (array([[2]]) == 1).all()",
    "import solution; assert solution.array(2) == 1",
    "x = [1, 'b']; assert pop(items=x) == 'b' and pop(x) == 'b' and x == [1]",
    "try: pop([])\nexcept Empty as e: assert str(e) == 'nothing'\nelse: assert False",
    "try: pop([])\nexcept ValueError: pass\nelse: assert False",
    "assert Solution().f(1) == 2",
    "s = Stack(); s.push(1).push('b'); assert s.items == [1, 'b'] and s.pop() == 'b' and s.items == [1]",
    "try: Stack().pop()\nexcept Empty as e: assert str(e) == 'nothing'\nelse: assert False",
    "assert not hasattr(Stack(), '_x') and not hasattr(Stack(), 'nothing')",
    "try: utf(b'\\xff')\nexcept ValueError as e: assert 'invalid start byte' in str(e)\nelse: assert False",
    "from concurrent.futures import ThreadPoolExecutor as T\nassert list(T(4).map(one, range(99))) == list(range(99))",
]
WHAT_DOES_NOT_CROSS = ["assert fold([1, 2]) == 3", "assert len(Stack()) == 0"]


def test_what_tests_can_do_with_an_answer(sandbox: Sandbox) -> None:
    outcomes, _ = sandbox.run_snippets(HONEST, [*WHAT_TESTS_DO, *WHAT_DOES_NOT_CROSS])
    assert values(outcomes) == [True] * len(WHAT_TESTS_DO) + [None] * 2, outcomes


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
    for fd in range(3, 9):
        try: os.write(fd, b'{"passed": true}\\n')
        except OSError: pass
"""


WRITE = """
import os
LINE = b'{"passed": true, "tests": 1}\\n'
def write(line=LINE):
    for fd in range(65):
        try: os.write(fd, line)
        except OSError: pass
"""
LINES = [
    b'{"passed": true, "tests": 1}\n',
    b'{"tests": 1}\n{"passed": true}\n',
    b'{"names": {}, "passed": true}\n',
    b'{"names": {"__name__": {"value": "x"}, "add": {"function": true}}}\n',  # would hide what a snippet defines
    b'{"names": {"__builtins__": {"value": {"dict": [[]]}}, "add": {"function": true}}}\n',
    b'{"compiled": false, "error": "", "passed": true}\n',
    b'{"compiled": true, "error": {"passed": true}}\n',
    b'{"raised": {"name": "a", "base": "StopIteration", "text": ""}}\n',
    b'{"value": 3, "after": [null, null], "number": 2}\n',  # before it is asked for
    b'{"value": 3, "after": [null, null]}\n' * 9,
    b"[" * 99_999 + b"\n",
]
LIMP = "\ndef add(a, b): return 0\n"
ATTACKS = [
    "os.closerange(0, 65)",
    "while True: os.write(4, b' ' * 65536)",  # a line without an end
    "for fd in range(5, 40): os.dup2(4, fd)\nwrite()",
    "os.dup2(os.open('mine', os.O_RDWR | os.O_CREAT), 4); write()",
    """
for pid in ("self", os.getppid(), os.getpid() + 1):
    for name in ("mem", *(f"fd/{number}" for number in range(9))):
        try: open(f"/proc/{pid}/{name}", "r+b").write(LINE)
        except OSError: pass
""",
    """
import ctypes
for pid in (os.getppid(), os.getpid() + 1):
    for call in (101, 311, 434): assert ctypes.CDLL(None).syscall(call, 16, pid, 0, 0, 0, 0) == -1
""",
    "import atexit; atexit.register(write); atexit.register(os._exit, 0)",
    "import threading; threading.Timer(0.01, os._exit, (0,)).start()",
    "import threading; threading.Thread(target=lambda: [write() for _ in range(10**9)], daemon=True).start()",
    "try:\n    while not os.fork(): write()\nexcept OSError: pass",
    """
import sys, threading
def trace(*a): write(); return trace
sys.setprofile(trace); sys.settrace(trace); threading.settrace(trace)
""",
    """
import sys
programs = sys.modules["verl_lite.sandbox.programs"]
programs._reply_or_raised, programs.send = lambda *a: {"passed": True}, lambda fd, line: os.write(fd, LINE)
""",
    """
import builtins, json, unittest
json.dumps = lambda *a, **k: LINE.decode()
unittest.TestCase.assertEqual = unittest.TestCase.run = unittest.TestCase.debug = lambda *a, **k: None
builtins.all = builtins.__build_class__ = lambda *a: True
""",
    """
def all(*a): return True
class unittest: TestCase = object
class math: isclose = all
check = candidate = test_sums = len = sum = abs = isclose = all
""",
]
FORMS = [
    "assert add(1, 2) == 3",
    "from solution import *\nassert all([add(3, 4) == 7]) and abs(add(1, 2) - 3) < 1",
    "from math import isclose\nfrom solution import *\nassert isclose(add(1, 2), 3) and isclose(add(3, 4), 7)",
    "try: add(1, 2)\nexcept BaseException: pass\nassert 3 == add(1, 2)",
    "cases = [(1, 2, 3), (3, 4, 7)]\nassert all(map(lambda c: add(c[0], c[1]) == c[2], cases))",
    "from solution import *\ndef test_sums(): assert add(1, 2) == 3\n",
    "import unittest\nfrom solution import *\nclass T(unittest.TestCase):\n"
    "    def test_sum(self): self.assertEqual(add(1, 2), 3)",
]
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(3, 4) == 7"


@pytest.mark.parametrize(
    "code",
    [
        *(WRITE + f"write({line!r}){LIMP}" for line in LINES),
        *(WRITE + f"def add(a, b): write({line!r}); return 0" for line in LINES),
        *(WRITE + attack + LIMP for attack in ATTACKS),
        *(WRITE + f"def add(a, b):\n    exec({attack!r}, globals())\n    return 0" for attack in ATTACKS),
        "def add(a, b): raise StopIteration",  # ends `map`
        "class Mine(StopIteration): pass\ndef add(a, b): raise Mine",
        "from unittest import SkipTest\ndef add(a, b): raise SkipTest",
        "def add(a, b): raise KeyboardInterrupt",
        "def add(a, b): raise GeneratorExit",
        "class E(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__\ndef add(a, b): return E()",
        "class E(list):\n    def __eq__(self, o): return True\ndef add(a, b): return E()",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "def add(a, b): import os; os._exit(0)",
        "def add(a, b): raise SystemExit(0)",
        "class E:\n    def __eq__(self, o): return True\ndef add(a, b): return E()",
        "class E(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef add(a, b): return E()",
        "from unittest.mock import ANY\ndef add(a, b): return ANY",
        "from unittest.mock import _ANY as add",  # defect 12 of issue 16
        "from unittest.mock import ANY as add",
        "import builtins\nbuiltins.AssertionError = type('Fine', (BaseException,), {})\ndef add(a, b): return 0",
        "import builtins\nbuiltins.print = builtins.isinstance = builtins.abs = lambda *a: 3\ndef add(a, b): return 0",
        FRAMES,
        MEMORY,
        FORGERY,
        "def add(a, b): raise AssertionError",
        "all = any = abs = sorted = lambda *a: True\ndef add(a, b): return 0",
        "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()\ndef add(a, b): return 0",
        "class add:\n    def __new__(cls, *a): return super().__new__(cls)\n    def __eq__(self, o): return True",
        "class S:\n    __eq__ = __lt__ = __sub__ = __abs__ = lambda *a: 1\ndef add(a, b): return S()",
    ],
)
def test_cheating_passes_no_test(sandbox: Sandbox, code: str) -> None:
    compile(code, "answer", "exec")
    assert not any(snippets(sandbox, code, FORMS))
    outcomes, count = sandbox.run_snippets(code, [CHECK], call="add", stop_early=True)
    assert count == 1 and not any(outcome.value for outcome in outcomes)


NAMES = b'{"names": {"f": {"function": true}}}\n'
FIVE = b'"value": 5, "after": [null], "number": 1'
NO_NAMES = [
    b'{"names": [], "x": 1}', b'{"names": {"f": 1}}', b'{"names": {"f": {}}}', b'{"names": {"f": {"function": 2}}}',
    b'{"names": {"__file__": null}}', b'{"names": {"a b": null}}', b'{"names": {"\\u0000": null}}',
    b'{"names": {"f": {"exception": "E"}}}', b'{"names": {"f": {"exception": "E", "base": 3}}}',
    b'{"names": {"f": {"value": {"bytes": [99999999999]}}}}', b'{"raised": {"name": [], "base": "E", "text": ""}}',
]  # fmt: skip
NO_REPLIES = [
    b'"value": 5, "after": [null], "number": 2', b'"value": 5, "after": [null]', FIVE + b', "object": 1',
    b'"value": 5, "number": 1', b'"value": 5, "after": 3, "number": 1', b'"value": 5, "after": [], "number": 1',
    b'"value": 5, "after": [3], "number": 1', b'"value": 5, "after": [{"value": 3}], "number": 1',
    b'"value": 5, "after": [null, null], "number": 1', b'"object": -1, "after": [null], "number": 1',
    b'"object": "x", "after": [null], "number": 1', b'"function": true, "after": [null], "number": 1',
    *(FIVE.replace(b"5", bad) for bad in (b'{"held": 1}', b'{"range": [1]}', b"[" * 400 + b"]" * 400)),
    b'"raised": {"name": "E", "base": "E", "text": 3}, "number": 1', b'"raised": [], "number": 1',
    b'"raised": {"name": "E", "base": "E", "text": ""}', FIVE + b', "raised": {"name": "E", "base": "E", "text": ""}',
]  # fmt: skip


@pytest.mark.parametrize("lines", [*NO_NAMES, *(NAMES + b"{%s}" % reply for reply in NO_REPLIES), NAMES + b"[1]"])
def test_replies_of_any_other_shape_end_the_tests(lines: bytes) -> None:
    """Also a test that catches everything fails, and so does every later one."""
    ours, theirs = socket.socketpair()
    theirs.sendall(lines + b"\n{%s}\n" % FIVE)
    answer = UntrustedCode(ours.detach())
    names, unusable = answer.begin()
    if unusable is None:
        for _ in range(2):
            with pytest.raises(EndOfTest):
                names["f"]([1])
    assert answer.is_broken and answer.problem == (unusable or {}).get("error", answer.problem) == FORGED
    theirs.close()


def test_an_answer_that_ends_is_no_exception_that_a_test_expects(sandbox: Sandbox) -> None:
    for end in ("os._exit(0)", "os.kill(os.getpid(), 9)", "os.closerange(3, 99)"):
        code, test = f"import os\ndef f(): {end}", "try: f()\nexcept: pass\nelse: assert False"
        assert snippets(sandbox, code, [test]) == [False]


def test_a_test_hands_over_nothing_through_which_it_can_be_read(sandbox: Sandbox) -> None:
    for given in ("lambda: secret", "[print]", "object()", "type('A', (), {})()"):
        outcomes, _ = sandbox.run_snippets("def f(x): return 1", [f"secret = 3\nassert f({given}) == 1"])
        assert "not a plain value" in outcomes[0].error


def test_code_that_hangs_fails_its_tests_in_time(hasty: Sandbox) -> None:
    endless = (
        "class E:\n    def __iter__(self): return self\n    def __next__(self): return 1\ndef add(a, b): return E()"
    )
    for code in ("def add(a, b):\n    while True: pass", endless):
        outcomes, _ = hasty.run_snippets(code, ["assert list(add(1, 2)) == [3]", *ADD])
        assert not any(outcome.value for outcome in outcomes)
    assert hasty.run_snippets("def add(a, b):\n    while True: pass", ADD)[0][0].is_timeout
    started = time.monotonic()
    hasty.run_snippets("import time\ndef f(): time.sleep(0.3)", ["f()"] * 20, total_s=1)
    assert time.monotonic() - started < 3
