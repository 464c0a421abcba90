"""The proxy through which tests call the tested code, which runs in another, untrusted process.

`programs.hold_functions` defines the requests and replies. Each reply is rebuilt field by field from an exact shape. A
message of another shape ends the running test and all later tests. Imports only the standard library.
"""

import builtins
import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import IO, Any, TypeAlias

from verl_lite.json_types import JsonObject, JsonValue
from verl_lite.sandbox.values import (
    ERROR_CHARACTERS,
    FORGED,
    Unreadable,
    as_line,
    decode,
    encode,
    fields,
    raised_exception,
    read_line,
    send,
)

Namespace: TypeAlias = dict[str, Any]
"""The global names of a module, with values of any type."""


class EndOfTest(BaseException):
    """Ends a test that can no longer pass. A test's `except Exception` or `assertRaises` does not catch it."""


class UntrustedCode:
    """A proxy for the tested code, which rebuilds the messages of its untrusted process field by field.

    Attributes:
        problem: reason why the running test has failed, even if the test catches every exception.
        is_broken: True after the other process has ended or sent a message of another shape, so no later test can
            pass.
        requests: number of requests sent.
    """

    def __init__(self, fd: int) -> None:
        self._connection: IO[bytes] = open(fd, "rb")
        self._exceptions: dict[str, type[Exception]] = {}
        self._lock = threading.Lock()
        self.problem = ""
        self.is_broken = False
        self.requests = 0

    def begin(self) -> tuple[Namespace, JsonObject | None]:
        """Waits until the code has run.

        Returns the values by name that tests can use, and None. If the code failed: no values, and the message with
        which `run_tests` reports it.
        """
        try:
            first = self._read()
            loaded = fields(first, names=dict)
            if loaded is not None:
                [names] = loaded
                return self._rebuild_names(names), None
            failed = fields(first, compiled=bool, error=str)
            if failed is not None:
                _, error = failed
                # "compiled" itself may be forged
                return {}, {"compiled": False, "error": error[:ERROR_CHARACTERS] or "not valid Python"}
            kind, _, text = self._raised(first)
            error = f"{kind}: {text}"
            return {}, {"error": error[:ERROR_CHARACTERS]}
        except EndOfTest:
            return {}, {"error": self.problem}

    def begin_test(self) -> None:
        """Clears the problem of the previous test, unless the proxy is broken."""
        if not self.is_broken:
            self.problem = ""

    def call(self, object_number: int | None, name: str, /, *args: object, **kwargs: object) -> object:
        """Calls a function in the other process, or a method of the object that it keeps under this number.

        Lists, dicts and other containers among the arguments get the content that they have after the call, because
        tests of functions that work in place read it there.
        """
        reply = self._request(name, object_number, list(args), kwargs)
        contents_after = reply.pop("after", None)
        if type(contents_after) is not list or len(contents_after) != len(args):
            raise self._broken()
        for argument, described in zip(args, contents_after, strict=True):
            # no container, or one whose content is not plain after the call
            if described is None:
                continue
            content = self._decoded(described)
            if not _replace(argument, content):
                raise self._broken()
        return self._value_of(reply)

    def get(self, object_number: int, name: str) -> object:
        """Returns an attribute of the object that the other process keeps under this number."""
        reply = self._request(name, object_number, None, {})
        function = self._function_proxy(reply, object_number, name)
        if function is not None:
            return function
        return self._value_of(reply)

    def _function_proxy(
        self, described: JsonValue, object_number: int | None, name: str
    ) -> Callable[..., object] | None:
        """Returns a function that calls the described function or method; None if the description is of another value.

        The code's `async def` becomes one here, so that tests can await its calls; the other process runs it at once.
        """
        call = functools.partial(self.call, object_number, name)
        if described == {"function": True}:
            return call
        if described != {"coroutine": True}:
            return None

        async def call_as_coroutine(*args: object, **kwargs: object) -> object:
            return call(*args, **kwargs)

        return call_as_coroutine

    def _value_of(self, reply: JsonObject) -> object:
        """Returns the value in a reply, or a proxy if the value remained in the other process."""
        held = fields(reply, object=int)
        if held is not None:
            [number] = held
            # the other process counts its objects from 0
            if number >= 0:
                return _ObjectProxy(self, number)
        return self._decoded(reply)

    def _decoded(self, described: JsonValue) -> object:
        """Returns the plain value that a message describes. Raises EndOfTest for another message."""
        described_value = fields(described, value=object)
        if described_value is None:
            raise self._broken()
        try:
            return decode(described_value[0])
        except (Unreadable, MemoryError):
            raise self._broken() from None

    def _request(
        self, name: str, object_number: int | None, args: list[object] | None, kwargs: dict[str, object]
    ) -> JsonObject:
        """Sends a request and returns the reply. Raises the exception that the other process raised, rebuilt here.

        Args:
            name: the function, method or attribute.
            object_number: number of the object that has it; None for a function of the module.
            args: arguments of the call; None to read an attribute.
            kwargs: keyword arguments of the call.
        """
        # a test may have threads, and a reply belongs to the request before it
        with self._lock:
            if self.is_broken:
                raise EndOfTest(self.problem)
            self.requests += 1
            request: JsonObject = {"call": name, "of": object_number, "number": self.requests, "args": None}
            try:
                if args is not None:
                    request["args"] = encode(args)
                request["kwargs"] = encode(kwargs)
                line = as_line(request)
            except (Unreadable, RecursionError) as error:
                self.problem = f"an argument of {name} does not reach the tested code: {error}"
                raise EndOfTest(self.problem) from error
            reply = self._read(line)
            # the code can write to the connection, too: without the number, its line would shift all later replies
            if reply.pop("number", None) != self.requests:
                raise self._broken()

        if "raised" in reply:
            kind, base, text = self._raised(reply)
            # a type that the code defines, as `begin` has rebuilt it, or the nearest one of Python
            exception_type = self._exceptions.get(kind, _exception_type(base))
            raise exception_type(text[:ERROR_CHARACTERS])
        return reply

    def _read(self, request: bytes = b"") -> JsonObject:
        """Sends a request, if there is one, and waits for a message."""
        try:
            send(self._connection.fileno(), request)
            return read_line(self._connection)
        except (EOFError, OSError) as error:
            raise self._broken("the process of the tested code has ended") from error
        except (Unreadable, MemoryError) as error:
            raise self._broken() from error

    def _raised(self, message: JsonObject) -> list[str]:
        """Returns the name, base and text of an exception in a message. Raises EndOfTest for another message."""
        exception = raised_exception(message)
        if exception is None:
            raise self._broken()
        return exception

    def _broken(self, why: str = FORGED) -> EndOfTest:
        """Marks the proxy as broken and returns the exception to raise."""
        self.problem = why
        self.is_broken = True
        return EndOfTest(why)

    def _rebuild_names(self, names: JsonObject) -> Namespace:
        """Rebuilds the values by name that tests can use: exception types, function proxies and plain values."""
        rebuilt: Namespace = {}
        for name, described in names.items():
            if not is_name(name):
                raise self._broken()
            exception = fields(described, exception=str, base=str)
            function = self._function_proxy(described, None, name)
            if exception is not None:
                kind, base = exception
                exception_type = type(name, (_exception_type(base),), {})
                # by the name of the class: `raised` messages have that, and the module may have it under another name
                self._exceptions[kind] = exception_type
                rebuilt[name] = exception_type
            elif function is not None:
                rebuilt[name] = function
            elif described is not None:
                rebuilt[name] = self._decoded(described)
        return rebuilt


class _ObjectProxy:
    """A proxy for an object of the tested code. It supports only methods and attributes."""

    def __init__(self, answer: UntrustedCode, number: int) -> None:
        self._answer = answer
        self._number = number

    def __getattr__(self, name: str) -> object:
        # such as __len__: Python's own protocols do not work through a proxy
        if name.startswith("_"):
            raise AttributeError(name)
        return self._answer.get(self._number, name)


def _exception_type(name: str) -> type[Exception]:
    """Returns the built-in exception of this name, or its nearest base that can be constructed from a text alone.

    Returns RuntimeError for exceptions that would end a process, such as SystemExit, and for StopIteration, which would
    end a loop of the test (as in PEP 479).
    """
    # the name comes from the other process: it may be that of any builtin
    builtin = getattr(builtins, name, None)
    if not isinstance(builtin, type) or not issubclass(builtin, Exception):
        return RuntimeError
    if issubclass(builtin, _ENDS_LOOPS):
        return RuntimeError
    for kind in builtin.__mro__:
        if issubclass(kind, Exception) and not issubclass(kind, _NEEDS_MORE):
            return kind
    return RuntimeError


_ENDS_LOOPS = (StopIteration, StopAsyncIteration)
# their constructors need more arguments than a text
_NEEDS_MORE = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, BaseExceptionGroup)
CHANGEABLE = (list, dict, set, bytearray, deque)


def _replace(ours: object, theirs: object) -> bool:
    """Replaces the content of a container with its content after the call. Returns False if the types differ."""
    # in place, because the test holds the container
    if isinstance(ours, list) and type(theirs) is list:
        ours[:] = theirs
    elif isinstance(ours, bytearray) and type(theirs) is bytearray:
        ours[:] = theirs
    elif isinstance(ours, deque) and type(theirs) is deque:
        ours.clear()
        ours.extend(theirs)
    elif isinstance(ours, dict) and type(theirs) is dict:
        ours.clear()
        ours.update(theirs)
    elif isinstance(ours, set) and type(theirs) is set:
        ours.clear()
        ours.update(theirs)
    else:
        return False
    return True


def is_name(name: str) -> bool:
    """Returns True if tests can use the name. Names such as `__name__` belong to the test module itself."""
    return name.isidentifier() and name[:2] != "__"
