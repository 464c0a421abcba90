"""What a confined process does: run a script, hold the functions of an answer, or run tests against those.

Each function takes over a process that the fork server has made; it has given up its rights before it reads the first
byte of code. Imports the standard library only.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import os
import random
import sys
import threading
import traceback
import types
import unittest
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from verl_lite.sandbox.values import as_line, decode, encode, read_line

ANSWER, TESTS = "answer", "tests"
"""Names of the modules that the code becomes."""

LIBRARY = (
    "bisect collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string typing dataclasses enum numbers"
).split()
"""Imported before any program starts. What an answer imports from them under its own name, tests see as well."""

_ERROR_CHARACTERS = 500


def run_script(task: int, reply: int) -> int:
    """task: {"code"}. reply gets {"compiled": bool} and is closed; then the code runs. Gives its exit code."""
    with _Line(task, reply) as line:
        compiled = _compile(line.read()["code"], line)
    if compiled is None:
        return 1
    exit_code = 0
    try:
        exec(compiled, _become_main("__main__").__dict__)
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

    reply gets {"compiled": bool}, {"names"} or {"raised"} once the code has run, then an answer for each request:
    {"do": "call", "get" or "set", "on": a name or the number of a held object, "args", "kwargs"} gives {"value",
    "after": arguments changed in place} or {"raised"}.
    """
    line = _Line(task, reply)
    message = line.read()
    compiled = _compile(message["code"], line)
    if compiled is None:
        return
    if not message["has_requests"]:
        line = _Line(reply, reply)
    namespace = _become_main(ANSWER).__dict__
    held: list[Any] = []

    def export(value: Any) -> dict[str, int]:
        held.append(value)  # never forgotten: the process lives for one answer
        return {"held": len(held) - 1}

    def find(data: dict[str, Any]) -> Any:
        on = data["held"]
        if isinstance(on, str) and on not in namespace and "Solution" in namespace:
            return getattr(namespace["Solution"](), on)
        return namespace[on] if isinstance(on, str) else held[on]

    def do(request: dict[str, Any]) -> dict[str, Any]:
        target, args = find({"held": request["on"]}), decode(request["args"], find)
        kwargs = {name: decode(value, find) for name, value in request.get("kwargs", {}).items()}
        match request["do"]:
            case "get":
                return {"value": encode(getattr(target, *args), export), "after": {}}
            case "set":
                setattr(target, *args)
                return {"value": None, "after": {}}
        value = encode(target(*args, **kwargs), export)
        changeable = [place for place, arg in enumerate(args) if type(arg) in (list, dict, set, bytearray, deque)]
        return {"value": value, "after": {place: encode(args[place], export) for place in changeable}}

    def run() -> dict[str, Any]:
        exec(compiled, namespace)
        return {"names": {name: _described(name, value) for name, value in namespace.items() if name[:2] != "__"}}

    line.write(_answered(run))
    while True:
        try:
            request = line.read()
        except (EOFError, OSError):
            return
        line.write(_answered(do, request))


def run_tests(task: int, reply: int, answer: int) -> None:
    """task: {"tests": [snippet], "setup", "call", "stop_early"}; `answer` leads to a process that holds functions.

    Tells {"broken": why} if a snippet is no Python, {"tests": n} when the number of tests is known, and for each test
    {"passed": true} or {"error"}.
    """
    line = _Line(task, reply)
    message, tested = line.read(), _Answer(answer)
    snippets = []
    for text in (message["setup"], *message["tests"]):
        try:
            snippets.append(compile(text, TESTS, "exec", dont_inherit=True))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return line.write({"broken": str(error)})
    setup, *tests = snippets
    compiled = tested.line.read()
    if not compiled["compiled"]:
        return line.write(compiled)
    ran = tested.line.read()
    if "raised" in ran:
        for _ in tests:
            line.write(ran)
        return
    names, count = tested.bind(ran["names"]), len(tests)
    for snippet in tests:
        outcomes = _outcomes(tested, setup, snippet, names, message["call"])
        count += next(outcomes) - 1
        line.write({"tests": count})
        for failure in outcomes:
            line.write({"error": failure} if failure else {"passed": True})
            if failure and message["stop_early"]:
                return


class _Line:
    """Messages in by one descriptor and out by another; closed with the block."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = open(source, "rb"), sink

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *raised: object) -> None:
        self._source.close()
        os.close(self._sink)

    def read(self) -> dict[str, Any]:
        """Waits for one message. Raises EOFError, Unreadable."""
        return read_line(self._source)

    def write(self, message: dict[str, Any]) -> None:
        """Sends one message. Raises Unreadable if it is too long, OSError if nobody reads."""
        data = memoryview(as_line(message))
        while data:
            data = data[os.write(self._sink, data) :]


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


def _described(name: str, value: Any) -> dict[str, Any] | None:
    """What a test has to know of something that the answer defines; None if it is nothing for tests."""
    if isinstance(value, types.ModuleType):
        return {"library": [value.__name__, ""]} if value.__name__ == name else None
    module = getattr(value, "__module__", None)
    if module in LIBRARY and vars(sys.modules[module]).get(name) is value:
        return {"library": [module, name]}
    if isinstance(value, type) and issubclass(value, Exception):
        base = next(kind.__name__ for kind in value.__mro__ if kind.__module__ == "builtins")
        return {"exception": [value.__name__, base]}
    if callable(value):
        return {"held": name}
    try:
        return {"value": encode(value)}
    except Exception:  # an object: tests get it from functions, if at all
        return None


class _Answer:
    """The tested code as tests see it. is_gone: its process has ended, so that no test passes any more."""

    def __init__(self, fd: int) -> None:
        self.line, self.is_gone = _Line(fd, fd), False
        self._objects: dict[str | int, _Held] = {}
        self._exceptions: dict[str, type[Exception]] = {}

    def request(self, do: str, on: str | int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Has the other process do something. Raises what that raised, or EOFError."""
        encoded = {name: encode(value, _held_number) for name, value in kwargs.items()}
        try:
            self.line.write({"do": do, "on": on, "args": encode(list(args), _held_number), "kwargs": encoded})
            reply = self.line.read()
        except (EOFError, OSError) as error:
            self.is_gone = True
            raise EOFError("the process of the tested code has ended") from error
        if "raised" in reply:
            raised = reply["raised"]
            raise self._exceptions.get(raised["name"], _exception_type(raised["base"]))(raised["text"])
        for place, after in reply["after"].items():
            _replace(args[int(place)], decode(after, self._object))
        return decode(reply["value"], self._object)

    def bind(self, names: dict[str, Any]) -> dict[str, Any]:
        """What the tests find under each name."""
        bound: dict[str, Any] = {}
        for name, described in names.items():
            match described:
                case {"library": [str(module), str(entry)]} if module in LIBRARY and name in (module, entry):
                    library = importlib.import_module(module)
                    bound[name] = getattr(library, entry) if entry else library
                case {"exception": [str(kind), str(base)]}:
                    bound[name] = self._exceptions[kind] = type(kind, (_exception_type(base),), {})
                case {"held": str(held)}:
                    bound[name] = self._object({"held": held})
                case {"value": value}:
                    bound[name] = decode(value)
        return bound

    def _object(self, data: dict[str, Any]) -> _Held:
        number = data["held"]
        return self._objects.setdefault(number, _Held(self, number))


class _Held:
    """Something that stays in the process of the answer: tests call it and read or set its attributes, no more. It is
    equal to itself only, whatever its class says."""

    __slots__ = ("__answer", "__on")

    def __init__(self, answer: _Answer, on: str | int) -> None:
        object.__setattr__(self, "_Held__answer", answer)
        object.__setattr__(self, "_Held__on", on)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__answer.request("call", self.__on, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self.__answer.request("get", self.__on, (name,), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self.__answer.request("set", self.__on, (name, value), {})


def _held_number(value: Any) -> dict[str, Any]:
    if type(value) is not _Held:
        raise TypeError(f"a test can hand plain values to an answer, and no {type(value).__name__}")
    return {"held": object.__getattribute__(value, "_Held__on")}


def _exception_type(name: Any) -> type[Exception]:
    """A built-in exception. SystemExit and its like, which end a process, become RuntimeError."""
    found = getattr(builtins, str(name), None)
    return found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError


def _replace(ours: Any, theirs: Any) -> None:
    """Gives a container of ours the content that it got over there."""
    if isinstance(ours, list | bytearray):
        ours[:] = theirs
    elif isinstance(ours, dict | set | deque):
        ours.clear()
        getattr(ours, "extend" if isinstance(ours, deque) else "update")(theirs)


def _outcomes(
    tested: _Answer, setup: types.CodeType, snippet: types.CodeType, names: dict[str, Any], call: str | None
) -> Iterator[Any]:
    """First how many tests a snippet has: its `test_*` functions and `TestCase`s, or one, itself; then the error of
    each, None if it passed."""
    module = types.ModuleType(TESTS)
    sys.modules[TESTS] = module
    for alias in ("solution", ANSWER):
        sys.modules[alias] = types.ModuleType(alias)
        vars(sys.modules[alias]).update(names)
    namespace = vars(module)  # what is built in stays so: an answer may not bring its own `all` or `sorted`
    namespace.update({name: value for name, value in names.items() if not hasattr(builtins, name)})
    error = _raised(tested, exec, setup, namespace) or _raised(tested, exec, snippet, namespace)
    if error is None and call is not None:
        error = _raised(tested, lambda: namespace["check"](names[call]))
    cases = [] if error is not None or call is not None else _cases(namespace)
    yield max(1, len(cases))
    if not cases:
        yield error
    for case in cases:
        yield _raised(tested, case)


def _cases(namespace: dict[str, Any]) -> list[Any]:
    own = {name: value for name, value in namespace.items() if getattr(value, "__module__", None) == TESTS}
    functions = [value for name, value in own.items() if name.startswith("test_") and type(value) is types.FunctionType]
    classes = [value for value in own.values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    methods = [kind(name) for kind in classes for name in unittest.defaultTestLoader.getTestCaseNames(kind)]
    return [*functions, *(case.debug for case in methods)]


def _raised(tested: _Answer, test: Callable[..., object], *args: Any) -> str | None:
    """What a test raised, None if it passed."""
    try:
        test(*args)
    except BaseException as error:  # the door to the tests' code; SystemExit passes no test either
        return _short(error)
    return "the process of the tested code has ended" if tested.is_gone else None


def _compile(code: str, line: _Line) -> types.CodeType | None:
    """The code, if it is Python; tells so."""
    try:
        compiled = compile(code, f"{ANSWER}.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        line.write({"compiled": False, "error": _short(error)})
        return None
    line.write({"compiled": True})
    return compiled


def _become_main(name: str) -> types.ModuleType:
    """An empty module, found under its name as `sys.modules` has it, and a fresh generator of random numbers."""
    module = types.ModuleType(name)
    sys.modules[name] = sys.modules["__main__"] = module
    sys.argv = [f"{ANSWER}.py"]
    random.seed(0)
    return module


def open_streams() -> None:
    """Python's own stdin, stdout and stderr on the descriptors 0, 1 and 2."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    streams = sys.stdin, sys.stdout, sys.stderr
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]


def finish(code: int) -> None:
    """Ends the process, with what it printed written out."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the file is full, or the code closed it
            code = code or 1
    os._exit(code)


def _short(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()[-_ERROR_CHARACTERS:]
