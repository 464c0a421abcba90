"""The programs of a confined process: run a script, serve the functions of an answer, or run tests against them.

Each function runs in a process that the fork server has created and that has dropped its rights before it reads any
code. Functions and tests exchange only plain values. Imports only the standard library.
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
"""Names of the modules in which the answer's code and the tests run."""

LIBRARY = (
    "bisect collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string typing dataclasses enum numbers"
).split()
"""Modules that are imported before any program starts and that tests can use without importing them."""

_PRELUDE_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json "
    "time typing"
).split()
"""Modules that an answer can use without importing them, with their names (`List`, `deque`, `sqrt`), as verl's graders
of APPS and TACO allow. Answers to LeetCode problems rely on it."""

_NAMED_ITEMS_MAX = 10_000
"""Maximum length of a value that tests can read by name. Longer values, such as tables of primes, take too long to
send."""


class _PipeEnd(io.FileIO):
    """A pipe end that replaces the socket through which an asyncio event loop wakes itself: sockets are refused."""

    recv, send = io.FileIO.read, io.FileIO.write

    def setblocking(self, blocks: bool) -> None:
        os.set_blocking(self.fileno(), blocks)


def prepare() -> None:
    """Imports the modules that programs can use without importing them, and makes asyncio work without sockets."""
    for name in (*LIBRARY, *_PRELUDE_MODULES):
        __import__(name)
    sockets = vars(socket) | {"socketpair": lambda: [*map(_PipeEnd, os.pipe(), "rw")]}
    vars(asyncio.selector_events)["socket"] = types.SimpleNamespace(**sockets)


def run_script(task: int, reply: int) -> int:
    """Runs code as a script and returns its exit code.

    task: file with {"code"}. reply: receives {"compiled": false, "error"} if the code is not valid Python; it is closed
    before the code runs.
    """
    _prepare_answer()
    with open(task, "rb") as file:
        compiled = _compile(read_line(file)["code"], reply)
    os.close(reply)
    exit_code = 0 if compiled else 1
    try:
        exec(compiled or "", _become_main("__main__").__dict__)
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # untrusted code may raise anything
        traceback.print_exc()
        exit_code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    return exit_code & 0xFF


def hold_functions(task: int, reply: int) -> None:
    """Runs the answer's code, then serves requests to call its functions.

    task: file with {"code", "has_requests"}. The requests follow in this file if "has_requests" is true, else they come
    from `reply`. `reply` first receives {"names"} when the code has run, or {"compiled": false, "error"} or {"raised"}.
    Then it receives one reply, with the request's "number", per request:

    - {"call": name, "args", "kwargs"} calls a function. The reply is {"value", "after": arguments changed in place} or
      {"raised"}. A result that is not a plain value stays in this process; its reply is {"object": number}.
    - {"call", "of": number} calls a method of that object.
    - {"call", "of": number, "args": null} reads an attribute. The reply for a callable is {"function": true}, or
      {"coroutine": true} for an `async def`, which a call runs until it returns.

    The code can write to `reply` too, so readers have to accept only these shapes.
    """
    _prepare_answer()
    requests = open(task, "rb")
    message = read_line(requests)
    compiled = _compile(message["code"], reply)
    if compiled is None:
        return
    if not message["has_requests"]:
        requests = open(reply, "rb", closefd=False)

    held = _HeldCode()
    # requests in the task file need no names
    _send(reply, _reply_or_raised(held.run, compiled, not message["has_requests"]))
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = read_line(requests)
            _send(reply, _reply_or_raised(held.serve, request) | {"number": request["number"]})


class _HeldCode:
    """The module of an answer's code, and the objects that its functions have returned. See `hold_functions`."""

    def __init__(self) -> None:
        self._namespace = _become_main(ANSWER).__dict__
        self._objects: list[Any] = []
        self._runner = asyncio.Runner()

    def run(self, compiled: types.CodeType, describes_names: bool) -> dict[str, Any]:
        """Runs the code. Returns the first reply, with a description of its names if `describes_names`."""
        exec(compiled, self._namespace)
        descriptions = {}
        if describes_names:
            for name, value in self._namespace.items():
                if is_name(name):
                    descriptions[name] = _describe(value)
        return {"names": descriptions}

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the reply to a request, without its number."""
        function = self._find(request["call"], request.get("of"))
        if request["args"] is None:
            return _function(function) or self._value_or_object(function)
        args = decode(request["args"])
        returned = function(*args, **decode(request["kwargs"]))
        if inspect.iscoroutine(returned):
            returned = self._runner.run(returned)
        reply = self._value_or_object(returned)
        reply["after"] = [_plain(arg) if type(arg) in CHANGEABLE else None for arg in args]
        return reply

    def _find(self, name: str, object_number: int | None) -> Any:
        if object_number is not None:
            return getattr(self._objects[object_number], name)
        if name not in self._namespace and "Solution" in self._namespace:
            return getattr(self._namespace["Solution"](), name)
        return self._namespace[name]

    def _value_or_object(self, value: Any) -> dict[str, Any]:
        plain = _plain(value)
        if plain is not None:
            return plain
        self._objects.append(value)
        return {"object": len(self._objects) - 1}


def run_tests(task: int, reply: int, answer: int) -> None:
    """Runs tests against the functions of an answer.

    task: file with {"tests": [snippet], "setup", "call", "stop_early"}. answer: connection to the process that runs
    `hold_functions`. reply: receives {"broken": reason} if a snippet is not valid Python, {"tests": n} when the number
    of tests is known, and {"passed": true} or {"error"} for each test. This process builds every message itself and
    never forwards a message of the answer's process.
    """
    _allow_long_integers()
    with open(task, "rb") as file:
        message = read_line(file)
    tested = Answer(answer)
    snippets = []
    for text in (message["setup"], *message["tests"]):
        try:
            snippets.append(compile(text, TESTS, "exec", dont_inherit=True))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return _send(reply, {"broken": str(error)})
    setup, *tests = snippets
    names, unusable = tested.begin()
    if unusable:
        return _send(reply, unusable)
    vars(unittest)["main"] = lambda *args, **kwargs: None  # this function runs the tests instead
    count = len(tests)
    for snippet in tests:
        namespace = _namespace(names)
        cases: list[unittest.TestCase] = []
        problem = (
            _error_of(tested, exec, setup, namespace)
            or _error_of(tested, exec, snippet, namespace)
            or _error_of(tested, _collect, cases, namespace, names, message["call"])
        )
        count += max(1, len(cases)) - 1
        _send(reply, {"tests": count})
        result = _Result(reply, tested, count, message["stop_early"])
        if problem or not cases:
            result.report(problem)
        else:
            unittest.TestSuite(cases).run(result)
        if result.shouldStop:
            return
        count = result.tests
    if count == 0:
        _send(reply, {"error": "every test was skipped"})


def _prepare_answer() -> None:
    """Gives an answer's code the names of `_PRELUDE_MODULES`, where Python looks last: among the builtins.

    So the code's own names, and the real builtins, take precedence, and the names are not those of the answer.
    """
    _allow_long_integers()
    prelude: dict[str, Any] = {}
    for module_name in _PRELUDE_MODULES:
        module = sys.modules[module_name]
        exported = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        for name in exported:
            if module_name != "typing" or name not in prelude:  # collections has the real Counter and OrderedDict
                prelude[name] = getattr(module, name)
    prelude.update({name: sys.modules[name] for name in _PRELUDE_MODULES})
    for name, value in prelude.items():
        vars(builtins).setdefault(name, value)


def _allow_long_integers() -> None:
    """Removes Python's limit of 4300 digits for conversions. The limit of the processor time remains."""
    sys.set_int_max_str_digits(0)


def _send(fd: int, message: dict[str, Any]) -> None:
    send(fd, as_line(message))


def _reply_or_raised(work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    try:
        return work(*args)
    except BaseException as error:  # untrusted code may raise anything; the reply describes the exception
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        try:
            text = str(error)[:ERROR_CHARACTERS]
        except Exception:  # the __str__ of an exception is untrusted too
            text = ""
        return {"raised": {"name": type(error).__name__, "base": kinds[0], "text": text}}


def _describe(value: Any) -> dict[str, Any] | None:
    """Returns the description of a value that the answer defines, None if tests cannot use the value."""
    if isinstance(value, type) and issubclass(value, Exception):
        base = next(kind.__name__ for kind in value.__mro__ if kind.__module__ == "builtins")
        return {"exception": value.__name__, "base": base}
    is_long = isinstance(value, Sized) and not isinstance(value, type) and len(value) > _NAMED_ITEMS_MAX
    if callable(value):
        return _function(value)
    return None if is_long else _plain(value)


def _function(value: Any) -> dict[str, Any] | None:
    """Returns the description of a function, None for a value that cannot be called."""
    if not callable(value):
        return None
    return {"coroutine" if inspect.iscoroutinefunction(value) else "function": True}


def _plain(value: Any) -> dict[str, Any] | None:
    try:
        return {"value": encode(value)}
    except Exception:  # not a plain value, or its class raised an exception
        return None


def _namespace(names: dict[str, Any]) -> dict[str, Any]:
    """Returns the namespace of a new module for one snippet, and makes the answer importable as a module."""
    sys.modules[TESTS] = types.ModuleType(TESTS)
    for alias in ("solution", ANSWER):
        sys.modules[alias] = types.ModuleType(alias)
        vars(sys.modules[alias]).update(names, __all__=[])  # `import *` must not replace a test's imports
    namespace = vars(sys.modules[TESTS])
    namespace.update({name: sys.modules[name] for name in LIBRARY})
    # An answer must not replace builtins such as `all` or `sorted` in the tests.
    namespace.update({name: value for name, value in names.items() if not hasattr(builtins, name)})
    return namespace


class _Result(unittest.TestResult):
    """Reports the result of each test of a snippet when the test ends.

    tests: number of tests of all snippets, without the skipped tests.
    """

    def __init__(self, reply: int, tested: Answer, tests: int, stop_early: bool) -> None:
        super().__init__()
        self._reply = reply
        self._tested = tested
        self.tests = tests
        self._stop_early = stop_early
        # of the running test; requests: number that were sent before it
        self._failure = ""
        self._is_skipped = False
        self._requests = 0

    def report(self, failure: str) -> None:
        _send(self._reply, {"error": failure} if failure else {"passed": True})
        if failure and self._stop_early:
            self.stop()

    def startTest(self, test: unittest.TestCase) -> None:
        self._tested.begin_test()
        self._failure = ""
        self._is_skipped = False
        self._requests = self._tested.requests

    def stopTest(self, test: unittest.TestCase) -> None:
        if self._is_skipped and self._requests != self._tested.requests:
            self._failure = "the test skipped itself after it had called the tested code"
        if self._is_skipped and not self._failure:
            self.tests -= 1
            _send(self._reply, {"tests": self.tests})
        else:
            self.report(self._tested.problem or self._failure)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._failure = _short(err[1])
        if not isinstance(test, unittest.TestCase):  # a fixture of a class or a module, such as setUpClass
            self.report(self._failure)

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
    """Adds the tests that a snippet defines to `cases`.

    With `call` the test is the snippet's `check`, called with the function `call`; else the tests are the `test_*`
    functions, `TestCase`s and `Test*` classes. Adds nothing if the snippet itself is the test.
    """
    own = {name: value for name, value in namespace.items() if getattr(value, "__module__", None) == TESTS}
    if call is not None:
        return cases.append(unittest.FunctionTestCase(lambda: own["check"](names[call])))
    for name, value in own.items():
        if type(value) is types.FunctionType and name.startswith("test"):
            if name.startswith("test_") or not inspect.signature(value).parameters:
                cases.append(unittest.FunctionTestCase(_running_coroutines(value)))
        elif isinstance(value, type) and (name.startswith("Test") or issubclass(value, unittest.TestCase)):
            kind = value if issubclass(value, unittest.TestCase) else _test_case(value)
            for method in unittest.defaultTestLoader.getTestCaseNames(kind):
                case = kind(method)
                if not issubclass(kind, unittest.IsolatedAsyncioTestCase):
                    setattr(case, method, _running_coroutines(getattr(case, method)))
                cases.append(case)


_FIXTURES = {
    "setup_method": "setUp",
    "teardown_method": "tearDown",
    "setup_class": "setUpClass",
    "teardown_class": "tearDownClass",
}


def _test_case(kind: type) -> type[unittest.TestCase]:
    """Converts a pytest class of tests to a `TestCase`."""
    fixtures = {}
    for name_in_pytest, name in _FIXTURES.items():
        if hasattr(kind, name_in_pytest):
            fixtures[name] = inspect.getattr_static(kind, name_in_pytest)
    return type(kind.__name__, (kind, unittest.TestCase), {"__module__": TESTS, **fixtures})


def _running_coroutines(test: Callable[..., Any]) -> Callable[..., None]:
    """Wraps a test so that a coroutine it returns is run. A generator fails, since nothing would run it."""

    @functools.wraps(test)
    def run(*args: Any) -> None:
        returned = test(*args)
        if inspect.iscoroutine(returned):
            asyncio.run(returned)
        elif inspect.isgenerator(returned) or inspect.isasyncgen(returned):
            raise TypeError("a test that contains `yield` does not run")

    return run


def _error_of(tested: Answer, work: Callable[..., object], *args: Any) -> str:
    """Runs `work` and returns the reason of its failure, "" if it succeeds."""
    tested.begin_test()
    try:
        work(*args)
    except BaseException as error:  # tests may raise anything; SystemExit is a failure too
        return tested.problem or _short(error)
    return tested.problem


def _compile(code: str, reply: int) -> types.CodeType | None:
    """Compiles the code. If it is not valid Python, sends the error to `reply` and returns None."""
    try:
        return compile(code, f"{ANSWER}.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        _send(reply, {"compiled": False, "error": _short(error)})
        return None


def _become_main(name: str) -> types.ModuleType:
    """Returns a new module, registered in `sys.modules` as `name` and __main__. Resets argv and the random seed."""
    module = types.ModuleType(name)
    sys.modules[name] = sys.modules["__main__"] = module
    sys.argv = [f"{ANSWER}.py"]
    random.seed(0)
    return module


def _short(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()[-ERROR_CHARACTERS:]
