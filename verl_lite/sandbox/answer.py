"""The tested code as tests see it, over a line to its process, which is not trusted.

Requests and replies are those of `programs.hold_functions`. Each reply is rebuilt field by field from an exact shape;
any other message ends the running test and all later ones. Imports the standard library only.
"""

import builtins
import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import IO, Any

from verl_lite.sandbox.values import (
    ERROR_CHARACTERS,
    FORGED,
    Unreadable,
    as_line,
    decode,
    encode,
    fields,
    read_line,
    send,
)


class EndOfTest(BaseException):
    """Ends a test that can no longer pass. No `except Exception` and no `assertRaises` of a test catches it."""


class Answer:
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
                return {}, {"compiled": False, "error": failed[1][:ERROR_CHARACTERS] or "no Python"}
            name, _, text = self._raised(first)
            return {}, {"error": f"{name}: {text}"[:ERROR_CHARACTERS]}
        except EndOfTest:
            return {}, {"error": self.problem}

    def begin_test(self) -> None:
        """Forgets what only the last test could not do."""
        self.problem = self.problem if self.is_broken else ""

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
        return self._function(reply, of, name) or self._given(reply)

    def _function(self, described: Any, of: int | None, name: str) -> Callable[..., Any] | None:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(of, name, *args, **kwargs)

        if described == {"function": True}:
            return functools.partial(self.call, of, name)
        return call if described == {"coroutine": True} else None

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
                raise EndOfTest(self.problem)
            self.requests += 1
            request = {"call": name, "of": of, "number": self.requests}
            try:
                line = as_line(request | {"args": args if args is None else encode(args), "kwargs": encode(kwargs)})
            except (Unreadable, RecursionError) as error:
                self.problem = f"an argument of {name} does not reach the tested code: {error}"
                raise EndOfTest(self.problem) from error
            reply = self._read(line)
            if reply.pop("number", None) != self.requests:
                raise self._broken()
        if "raised" in reply:
            kind, base, text = self._raised(reply)
            raise self._exceptions.get(kind, _exception_type(base))(text[:ERROR_CHARACTERS])
        return reply

    def _read(self, request: bytes = b"") -> dict[str, Any]:
        try:
            send(self._line.fileno(), request)
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

    def _broken(self, why: str = FORGED) -> EndOfTest:
        self.problem, self.is_broken = why, True
        return EndOfTest(why)

    def _bound(self, names: dict[str, Any]) -> dict[str, Any]:
        """What the tests find under each name."""
        bound: dict[str, Any] = {}
        for name, described in names.items():
            if not is_name(name):
                raise self._broken()
            if exception := fields(described, exception=str, base=str):
                bound[name] = self._exceptions[exception[0]] = type(name, (_exception_type(exception[1]),), {})
            elif function := self._function(described, None, name):
                bound[name] = function
            elif described is not None:
                bound[name] = self._decoded(described)
        return bound


class _Held:
    """An object of the answer's, which stays in its process: methods and attributes are asked for, nothing else."""

    def __init__(self, answer: Answer, number: int) -> None:
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
CHANGEABLE = (list, dict, set, bytearray, deque)


def _replace(ours: Any, theirs: Any) -> bool:
    """Gives a container of ours the content that it got over there. False if the two are not of one kind."""
    kind = next((kind for kind in CHANGEABLE if isinstance(ours, kind)), None)
    if type(theirs) is not kind:
        return False
    if isinstance(ours, list | bytearray):
        ours[:] = theirs
    else:
        ours.clear()
        getattr(ours, "extend" if isinstance(ours, deque) else "update")(theirs)
    return True


def is_name(name: str) -> bool:
    """Whether tests may find something under it. `__name__` and its like are the test module's own."""
    return name.isidentifier() and name[:2] != "__"
