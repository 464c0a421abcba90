"""Objects of another process, as far as tests need them: tests run here, the tested code runs there.

Plain values cross as they are; of everything else (a class, a generator, an instance) only a name crosses, and what is
done with it is done over there. A comparison of such an object with a plain value is never true, whatever its class
says: an answer cannot bring along an `__eq__` that likes every number. Both sides use the class `Peer`; the side of the
tests lets the other touch little. Imports the standard library only.
"""

from __future__ import annotations

import builtins
import importlib
import operator
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from verl_lite.sandbox.values import Unreadable, decode, encode, read_message, write_message

_COMPARISONS = ("lt", "le", "gt", "ge")
_ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
_SINGLE = ("neg", "pos", "abs", "invert")
_MESSAGE_CHARACTERS = 500


def _swapped(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: operation(b, a)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "isinstance": isinstance,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    **{function.__name__: function for function in (len, iter, next, str, repr, bool, hash, int, float)},
    **{name: getattr(operator, name) for name in (*_COMPARISONS, "eq", "ne", *_SINGLE)},
    **{name: getattr(operator, f"__{name}__") for name in _ARITHMETIC},
    **{f"r{name}": _swapped(getattr(operator, f"__{name}__")) for name in _ARITHMETIC},
}


class Gone(Exception):
    """The other process has ended."""


class Peer:
    """One end of the line `fd`. may_touch: whether the other side may do an operation with an object that it was given
    (operation, object, further arguments). None: it may do everything here, and name what this side shall import."""

    def __init__(self, fd: int, may_touch: Callable[[str, Any, tuple[Any, ...]], bool] | None = None) -> None:
        self._fd = fd
        self._may_touch = may_touch
        self._ours: list[Any] = []  # never forgotten: the process lives for one answer
        self._numbers: dict[int, int] = {}
        self._theirs: dict[int, Any] = {}

    def request(self, do: str, *args: Any, **kwargs: Any) -> Any:
        """Has the other side do something; serves what it asks for meanwhile. Raises what that raised, or Gone."""
        encoded = {name: self._encode(value) for name, value in kwargs.items()}
        self._send({"do": do, "args": [self._encode(arg) for arg in args], "kwargs": encoded})
        while "do" in (message := self._receive()):
            self.serve(message)
        for place, after in message.get("after", {}).items():
            _replace(args[int(place)], self._decode(after))
        if "raised" in message:
            raise self._exception(message["raised"])
        return self._decode(message.get("value"))

    def serve(self, message: dict[str, Any]) -> None:
        """Does what the other side asks for, and answers."""
        try:
            answer = self._done(message)
        except BaseException as error:  # the door to untrusted code: what it raises is told
            answer = {"raised": self._describe(error)}
        self._send(answer)

    def names(self) -> dict[str, Any]:
        """What the tested code defines, by name, once it has run. Modules and classes of others are imported here."""
        self._send({"do": "call", "args": [{"yours": 0}]})
        message = self._receive()
        if "raised" in message:
            raise self._exception(message["raised"])
        pairs = message["value"]["dict"]
        return {str(name): self._named(value) for name, value in pairs}

    def _named(self, data: Any) -> Any:
        return imported(*data["import"]) if isinstance(data, dict) and "import" in data else self._decode(data)

    def offer(self, value: Any) -> None:
        """Makes an object of this side known to the other, under the next number."""
        self._export(value)

    def serve_forever(self) -> None:
        """Until the other side is gone."""
        while True:
            try:
                message = self._receive()
            except Gone:
                return
            self.serve(message)

    def _done(self, message: dict[str, Any]) -> dict[str, Any]:
        args = [self._decode(arg) for arg in message["args"]]
        kwargs = {str(name): self._decode(arg) for name, arg in message.get("kwargs", {}).items()}
        do = message["do"]
        if self._may_touch is not None:
            is_given = isinstance(message["args"][0], dict) and "yours" in message["args"][0]
            if not is_given or not self._may_touch(do, args[0], tuple(args[1:])):
                raise AttributeError(f"{do} is not for the tested code")
        value = self._encode(OPERATIONS[do](*args, **kwargs))
        after = {
            place: changed
            for place, arg in enumerate(args)
            if type(arg) in (list, dict, set, bytearray, deque)
            and (changed := self._encode(arg)) != message["args"][place]
        }
        return {"value": value, "after": after}

    # ------------------------------------------------------------------------------------------------------ objects

    def _encode(self, value: Any) -> Any:
        return encode(value, self._export)

    def _decode(self, data: Any) -> Any:
        return decode(data, self._find)

    def _export(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote) and _peer_of(value) is self:
            return {"yours": _number_of(value)}
        if isinstance(value, types.ModuleType):
            return {"import": [value.__name__, ""]}
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) and _is_standard(module):
            return {"import": [module, str(name)]}
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._ours)
            self._ours.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": [number, value.__name__, _standard_base(value)]}
        return {"object": number}

    def _find(self, data: dict[str, Any]) -> Any:
        [(kind, content)] = data.items()
        if kind == "yours" and isinstance(content, int) and 0 <= content < len(self._ours):
            return self._ours[content]
        if kind == "object" and isinstance(content, int):
            return self._theirs.setdefault(content, Remote(self, content))
        if kind == "exception":
            number, name, base = content
            return self._theirs.setdefault(number, type(str(name), (_exception_type(base),), {}))
        if kind == "import" and self._may_touch is None:
            return imported(*content)
        raise Unreadable(f"nothing is called {kind}: {content}")

    # --------------------------------------------------------------------------------------------------- exceptions

    def _describe(self, error: BaseException) -> dict[str, Any]:
        try:
            text = str(error)[:_MESSAGE_CHARACTERS]
        except Exception:  # its own __str__ is untrusted, too
            text = ""
        return {"class": self._encode(type(error)), "base": _standard_base(type(error)), "text": text}

    def _exception(self, raised: dict[str, Any]) -> Exception:
        named = raised["class"]
        kind = imported(*named["import"]) if "import" in named else self._decode(named)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = _exception_type(raised["base"])
        try:
            return kind(raised["text"])
        except TypeError:  # UnicodeDecodeError and its like need more than a text
            return RuntimeError(raised["text"])

    # --------------------------------------------------------------------------------------------------------- line

    def _send(self, message: dict[str, Any]) -> None:
        try:
            write_message(self._fd, message)
        except OSError as error:
            raise Gone("the process of the tested code has ended") from error

    def _receive(self) -> dict[str, Any]:
        try:
            return read_message(self._fd)
        except (EOFError, OSError) as error:
            raise Gone("the process of the tested code has ended") from error


class Remote:
    """An object of the other process."""

    __slots__ = ("__number", "__peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_Remote__peer", peer)
        object.__setattr__(self, "_Remote__number", number)

    def __getattr__(self, name: str) -> Any:
        return _peer_of(self).request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _peer_of(self).request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        _peer_of(self).request("delattr", self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _peer_of(self).request("call", self, *args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and _peer_of(self).request("isinstance", instance, self) is True

    def __eq__(self, other: Any) -> Any:
        return _peer_of(self).request("eq", self, other) is True if isinstance(other, Remote) else NotImplemented

    def __ne__(self, other: Any) -> Any:
        return _peer_of(self).request("ne", self, other) is True if isinstance(other, Remote) else NotImplemented

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *raised: Any) -> Any:
        return self.__getattr__("__exit__")(None, None, None)


def _peer_of(remote: Remote) -> Peer:
    return object.__getattribute__(remote, "_Remote__peer")


def _number_of(remote: Remote) -> int:
    return object.__getattribute__(remote, "_Remote__number")


def _asking(operation: str, kind: type | None = None) -> Callable[..., Any]:
    """A method that asks the other side. kind: what the result has to be."""

    def method(self: Remote, *args: Any) -> Any:
        result = _peer_of(self).request(operation, self, *args)
        if kind is not None and type(result) is not kind:
            raise TypeError(f"{operation} gave {type(result).__name__}")
        return result

    return method


def _comparing(operation: str) -> Callable[..., Any]:
    def method(self: Remote, other: Any) -> Any:
        if not isinstance(other, Remote):  # or an object that claims to be less than everything would pass
            return NotImplemented
        return _peer_of(self).request(operation, self, other) is True

    return method


for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), *_SINGLE, "getitem", "setitem", "delitem"):
    setattr(Remote, f"__{_name}__", _asking(_name))
for _name in _COMPARISONS:
    setattr(Remote, f"__{_name}__", _comparing(_name))
for _name, _kind in {
    "len": int,
    "str": str,
    "repr": str,
    "bool": bool,
    "hash": int,
    "int": int,
    "float": float,
}.items():
    setattr(Remote, f"__{_name}__", _asking(_name, _kind))
for _name in ("iter", "next", "contains"):
    setattr(Remote, f"__{_name}__", _asking(_name))


def _is_standard(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names | {"builtins"}


def imported(module: str, name: str) -> Any:
    """This process's own copy of a module, class or function that both sides can import. Raises Unreadable."""
    try:
        found: Any = importlib.import_module(module)
        for part in name.split(".") if name else ():
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise Unreadable(str(error)) from error
    if not isinstance(found, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType):
        raise Unreadable(f"{module}.{name} is an object")  # unittest.mock.ANY equals everything
    return found


def _standard_base(kind: type) -> str:
    return next((base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"), "Exception")


def _exception_type(name: Any) -> type[Exception]:
    """A built-in exception. SystemExit and its like, which end a process, become RuntimeError."""
    found = getattr(builtins, str(name), None)
    return found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError


def _replace(ours: Any, theirs: Any) -> None:
    """Gives a container of ours the content that it got over there."""
    if isinstance(ours, list | bytearray) and isinstance(theirs, type(ours)):
        ours[:] = theirs
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        ours.clear()
        ours.update(theirs)
    elif isinstance(ours, set) and isinstance(theirs, set):
        ours.clear()
        ours.update(theirs)
    elif isinstance(ours, deque) and isinstance(theirs, deque):
        ours.clear()
        ours.extend(theirs)
