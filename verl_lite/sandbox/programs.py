"""What a confined process does: run a program, hold the functions of an answer, or run tests against those.

Each function takes over a process that the fork server has made; it has given up its rights before it reads the first
byte of code. Imports the standard library only.
"""

from __future__ import annotations

import atexit
import builtins
import io
import os
import random
import sys
import threading
import traceback
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

from verl_lite.sandbox.remote_objects import OPERATIONS, Gone, Peer
from verl_lite.sandbox.values import read_message, write_message

ANSWER, TESTS = "answer", "tests"
"""Names of the modules that the code becomes."""

_ERROR_CHARACTERS = 500


def run_program(channel: int) -> int:
    """The channel brings {"code"}, gets {"compiled": bool}, and is closed; then the code runs as a script. Gives its
    exit code."""
    code = read_message(channel)["code"]
    compiled = _compile(code, ANSWER, channel)
    os.close(channel)
    if compiled is None:
        return 1
    exit_code = 0
    try:
        exec(compiled, _become_main("__main__").__dict__)
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # the door to untrusted code
        show_error()
        exit_code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    return exit_code & 0xFF


def hold_functions(channel: int) -> None:
    """The channel brings {"code"}, gets {"compiled": bool}; then it is the line of a `Peer` that may do everything.

    Object 0 runs the code and gives what it defines: a dict by name. Object 1 finds a function by name, in a class
    `Solution` too.
    """
    compiled = _compile(read_message(channel)["code"], ANSWER, channel)
    if compiled is None:
        return
    namespace = _become_main(ANSWER).__dict__

    def run() -> dict[str, Any]:
        exec(compiled, namespace)
        return {name: value for name, value in namespace.items() if not name.startswith("__")}

    def find(name: str) -> Any:
        if name not in namespace and "Solution" in namespace:
            return getattr(namespace["Solution"](), name)
        return namespace[name]

    peer = Peer(channel)
    peer.offer(run)
    peer.offer(find)
    peer.serve_forever()


def run_tests(channel: int, line: int) -> None:
    """The channel brings {"code", "tests": [snippet], "setup", "call"}; `line` leads to a process that holds functions.

    Tells {"compiled"} and {"broken": why} if a snippet is no Python; then for each test {"passed", "error"}, and
    {"tests": n} when the number of tests is known.
    """
    task = read_message(channel)
    snippets = []
    for text in (task["setup"], *task["tests"]):
        try:
            snippets.append(compile(text, TESTS, "exec", dont_inherit=True))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return write_message(channel, {"broken": str(error)})
    write_message(line, {"code": task["code"]})
    answer = read_message(line)
    write_message(channel, answer)
    if not answer["compiled"]:
        return
    peer = Peer(line, _tests_allow)
    setup, *tests = snippets
    try:
        names = peer.names()
    except Exception as error:  # the door to untrusted code: it does not run through
        names, error_text = {}, _short(error)
        for _ in tests:
            write_message(channel, {"passed": False, "error": error_text})
        return
    count = len(tests)
    for snippet in tests:
        outcomes = _outcomes(setup, snippet, names, task["call"])
        count += next(outcomes)[0] - 1
        write_message(channel, {"tests": count})
        for passed, error_text in outcomes:
            write_message(channel, {"passed": passed, "error": error_text})


def _outcomes(
    setup: types.CodeType, snippet: types.CodeType, names: dict[str, Any], call: str | None
) -> Iterator[tuple[int, str]]:
    """First how many tests a snippet has: its `test_*` functions and `TestCase`s, or one, itself; then whether each
    passed, and the error."""
    module = types.ModuleType(TESTS)
    sys.modules[TESTS] = module
    for alias in ("solution", ANSWER):
        sys.modules[alias] = types.ModuleType(alias)
        vars(sys.modules[alias]).update(names)
    namespace = vars(module)  # what is built in stays so: an answer may not bring its own `all` or `sorted`
    namespace.update({name: value for name, value in names.items() if not hasattr(builtins, name)})
    error = _raised(exec, setup, namespace) or _raised(exec, snippet, namespace)
    if error is None and call is not None:
        error = _raised(lambda: namespace["check"](names[call]))
    cases = [] if error is not None or call is not None else _cases(namespace)
    yield max(1, len(cases)), ""
    if not cases:
        yield error is None, error or ""
    for case in cases:
        error = _raised(case)
        yield error is None, error or ""


def _cases(namespace: dict[str, Any]) -> list[Any]:
    own = {name: value for name, value in namespace.items() if getattr(value, "__module__", None) == TESTS}
    functions = [value for name, value in own.items() if name.startswith("test_") and type(value) is types.FunctionType]
    classes = [value for value in own.values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    methods = [kind(name) for kind in classes for name in unittest.defaultTestLoader.getTestCaseNames(kind)]
    return [*functions, *(case.debug for case in methods)]


def _raised(test: Callable[..., object], *args: Any) -> str | None:
    """What a test raised, None if it passed."""
    try:
        test(*args)
    except Gone as error:
        return str(error)
    except BaseException as error:  # the door to the tests' code; SystemExit passes no test either
        return _short(error)
    return None


def _tests_allow(do: str, target: Any, rest: tuple[Any, ...]) -> bool:
    """What the tested code may do with what a test hands to it: call it, go through it; attributes only of objects
    whose class the tests define, and none that begin with an underscore (they lead to the tests' own variables)."""
    if do == "call":
        return callable(target)
    if do in ("iter", "next", "len", "getitem", "contains"):
        return True
    if (target.__module__ if isinstance(target, type) else type(target).__module__) != TESTS:
        return False
    if do in ("getattr", "setattr"):
        return isinstance(rest[0], str) and not rest[0].startswith("_")
    return do in OPERATIONS


def _compile(code: str, name: str, channel: int) -> types.CodeType | None:
    """The code, if it is Python; tells so."""
    try:
        compiled = compile(code, f"{name}.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        write_message(channel, {"compiled": False, "error": _short(error)})
        return None
    write_message(channel, {"compiled": True})
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
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "surrogateescape")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "replace")
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "replace", line_buffering=True
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def finish(code: int) -> None:
    """Ends the process, with what it printed written out."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads, or the code closed it
            code = code or 1
    os._exit(code)


def show_error() -> None:
    """Writes the traceback of what is being handled to stderr."""
    traceback.print_exc(file=sys.stderr)


def _short(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return text[-_ERROR_CHARACTERS:]
