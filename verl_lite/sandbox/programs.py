"""What a confined process does: run a script, hold the functions of an answer, or run tests against those.

Each function takes over a process that the fork server has made; it has given up its rights before it reads the first
byte of code. Between functions and tests go plain values only. Imports the standard library only.
"""

import asyncio
import asyncio.selector_events
import atexit
import builtins
import contextlib
import functools
import inspect
import io
import os
import random
import socket
import sys
import threading
import traceback
import types
import unittest
from collections.abc import Callable, Sized
from typing import Any

from verl_lite.sandbox.answer import CHANGEABLE, Answer, is_name
from verl_lite.sandbox.values import ERROR_CHARACTERS, as_line, decode, encode, read_line, send

ANSWER, TESTS = "answer", "tests"
"""Names of the modules that the code becomes."""

LIBRARY = (
    "bisect collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string typing dataclasses enum numbers"
).split()
"""Imported before any program starts; tests find them under their names."""

_NAMED_ITEMS_MAX = 10_000
"""Tests see no longer value under a name of the answer's, such as a table of primes: it takes too long to send."""


class _PipeEnd(io.FileIO):
    """Through a pair of these an event loop of asyncio wakes itself; it would use sockets, which are refused here."""

    recv, send = io.FileIO.read, io.FileIO.write

    def setblocking(self, blocks: bool) -> None:
        os.set_blocking(self.fileno(), blocks)


def prepare() -> None:
    """Imports what programs usually import, and lets asyncio run without sockets."""
    for name in LIBRARY:
        __import__(name)
    sockets = vars(socket) | {"socketpair": lambda: [*map(_PipeEnd, os.pipe(), "rw")]}
    vars(asyncio.selector_events)["socket"] = types.SimpleNamespace(**sockets)


def run_script(task: int, reply: int) -> int:
    """task: {"code"}. reply, which is closed before the code runs, gets {"compiled": false, "error"} if it is no
    Python. Gives its exit code."""
    with open(task, "rb") as file:
        compiled = _compile(read_line(file)["code"], reply)
    os.close(reply)
    exit_code = 0 if compiled else 1
    try:
        exec(compiled or "", _become_main("__main__").__dict__)
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # the door to untrusted code
        traceback.print_exc()
        exit_code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    return exit_code & 0xFF


def hold_functions(task: int, reply: int) -> None:
    """task: {"code", "has_requests": whether requests follow in it; else they come from `reply`}.

    reply gets {"names"} once the code has run, or {"compiled": false, "error"} or {"raised"}; then an answer for each
    request: {"call": name, "args", "kwargs"} gives {"value", "after": arguments changed in place} or {"raised"}. What
    is no plain value stays here, and {"object": number} is given for it; {"call", "of": number} asks for its method,
    or with "args": null for its attribute, which is {"function": true} where it can be called, {"coroutine": true} for
    an `async def`, which a call runs to its end. Each answer has the "number" of its request. The code can write to
    `reply`, too: readers take these shapes alone.
    """
    requests = open(task, "rb")
    message = read_line(requests)
    compiled = _compile(message["code"], reply)
    if compiled is None:
        return
    if not message["has_requests"]:
        requests = open(reply, "rb", closefd=False)
    namespace, held, runner = _become_main(ANSWER).__dict__, list[Any](), asyncio.Runner()

    def given(value: Any) -> dict[str, Any]:
        if (plain := _plain(value)) is None:
            held.append(value)
            return {"object": len(held) - 1}
        return plain

    def run() -> dict[str, Any]:
        exec(compiled, namespace)
        found = {} if message["has_requests"] else namespace  # those who wrote the requests need no names
        return {"names": {name: _described(value) for name, value in found.items() if is_name(name)}}

    def do(request: dict[str, Any]) -> dict[str, Any]:
        name, of = request["call"], request.get("of")
        if of is not None:
            function = getattr(held[of], name)
        elif name not in namespace and "Solution" in namespace:
            function = getattr(namespace["Solution"](), name)
        else:
            function = namespace[name]
        if request["args"] is None:
            return _function(function) or given(function)
        args = decode(request["args"])
        value = function(*args, **decode(request["kwargs"]))
        value = given(runner.run(value) if inspect.iscoroutine(value) else value)
        return value | {"after": [_plain(arg) if type(arg) in CHANGEABLE else None for arg in args]}

    _tell(reply, _answered(run))
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = read_line(requests)
            _tell(reply, _answered(do, request) | {"number": request["number"]})


def run_tests(task: int, reply: int, answer: int) -> None:
    """task: {"tests": [snippet], "setup", "call", "stop_early"}; `answer` leads to a process that holds functions.

    Tells {"broken": why} if a snippet is no Python, {"tests": n} when the number of tests is known, and for each test
    {"passed": true} or {"error"}. Every message is built here; none that the answer's process sends is passed on.
    """
    with open(task, "rb") as file:
        message = read_line(file)
    tested, snippets = Answer(answer), []
    for text in (message["setup"], *message["tests"]):
        try:
            snippets.append(compile(text, TESTS, "exec", dont_inherit=True))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return _tell(reply, {"broken": str(error)})
    setup, *tests = snippets
    names, unusable = tested.begin()
    if unusable:
        return _tell(reply, unusable)
    vars(unittest)["main"] = lambda *args, **kwargs: None  # the tests that it would run are run here
    count = len(tests)
    for snippet in tests:
        namespace, cases = _namespace(names), list[unittest.TestCase]()
        problem = (
            _raised(tested, exec, setup, namespace)
            or _raised(tested, exec, snippet, namespace)
            or _raised(tested, _collect, cases, namespace, names, message["call"])
        )
        count += max(1, len(cases)) - 1
        _tell(reply, {"tests": count})
        result = _Result(reply, tested, count, message["stop_early"])
        if problem or not cases:
            result.tell(problem)
        else:
            unittest.TestSuite(cases).run(result)
        if result.shouldStop:
            return
        count = result.tests
    if count == 0:
        _tell(reply, {"error": "every test was skipped"})


def _tell(fd: int, message: dict[str, Any]) -> None:
    send(fd, as_line(message))


def _answered(work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    try:
        return work(*args)
    except BaseException as error:  # the door to untrusted code: what it raises is told
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        try:
            text = str(error)[:ERROR_CHARACTERS]
        except Exception:  # its own __str__ is untrusted, too
            text = ""
        return {"raised": {"name": type(error).__name__, "base": kinds[0], "text": text}}


def _described(value: Any) -> dict[str, Any] | None:
    """What a test has to know of something that the answer defines; None if it is nothing for tests."""
    if isinstance(value, type) and issubclass(value, Exception):
        base = next(kind.__name__ for kind in value.__mro__ if kind.__module__ == "builtins")
        return {"exception": value.__name__, "base": base}
    is_long = isinstance(value, Sized) and not isinstance(value, type) and len(value) > _NAMED_ITEMS_MAX
    return _function(value) or (None if is_long else _plain(value))


def _function(value: Any) -> dict[str, Any] | None:
    return {"coroutine" if inspect.iscoroutinefunction(value) else "function": True} if callable(value) else None


def _plain(value: Any) -> dict[str, Any] | None:
    try:
        return {"value": encode(value)}
    except Exception:  # an object, or whatever its class raises
        return None


def _namespace(names: dict[str, Any]) -> dict[str, Any]:
    """Of a new module for one snippet, which finds what the answer defines also as a module to import from."""
    sys.modules[TESTS] = types.ModuleType(TESTS)
    for alias in ("solution", ANSWER):
        sys.modules[alias] = types.ModuleType(alias)
        vars(sys.modules[alias]).update(names, __all__=[])  # `import *` replaces nothing that a test has imported
    namespace = vars(sys.modules[TESTS])  # what is built in stays so: an answer may not bring its own `all` or `sorted`
    namespace.update({name: sys.modules[name] for name in LIBRARY})
    namespace.update({name: value for name, value in names.items() if not hasattr(builtins, name)})
    return namespace


class _Result(unittest.TestResult):
    """Tells how each test of a snippet ended as soon as it has. tests: of all snippets, without those skipped here."""

    def __init__(self, reply: int, tested: Answer, tests: int, stop_early: bool) -> None:
        super().__init__()
        self._reply, self._tested, self.tests, self._stop_early = reply, tested, tests, stop_early
        self._failure, self._is_skipped, self._requests = "", False, 0

    def tell(self, failure: str) -> None:
        _tell(self._reply, {"error": failure} if failure else {"passed": True})
        if failure and self._stop_early:
            self.stop()

    def startTest(self, test: unittest.TestCase) -> None:
        self._tested.begin_test()
        self._failure, self._is_skipped, self._requests = "", False, self._tested.requests

    def stopTest(self, test: unittest.TestCase) -> None:
        if self._is_skipped and self._requests != self._tested.requests:
            self._failure = "the test skipped itself after it had called the tested code"
        if self._is_skipped and not self._failure:
            self.tests -= 1
            _tell(self._reply, {"tests": self.tests})
        else:
            self.tell(self._tested.problem or self._failure)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._failure = _short(err[1])
        if not isinstance(test, unittest.TestCase):  # of a class or a module, such as its setUpClass
            self.tell(self._failure)

    addFailure = addError

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addError(subtest, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._is_skipped = True

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._failure = "a test that was expected to fail has passed"


def _collect(
    cases: list[unittest.TestCase], namespace: dict[str, Any], names: dict[str, Any], call: str | None
) -> None:
    """Adds the tests that a snippet defines: its `check` of `call`, or its `test_*` functions, `TestCase`s and `Test*`
    classes; none where it is a test itself."""
    own = {name: value for name, value in namespace.items() if getattr(value, "__module__", None) == TESTS}
    if call is not None:
        return cases.append(unittest.FunctionTestCase(lambda: own["check"](names[call])))
    for name, value in own.items():
        if type(value) is types.FunctionType and name.startswith("test"):
            if name.startswith("test_") or not inspect.signature(value).parameters:
                cases.append(unittest.FunctionTestCase(_whole(value)))
        elif isinstance(value, type) and (name.startswith("Test") or issubclass(value, unittest.TestCase)):
            kind = value if issubclass(value, unittest.TestCase) else _test_case(value)
            for method in unittest.defaultTestLoader.getTestCaseNames(kind):
                case = kind(method)
                if not issubclass(kind, unittest.IsolatedAsyncioTestCase):
                    setattr(case, method, _whole(getattr(case, method)))
                cases.append(case)


_FIXTURES = {
    "setup_method": "setUp",
    "teardown_method": "tearDown",
    "setup_class": "setUpClass",
    "teardown_class": "tearDownClass",
}


def _test_case(kind: type) -> type[unittest.TestCase]:
    """A class of tests as pytest runs them, as a `TestCase`."""
    fixtures = {
        ours: inspect.getattr_static(kind, theirs) for theirs, ours in _FIXTURES.items() if hasattr(kind, theirs)
    }
    return type(kind.__name__, (kind, unittest.TestCase), {"__module__": TESTS, **fixtures})


def _whole(test: Callable[..., Any]) -> Callable[..., None]:
    """The test, which also runs the coroutine that it returns. A generator fails, since nothing would run it."""

    @functools.wraps(test)
    def run(*args: Any) -> None:
        returned = test(*args)
        if inspect.iscoroutine(returned):
            asyncio.run(returned)
        elif inspect.isgenerator(returned) or inspect.isasyncgen(returned):
            raise TypeError("a test with `yield` runs nothing")

    return run


def _raised(tested: Answer, work: Callable[..., object], *args: Any) -> str:
    tested.begin_test()
    try:
        work(*args)
    except BaseException as error:  # the door to the tests' code; SystemExit passes no test either
        return tested.problem or _short(error)
    return tested.problem


def _compile(code: str, reply: int) -> types.CodeType | None:
    """The code; tells why if it is no Python."""
    try:
        return compile(code, f"{ANSWER}.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        _tell(reply, {"compiled": False, "error": _short(error)})
        return None


def _become_main(name: str) -> types.ModuleType:
    """An empty module, found under its name as `sys.modules` has it, and a fresh generator of random numbers."""
    module = types.ModuleType(name)
    sys.modules[name] = sys.modules["__main__"] = module
    sys.argv = [f"{ANSWER}.py"]
    random.seed(0)
    return module


def _short(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()[-ERROR_CHARACTERS:]
