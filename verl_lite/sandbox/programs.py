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

from verl_lite.sandbox.values import FORGED, Unreadable, as_line, decode, encode, fields, read_line

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
    or with "args": null for its attribute, which is {"function": true} where it can be called. Each answer has the
    "number" of its request. The code can write to `reply` as well, so a reader takes nothing but these shapes.
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
        return {"names": {name: _described(value) for name, value in namespace.items() if _is_name(name)}}

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
            request = read_line(requests)
            _tell(reply, _answered(do, request) | {"number": request["number"]})


def run_tests(task: int, reply: int, answer: int) -> None:
    """task: {"tests": [snippet], "setup", "call", "stop_early"}; `answer` leads to a process that holds functions.

    Tells {"broken": why} if a snippet is no Python, {"tests": n} when the number of tests is known, and for each test
    {"passed": true} or {"error"}. Every message is built here; none that the answer's process sends is passed on.
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
    names, unusable = tested.begin()
    if unusable:
        return _tell(reply, unusable)
    count = len(tests)
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
    _send(fd, as_line(message))


def _send(fd: int, line: bytes) -> None:
    data = memoryview(line)
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
        return {"exception": value.__name__, "base": base}
    if callable(value):
        return {"function": True}
    return _plain(value)


def _is_name(name: str) -> bool:
    """Whether tests may find something under it. `__name__` and its like are the test module's own."""
    return name.isidentifier() and name[:2] != "__"


def _plain(value: Any) -> dict[str, Any] | None:
    try:
        return {"value": encode(value)}
    except Exception:  # an object, or whatever its class raises
        return None


class _TestEnds(BaseException):
    """Ends a test that can no longer pass. No `except Exception` and no `assertRaises` of a test catches it."""


class _Answer:
    """The tested code as tests see it. Its process is not trusted: whatever it sends is rebuilt field by field.

    problem: why the running test has failed, even if it catches everything. is_broken: the other process has ended or
    has sent a message of another shape, so that no later test passes either. requests: how many were sent.
    """

    def __init__(self, fd: int) -> None:
        self._line: IO[bytes] = open(fd, "rb")
        self._exceptions: dict[str, type[Exception]] = {}
        self._lock = threading.Lock()
        self.problem, self.is_broken, self.requests = "", False, 0

    def begin(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Waits until the code has run. Gives what tests find under each name, and how the code failed, as a message
        of `run_tests`."""
        try:
            first = self._read()
            if names := fields(first, names=dict):
                return self._bound(*names), None
            if failed := fields(first, compiled=bool, error=str):
                return {}, {"compiled": False, "error": failed[1][:_ERROR_CHARACTERS] or "no Python"}
            name, _, text = self._raised(first)
            return {}, {"error": f"{name}: {text}"[:_ERROR_CHARACTERS]}
        except _TestEnds:
            return {}, {"error": self.problem}

    def call(self, of: int | None, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Has the other process call a function, or a method of an object there."""
        reply = self._ask(name, of, list(args), kwargs)
        changed = reply.pop("after", None)
        if type(changed) is not list or len(changed) != len(args):
            raise self._broken()
        for ours, after in zip(args, changed, strict=True):
            if after is not None and not _replace(ours, self._decoded(after)):
                raise self._broken()
        return self._given(reply)

    def get(self, of: int, name: str) -> Any:
        """An attribute of an object there."""
        reply = self._ask(name, of, None, {})
        return functools.partial(self.call, of, name) if reply == {"function": True} else self._given(reply)

    def _given(self, reply: dict[str, Any]) -> Any:
        number = fields(reply, object=int)
        return _Held(self, *number) if number and number[0] >= 0 else self._decoded(reply)

    def _decoded(self, described: Any) -> Any:
        try:
            if found := fields(described, value=object):
                return decode(*found)
        except (Unreadable, MemoryError):
            pass
        raise self._broken()

    def _ask(self, name: str, of: int | None, args: list[Any] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises what the other process raised."""
        with self._lock:  # a test may have threads
            if self.is_broken:
                raise _TestEnds(self.problem)
            self.requests += 1
            request = {"call": name, "of": of, "number": self.requests}
            try:
                line = as_line(request | {"args": args if args is None else encode(args), "kwargs": encode(kwargs)})
            except (Unreadable, RecursionError) as error:
                self.problem = f"an argument of {name} does not reach the tested code: {error}"
                raise _TestEnds(self.problem) from error
            reply = self._read(line)
            if reply.pop("number", None) != self.requests:
                raise self._broken()
        if "raised" in reply:
            kind, base, text = self._raised(reply)
            raise self._exceptions.get(kind, _exception_type(base))(text[:_ERROR_CHARACTERS])
        return reply

    def _read(self, request: bytes = b"") -> dict[str, Any]:
        try:
            _send(self._line.fileno(), request)
            return read_line(self._line)
        except (EOFError, OSError) as error:
            raise self._broken("the process of the tested code has ended") from error
        except (Unreadable, MemoryError) as error:
            raise self._broken() from error

    def _raised(self, message: dict[str, Any]) -> list[str]:
        """Name, base and text of an exception."""
        inner = fields(message, raised=dict)
        found = fields(inner[0], name=str, base=str, text=str) if inner else None
        if found is None:
            raise self._broken()
        return found

    def _broken(self, why: str = FORGED) -> _TestEnds:
        self.problem, self.is_broken = why, True
        return _TestEnds(why)

    def _bound(self, names: dict[str, Any]) -> dict[str, Any]:
        """What the tests find under each name."""
        bound: dict[str, Any] = {}
        for name, described in names.items():
            if not _is_name(name):
                raise self._broken()
            if exception := fields(described, exception=str, base=str):
                bound[name] = self._exceptions[exception[0]] = type(name, (_exception_type(exception[1]),), {})
            elif described == {"function": True}:
                bound[name] = functools.partial(self.call, None, name)
            elif described is not None:
                bound[name] = self._decoded(described)
        return bound


class _Held:
    """An object of the answer's, which stays in its process: methods and attributes are asked for, nothing else."""

    def __init__(self, answer: _Answer, number: int) -> None:
        self._answer, self._number = answer, number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._answer.get(self._number, name)


def _exception_type(name: str) -> type[Exception]:
    """A built-in exception, or the base of it that needs no more than a text. RuntimeError stands in for SystemExit and
    its like, which end a process, and for StopIteration, which would end a loop of the test's (as PEP 479 has it)."""
    found = getattr(builtins, name, None)
    if not isinstance(found, type) or not issubclass(found, Exception) or issubclass(found, _ENDS_LOOPS):
        return RuntimeError
    return next(kind for kind in found.__mro__ if issubclass(kind, Exception) and not issubclass(kind, _NEEDS_MORE))


_ENDS_LOOPS = (StopIteration, StopAsyncIteration)
_NEEDS_MORE = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, BaseExceptionGroup)
_CHANGEABLE = (list, dict, set, bytearray, deque)


def _replace(ours: Any, theirs: Any) -> bool:
    """Gives a container of ours the content that it got over there. False if the two are not of one kind."""
    kind = next((kind for kind in _CHANGEABLE if isinstance(ours, kind)), None)
    if type(theirs) is not kind:
        return False
    if isinstance(ours, list | bytearray):
        ours[:] = theirs
    else:
        ours.clear()
        getattr(ours, "extend" if isinstance(ours, deque) else "update")(theirs)
    return True


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


def _cases(namespace: dict[str, Any], names: dict[str, Any], call: str | None) -> list[Callable[[], object]]:
    """The tests that a snippet defines: its `check` of `call`, or its `test_*` functions and `TestCase`s; none where it
    is a test itself."""
    own = {name: value for name, value in namespace.items() if getattr(value, "__module__", None) == TESTS}
    if call is not None:
        return [lambda: own["check"](names[call])]
    functions = [value for name, value in own.items() if name.startswith("test_") and type(value) is types.FunctionType]
    classes = [value for value in own.values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    methods = [kind(name) for kind in classes for name in unittest.defaultTestLoader.getTestCaseNames(kind)]
    return [*functions, *(case.debug for case in methods)]


def _raised(tested: _Answer, test: Callable[..., object], *args: Any) -> str | None:
    tested.problem = tested.problem if tested.is_broken else ""
    try:
        test(*args)
    except BaseException as error:  # the door to the tests' code; SystemExit passes no test either
        return tested.problem or _short(error)
    return tested.problem or None


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
