"""What a confined process does: run a script, hold the functions of an answer, or run tests against those.

Each function takes over a process that the fork server has made; it has given up its rights before it reads the first
byte of code. Between functions and tests go plain values only. Imports the standard library only.
"""

import atexit
import builtins
import contextlib
import functools
import os
import random
import sys
import threading
import traceback
import types
import unittest
from collections import deque
from collections.abc import Callable
from typing import IO, Any

from verl_lite.sandbox.values import as_line, decode, encode, read_line

ANSWER, TESTS = "answer", "tests"
"""Names of the modules that the code becomes."""

LIBRARY = (
    "bisect collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string typing dataclasses enum numbers"
).split()
"""Imported before any program starts; tests find them under their names."""

_ERROR_CHARACTERS = 500


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
    or with "args": null for its attribute, which is {"function": true} where it can be called.
    """
    requests = open(task, "rb")
    message = read_line(requests)
    compiled = _compile(message["code"], reply)
    if compiled is None:
        return
    if not message["has_requests"]:
        requests = open(reply, "rb", closefd=False)
    namespace, held = _become_main(ANSWER).__dict__, list[Any]()

    def given(value: Any) -> dict[str, Any]:
        if (plain := _plain(value)) is None:
            held.append(value)
            return {"object": len(held) - 1}
        return plain

    def run() -> dict[str, Any]:
        exec(compiled, namespace)
        return {"names": {name: _described(value) for name, value in namespace.items() if name[:2] != "__"}}

    def do(request: dict[str, Any]) -> dict[str, Any]:
        name, of = request["call"], request.get("of")
        if of is not None:
            function = getattr(held[of], name)
        elif name not in namespace and "Solution" in namespace:
            function = getattr(namespace["Solution"](), name)
        else:
            function = namespace[name]
        if request["args"] is None:
            return {"function": True} if callable(function) else given(function)
        args = decode(request["args"])
        value = given(function(*args, **decode(request["kwargs"])))
        return value | {"after": [_plain(arg) if type(arg) in _CHANGEABLE else None for arg in args]}

    _tell(reply, _answered(run))
    with contextlib.suppress(EOFError, OSError):
        while True:
            _tell(reply, _answered(do, read_line(requests)))


def run_tests(task: int, reply: int, answer: int) -> None:
    """task: {"tests": [snippet], "setup", "call", "stop_early"}; `answer` leads to a process that holds functions.

    Tells {"broken": why} if a snippet is no Python, {"tests": n} when the number of tests is known, and for each test
    {"passed": true} or {"error"}.
    """
    with open(task, "rb") as file:
        message = read_line(file)
    tested, snippets = _Answer(answer), []
    for text in (message["setup"], *message["tests"]):
        try:
            snippets.append(compile(text, TESTS, "exec", dont_inherit=True))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return _tell(reply, {"broken": str(error)})
    setup, *tests = snippets
    ran = read_line(tested.replies)
    if "names" not in ran:
        return _tell(reply, ran)
    names, count = tested.bind(ran["names"]), len(tests)
    for snippet in tests:
        namespace = _namespace(names)
        problem = _raised(tested, exec, setup, namespace) or _raised(tested, exec, snippet, namespace)
        cases = [] if problem else _cases(namespace, names, message["call"])
        count += max(1, len(cases)) - 1
        _tell(reply, {"tests": count})
        for failure in (_raised(tested, case) for case in cases) if cases else [problem]:
            _tell(reply, {"error": failure} if failure else {"passed": True})
            if failure and message["stop_early"]:
                return


def _tell(fd: int, message: dict[str, Any]) -> None:
    data = memoryview(as_line(message))
    while data:
        data = data[os.write(fd, data) :]


def _answered(work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    try:
        return work(*args)
    except BaseException as error:  # the door to untrusted code: what it raises is told
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        try:
            text = str(error)[:_ERROR_CHARACTERS]
        except Exception:  # its own __str__ is untrusted, too
            text = ""
        return {"raised": {"name": type(error).__name__, "base": kinds[0], "text": text}}


def _described(value: Any) -> dict[str, Any] | None:
    """What a test has to know of something that the answer defines; None if it is nothing for tests."""
    if isinstance(value, type) and issubclass(value, Exception):
        base = next(kind.__name__ for kind in value.__mro__ if kind.__module__ == "builtins")
        return {"exception": [value.__name__, base]}
    if callable(value):
        return {"function": True}
    return _plain(value)


def _plain(value: Any) -> dict[str, Any] | None:
    try:
        return {"value": encode(value)}
    except Exception:  # an object, or whatever its class raises
        return None


class _Answer:
    """The tested code as tests see it. is_gone: its process has ended, so that no test passes any more."""

    def __init__(self, fd: int) -> None:
        self.replies: IO[bytes] = open(fd, "rb")
        self.is_gone = False
        self._exceptions: dict[str, type[Exception]] = {}

    def call(self, of: int | None, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Has the other process call a function, or a method of an object there."""
        reply = self._ask({"call": name, "of": of, "args": encode(list(args)), "kwargs": encode(kwargs)})
        for ours, after in zip(args, reply["after"], strict=True):
            if after is not None:
                _replace(ours, decode(after["value"]))
        return self._given(reply)

    def get(self, of: int, name: str) -> Any:
        """An attribute of an object there."""
        reply = self._ask({"call": name, "of": of, "args": None})
        return functools.partial(self.call, of, name) if "function" in reply else self._given(reply)

    def _given(self, reply: dict[str, Any]) -> Any:
        return _Held(self, reply["object"]) if "object" in reply else decode(reply["value"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises what the other process raised, or EOFError."""
        try:
            _tell(self.replies.fileno(), request)
            reply = read_line(self.replies)
        except (EOFError, OSError) as error:
            self.is_gone = True
            raise EOFError("the process of the tested code has ended") from error
        if "raised" in reply:
            raised = reply["raised"]
            raise self._exceptions.get(raised["name"], _exception_type(raised["base"]))(raised["text"])
        return reply

    def bind(self, names: dict[str, Any]) -> dict[str, Any]:
        """What the tests find under each name."""
        bound: dict[str, Any] = {}
        for name, described in names.items():
            match described:
                case {"exception": [str(kind), str(base)]}:
                    bound[name] = self._exceptions[kind] = type(kind, (_exception_type(base),), {})
                case {"function": True}:
                    bound[name] = functools.partial(self.call, None, name)
                case {"value": value}:
                    bound[name] = decode(value)
        return bound


class _Held:
    """An object of the answer's, which stays in its process: methods and attributes are asked for, nothing else."""

    def __init__(self, answer: _Answer, number: int) -> None:
        self._answer, self._number = answer, number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._answer.get(self._number, name)


def _exception_type(name: Any) -> type[Exception]:
    """A built-in exception. SystemExit and its like, which end a process, become RuntimeError."""
    found = getattr(builtins, str(name), None)
    return found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError


_CHANGEABLE = (list, dict, set, bytearray, deque)


def _replace(ours: Any, theirs: Any) -> None:
    """Gives a container of ours the content that it got over there."""
    if isinstance(ours, list | bytearray):
        ours[:] = theirs
    elif isinstance(ours, dict | set | deque):
        ours.clear()
        getattr(ours, "extend" if isinstance(ours, deque) else "update")(theirs)


def _namespace(names: dict[str, Any]) -> dict[str, Any]:
    """Of a new module for one snippet, which finds what the answer defines also as a module to import from."""
    sys.modules[TESTS] = types.ModuleType(TESTS)
    for alias in ("solution", ANSWER):
        sys.modules[alias] = types.ModuleType(alias)
        vars(sys.modules[alias]).update(names)
    namespace = vars(sys.modules[TESTS])  # what is built in stays so: an answer may not bring its own `all` or `sorted`
    namespace.update({name: sys.modules[name] for name in LIBRARY})
    namespace.update({name: value for name, value in names.items() if not hasattr(builtins, name)})
    return namespace


def _cases(namespace: dict[str, Any], names: dict[str, Any], call: str | None) -> list[Callable[[], object]]:
    """The tests that a snippet defines: its `check` of `call`, or its `test_*` functions and `TestCase`s; none where it
    is a test itself."""
    if call is not None:
        return [lambda: namespace["check"](names[call])]
    own = {name: value for name, value in namespace.items() if getattr(value, "__module__", None) == TESTS}
    functions = [value for name, value in own.items() if name.startswith("test_") and type(value) is types.FunctionType]
    classes = [value for value in own.values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    methods = [kind(name) for kind in classes for name in unittest.defaultTestLoader.getTestCaseNames(kind)]
    return [*functions, *(case.debug for case in methods)]


def _raised(tested: _Answer, test: Callable[..., object], *args: Any) -> str | None:
    try:
        test(*args)
    except BaseException as error:  # the door to the tests' code; SystemExit passes no test either
        return _short(error)
    return "the process of the tested code has ended" if tested.is_gone else None


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
    return "".join(traceback.format_exception_only(type(error), error)).strip()[-_ERROR_CHARACTERS:]
