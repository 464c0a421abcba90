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
from typing import TYPE_CHECKING, Any, TypeVarTuple

from verl_lite.json_types import JsonObject
from verl_lite.sandbox.answer import CHANGEABLE, Namespace, UntrustedCode, is_name
from verl_lite.sandbox.values import ERROR_CHARACTERS, as_line, decode, encode, read_line, send

if TYPE_CHECKING:
    from _typeshed import OptExcInfo

Arguments = TypeVarTuple("Arguments")

ANSWER = "answer"
TESTS = "tests"
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

    recv = io.FileIO.read
    send = io.FileIO.write

    def setblocking(self, blocks: bool) -> None:
        os.set_blocking(self.fileno(), blocks)


def prepare() -> None:
    """Imports the modules that programs can use without importing them, and makes asyncio work without sockets."""
    for name in (*LIBRARY, *_PRELUDE_MODULES):
        __import__(name)

    def pipe_ends() -> tuple[_PipeEnd, _PipeEnd]:
        readable, writable = os.pipe()
        reader = _PipeEnd(readable, "r")
        writer = _PipeEnd(writable, "w")
        return reader, writer

    # only for asyncio: a program that uses the module `socket` itself meets the filter of system calls
    sockets = vars(socket) | {"socketpair": pipe_ends}
    vars(asyncio.selector_events)["socket"] = types.SimpleNamespace(**sockets)


def run_script(task: int, reply: int) -> int:
    """Runs code as a script and returns its exit code.

    Args:
        task: file with {"code"}.
        reply: receives {"compiled": false, "error"} if the code is not valid Python; it is closed before the code
            runs.
    """
    _prepare_answer()
    with open(task, "rb") as file:
        message = read_line(file)
    compiled = _compile(message["code"], reply)
    # so that the code cannot forge an error of its compilation
    os.close(reply)
    exit_code = 0 if compiled else 1
    try:
        exec(compiled or "", vars(_become_main("__main__")))
    except SystemExit as end:
        # as Python does: None is success, and any other object a failure
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # untrusted code may raise anything
        traceback.print_exc()
        exit_code = 1

    # what Python does when a script ends: this process leaves by `os._exit`, which does neither
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    # as the kernel does with an exit status
    return exit_code & 0xFF


def hold_functions(task: int, reply: int) -> None:
    """Runs the answer's code, then serves requests to call its functions.

    Args:
        task: file with {"code", "has_requests"}. The requests follow in this file if "has_requests" is true, else they
            come from `reply`.
        reply: first receives {"names"} when the code has run, or {"compiled": false, "error"} or {"raised"}. Then it
            receives one reply per request, with the request's "number".

    Requests and replies:

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
    describes_names = not message["has_requests"]
    _send(reply, _reply_or_raised(held.run, compiled, describes_names))
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = read_line(requests)
            answer = _reply_or_raised(held.serve, request)
            _send(reply, answer | {"number": request["number"]})


class _HeldCode:
    """The module of an answer's code, and the objects that its functions have returned. See `hold_functions`."""

    def __init__(self) -> None:
        self._namespace: Namespace = vars(_become_main(ANSWER))
        self._objects: list[object] = []
        # one loop for all calls, since objects of the code may be bound to it
        self._runner = asyncio.Runner()

    def run(self, compiled: types.CodeType, describes_names: bool) -> JsonObject:
        """Runs the code.

        Returns:
            The reply to the request that holds the code: `names`, what tests can do with each public name; empty unless
            `describes_names`.
        """
        exec(compiled, self._namespace)
        descriptions = {}
        if describes_names:
            # a copy, because `len` of an object of the answer may run code that adds names
            for name, value in list(self._namespace.items()):
                if is_name(name):
                    descriptions[name] = _describe(value)
        return {"names": descriptions}

    def serve(self, request: JsonObject) -> JsonObject:
        """Returns the reply to a request, without its number."""
        attribute = self._find(request["call"], request.get("of"))
        if request["args"] is None:
            if callable(attribute):
                return _function(attribute)
            return self._value_or_object(attribute)
        args = decode(request["args"])
        kwargs = decode(request["kwargs"])
        returned = attribute(*args, **kwargs)
        if inspect.iscoroutine(returned):
            returned = self._runner.run(returned)
        reply = self._value_or_object(returned)

        # functions that work in place return nothing: tests look at their arguments
        after: list[JsonObject | None] = []
        for arg in args:
            after.append(_plain(arg) if type(arg) in CHANGEABLE else None)
        reply["after"] = after
        return reply

    def _find(self, name: str, object_number: int | None) -> Any:
        """Returns the attribute of a held object, or a function of the code, also as a method of its `Solution`."""
        if object_number is not None:
            held = self._objects[object_number]
            return getattr(held, name)
        if name not in self._namespace and "Solution" in self._namespace:
            # a new object per call, as LeetCode makes it
            solution = self._namespace["Solution"]()
            return getattr(solution, name)
        return self._namespace[name]

    def _value_or_object(self, value: object) -> JsonObject:
        """Returns the value, or for a value that is not plain the number under which this process keeps it."""
        plain = _plain(value)
        if plain is not None:
            return plain
        self._objects.append(value)
        return {"object": len(self._objects) - 1}


def run_tests(task: int, reply: int, answer: int) -> None:
    """Runs tests against the functions of an answer.

    This process builds every message itself and never forwards a message of the answer's process.

    Args:
        task: file with {"tests": [snippet], "setup", "call", "stop_early"}.
        reply: receives {"broken": reason} if a snippet is not valid Python, {"tests": n} when the number of tests is
            known, and {"passed": true} or {"error"} for each test.
        answer: connection to the process that runs `hold_functions`.
    """
    _allow_long_integers()
    with open(task, "rb") as file:
        message = read_line(file)
    tested = UntrustedCode(answer)

    # before the code is waited for: invalid tests are an error of the data, whatever the code does
    texts = [message["setup"], *message["tests"]]
    try:
        setup, *tests = [compile(text, TESTS, "exec", dont_inherit=True) for text in texts]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return _send(reply, {"broken": str(error)})
    names, failure_of_code = tested.begin()
    if failure_of_code:
        return _send(reply, failure_of_code)

    # this function runs the tests instead
    vars(unittest)["main"] = lambda *args, **kwargs: None
    count = len(tests)
    for snippet in tests:
        namespace = _namespace(names)
        cases: list[unittest.TestCase] = []
        problem = (
            _error_of(tested, exec, setup, namespace)
            or _error_of(tested, exec, snippet, namespace)
            or _error_of(tested, _collect, cases, namespace, names, message["call"])
        )
        # the snippet itself counts as one already
        further_cases = max(0, len(cases) - 1)
        count += further_cases
        # before the tests run, so that a killed process leaves the right number
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

    So the code's own names, and the real builtins, take precedence, and tests do not see these names as the answer's.
    """
    _allow_long_integers()
    prelude: Namespace = {}
    for module_name in _PRELUDE_MODULES:
        module = sys.modules[module_name]
        public_names = [name for name in vars(module) if not name.startswith("_")]
        for name in getattr(module, "__all__", public_names):
            # collections has the real Counter and OrderedDict
            if module_name != "typing" or name not in prelude:
                prelude[name] = getattr(module, name)

    # last, because `from datetime import *` and others give the name of a module to something else
    for module_name in _PRELUDE_MODULES:
        prelude[module_name] = sys.modules[module_name]
    for name, value in prelude.items():
        vars(builtins).setdefault(name, value)


def _allow_long_integers() -> None:
    """Removes Python's limit of 4300 digits for conversions. The limit of the processor time remains."""
    sys.set_int_max_str_digits(0)


def _send(fd: int, message: JsonObject) -> None:
    send(fd, as_line(message))


def _reply_or_raised(work: Callable[[*Arguments], JsonObject], *args: *Arguments) -> JsonObject:
    """Returns the reply of `work`, or the description of the exception that it raises."""
    try:
        return work(*args)
    except BaseException as error:  # untrusted code may raise anything
        try:
            text = str(error)[:ERROR_CHARACTERS]
        except Exception:
            # the __str__ of an exception is untrusted too
            text = ""
        kind = type(error)
        return {"raised": {"name": kind.__name__, "base": _builtin_base(kind), "text": text}}


def _describe(value: object) -> JsonObject | None:
    """Returns the description of a value that the answer defines, None if tests cannot use the value."""
    if isinstance(value, type) and issubclass(value, Exception):
        return {"exception": value.__name__, "base": _builtin_base(value)}
    # len() may run code of the answer; an exception there is reported as one of the whole code
    is_long = isinstance(value, Sized) and not isinstance(value, type) and len(value) > _NAMED_ITEMS_MAX
    if callable(value):
        return _function(value)
    if is_long:
        return None
    return _plain(value)


def _builtin_base(kind: type[BaseException]) -> str:
    """Returns the name of the nearest exception of Python itself, as which the tests' process rebuilds this one."""
    # never empty, since BaseException is one
    builtin_bases = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    return builtin_bases[0].__name__


def _function(value: Callable[..., object]) -> JsonObject:
    """Returns the description of a function."""
    if inspect.iscoroutinefunction(value):
        return {"coroutine": True}
    return {"function": True}


def _plain(value: object) -> JsonObject | None:
    """Returns the encoded value, None if it is not plain."""
    try:
        return {"value": encode(value)}
    except Exception:
        # not a plain value, or its class raised an exception
        return None


def _namespace(names: Namespace) -> Namespace:
    """Returns the namespace of a new module for one snippet, and makes the answer importable as a module."""
    for alias in ("solution", ANSWER):
        module = types.ModuleType(alias)
        # `import *` must not replace a test's imports
        vars(module).update(names, __all__=[])
        sys.modules[alias] = module

    # registered, because pickle and dataclasses look up a class in its module
    tests_module = types.ModuleType(TESTS)
    sys.modules[TESTS] = tests_module
    namespace = vars(tests_module)
    for name in LIBRARY:
        namespace[name] = sys.modules[name]
    for name, value in names.items():
        # an answer must not replace `all` or `sorted` in the tests
        if not hasattr(builtins, name):
            namespace[name] = value
    return namespace


class _Result(unittest.TestResult):
    """Reports the result of each test of a snippet when the test ends.

    Attributes:
        tests: number of tests of all snippets, without the skipped tests.
    """

    def __init__(self, reply: int, tested: UntrustedCode, tests: int, stop_early: bool) -> None:
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
        """Reports a test, with the reason of its failure; an empty reason means that it has passed."""
        if not failure:
            _send(self._reply, {"passed": True})
            return
        _send(self._reply, {"error": failure})
        if self._stop_early:
            self.stop()

    def startTest(self, test: unittest.TestCase) -> None:
        self._tested.begin_test()
        self._failure = ""
        self._is_skipped = False
        self._requests = self._tested.requests

    def stopTest(self, test: unittest.TestCase) -> None:
        # a skip removes a test from the score, so the tested code must not be able to cause it
        if self._is_skipped and self._requests != self._tested.requests:
            self._failure = "the test skipped itself after it had called the tested code"
        if self._is_skipped and not self._failure:
            self.tests -= 1
            _send(self._reply, {"tests": self.tests})
        else:
            self.report(self._tested.problem or self._failure)

    def addError(self, test: unittest.TestCase, err: "OptExcInfo") -> None:
        self._failure = _short(err[1])
        # a fixture of a class or a module, such as setUpClass
        if not isinstance(test, unittest.TestCase):
            self.report(self._failure)

    addFailure = addError

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: "OptExcInfo | None") -> None:
        if err is not None:
            self.addError(subtest, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._is_skipped = True

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._failure = "a test that was expected to fail has passed"


def _collect(cases: list[unittest.TestCase], namespace: Namespace, names: Namespace, call: str | None) -> None:
    """Adds the tests that a snippet defines to `cases`; adds nothing if the snippet itself is the test.

    Args:
        cases: the tests of the snippet, to which tests are added.
        namespace: the names of the snippet's module.
        names: the names of the answer's code.
        call: name of the answer's function with which the snippet's `check` is called, which is then the only test.
            None: the tests are the `test_*` functions, `TestCase`s and `Test*` classes.
    """
    # without the names that the snippet imported, or that come from the answer
    own = {name: value for name, value in namespace.items() if getattr(value, "__module__", None) == TESTS}
    if call is not None:
        # looked up when the test runs, which fails if a name is missing
        check = unittest.FunctionTestCase(lambda: own["check"](names[call]))
        cases.append(check)
        return

    for name, value in own.items():
        if isinstance(value, type):
            if issubclass(value, unittest.TestCase):
                cases += _cases_of_class(value)
            elif name.startswith("Test"):
                cases += _cases_of_class(_test_case(value))
        elif type(value) is types.FunctionType and name.startswith("test"):
            takes_arguments = bool(inspect.signature(value).parameters)
            # a function such as `testing(value)` is a helper of the tests
            if name.startswith("test_") or not takes_arguments:
                test = _running_coroutines(value)
                cases.append(unittest.FunctionTestCase(test))


def _cases_of_class(kind: type[unittest.TestCase]) -> list[unittest.TestCase]:
    """Returns a case for each test method of a class."""
    cases = []
    for method in unittest.defaultTestLoader.getTestCaseNames(kind):
        case = kind(method)
        # that class runs its coroutines itself
        if not issubclass(kind, unittest.IsolatedAsyncioTestCase):
            test = getattr(case, method)
            setattr(case, method, _running_coroutines(test))
        cases.append(case)
    return cases


_FIXTURES = {
    "setup_method": "setUp",
    "teardown_method": "tearDown",
    "setup_class": "setUpClass",
    "teardown_class": "tearDownClass",
}


def _test_case(kind: type) -> type[unittest.TestCase]:
    """Converts a pytest class of tests to a `TestCase`."""
    attributes: Namespace = {"__module__": TESTS}
    for name_in_pytest, name in _FIXTURES.items():
        if hasattr(kind, name_in_pytest):
            # static, so that a class method stays one
            attributes[name] = inspect.getattr_static(kind, name_in_pytest)
    return type(kind.__name__, (kind, unittest.TestCase), attributes)


def _running_coroutines(test: Callable[..., object]) -> Callable[..., None]:
    """Wraps a test so that a coroutine it returns is run. A generator fails, since nothing would run it."""

    @functools.wraps(test)
    def run(*args: object) -> None:
        returned = test(*args)
        if inspect.iscoroutine(returned):
            asyncio.run(returned)
        elif inspect.isgenerator(returned) or inspect.isasyncgen(returned):
            raise TypeError("a test that contains `yield` does not run")

    return run


def _error_of(tested: UntrustedCode, work: Callable[[*Arguments], object], *args: *Arguments) -> str:
    """Runs `work` and returns the reason of its failure, "" if it succeeds."""
    tested.begin_test()
    try:
        work(*args)
    except BaseException as error:
        # tests may raise anything; SystemExit is a failure too
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
    # so that a program that draws random numbers gets the same score in each run
    random.seed(0)
    return module


def _short(error: BaseException | None) -> str:
    """Returns the end of an exception's type and message. None is possible only by the types of unittest."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text[-ERROR_CHARACTERS:]
