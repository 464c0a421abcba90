"""Encodes plain values as lines of JSON between processes that do not trust each other. Decoding runs no code.

Numbers, text, bytes, lists, tuples, sets, dicts, deques, fractions, decimals, dates and numpy arrays keep their type. A
subclass becomes its plain base, and an iterator an iterator over its items. Imports only the standard library.
"""

import datetime
import importlib
import json
import os
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import IO, Any, TypedDict

from verl_lite.json_types import JsonMapping, JsonObject, JsonValue

MESSAGE_BYTES_MAX = 16 << 20
ITERATOR_ITEMS_MAX = 10_000
ERROR_CHARACTERS = 500
FORGED = "the code sent a forged message instead of a reply"
DEPTH_MAX = 300
"""Maximum nesting of lists in a message. A dict or tuple inside another takes three or four levels."""

_LONG_NUMBER_BITS = 8192
"""Integers with more bits are sent in base 16, because Python does not parse thousands of decimal digits."""

# the attributes of a value that are the arguments of its constructor
_ATTRIBUTES: dict[type, str] = {
    # before date, of which it is a subclass
    datetime.datetime: "year month day hour minute second microsecond",
    datetime.date: "year month day",
    datetime.time: "hour minute second microsecond",
    datetime.timedelta: "days seconds microseconds",
    range: "start stop step",
    complex: "real imag",
    Fraction: "numerator denominator",
}
_COLLECTIONS = (tuple, set, frozenset, deque, bytes, bytearray)
_ENCODED = (dict, *_COLLECTIONS, *_ATTRIBUTES, Decimal)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in _ENCODED}
"""Types that are encoded as {name: list of the constructor's arguments}. The first matching type is used."""


class Unreadable(ValueError):
    """A received message or a value to be sent does not fit the format of this module."""


class JobRequest(TypedDict):
    """A job of the fork server: to run functions of `verl_lite.sandbox.programs` at the same time.

    Attributes:
        limits: fields of `Limits`.
        total_s: wall-clock time of the whole job.
        programs: names of the functions.
    """

    limits: JsonObject
    total_s: float
    programs: list[str]


class ProcessReport(TypedDict):
    """The end of a confined process.

    Attributes:
        met: the exceeded limit, or "".
        exit: exit code, or minus the signal.
    """

    met: str
    exit: int


def encode(value: object, depth: int = 0) -> JsonValue:
    """Encodes a value as JSON types. Raises Unreadable if an object is not plain or is nested too deeply."""
    if depth > DEPTH_MAX:
        raise Unreadable("a value is nested too deeply")
    # by identity, because 1 equals True
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)  # a subclass may override __str__
    if isinstance(value, int):
        if value.bit_length() > _LONG_NUMBER_BITS:
            return {"int": hex(value)}
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(entry, depth + 1) for entry in value]
    for name, kind in _KINDS.items():
        if isinstance(value, kind):
            return {name: encode(_arguments(value, kind), depth + 1)}
    if isinstance(value, Iterator):
        # an iterator may have no end
        items = list(islice(value, ITERATOR_ITEMS_MAX + 1))
        if len(items) > ITERATOR_ITEMS_MAX:
            raise Unreadable(f"an iterator has more than {ITERATOR_ITEMS_MAX} items")
        return {"iterator": encode(items, depth + 1)}
    # numpy itself is not imported: few programs use it
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        plain = encode(value.tolist(), depth + 1)
        # a scalar has an empty shape
        if getattr(value, "shape", ()):
            return {"array": plain}
        return plain
    raise Unreadable(f"not a plain value: {type(value).__name__}")


def decode(data: JsonValue, depth: int = 0) -> Any:
    """Decodes a value of any type from the output of `encode`. Raises Unreadable for other data.

    Only the types in `_KINDS` are constructed, each from arguments of a checked form: the sender may be hostile.
    """
    if depth > DEPTH_MAX:
        raise Unreadable("a value is nested too deeply")
    if isinstance(data, list):
        return [decode(entry, depth + 1) for entry in data]
    if not isinstance(data, dict):
        return data
    try:
        # raises ValueError for another number of entries
        [(name, encoded)] = data.items()
        kind = _KINDS.get(name)
        content = decode(encoded, depth + 1)
        match content:
            case str() if name == "int":
                return int(content, 16)
            case list() if name == "array":
                return importlib.import_module("numpy").array(content)
            case list() if name == "iterator":
                return iter(content)
            case [str(digits)] if kind is Decimal:
                return Decimal(digits)
            case [list(items)] if kind is not None and (kind is dict or kind in _COLLECTIONS):
                return kind(items)
            case list() if kind in _ATTRIBUTES and len(content) == len(_ATTRIBUTES[kind].split()):
                if all(type(number) in (int, float) for number in content):
                    return kind(*content)
    except (TypeError, ValueError, ArithmeticError, ImportError, MemoryError) as error:
        raise Unreadable(str(error)) from error
    raise Unreadable(f"not a value of the kind {name}")


def fields(message: object, **kinds: type) -> list[Any] | None:
    """Returns the values of a message that has exactly these keys, with values of exactly these types, else None.

    The type `object` matches any value. Types are compared exactly: with `isinstance`, true would be a number.
    """
    if type(message) is not dict or message.keys() != kinds.keys():
        return None
    values = []
    for key, kind in kinds.items():
        value = message[key]
        if kind is not object and type(value) is not kind:
            return None
        values.append(value)
    return values


def raised_exception(message: JsonObject) -> list[str] | None:
    """Returns the name, base and text of the exception that a message reports; None for a message of another shape."""
    raised = fields(message, raised=dict)
    if raised is None:
        return None
    return fields(raised[0], name=str, base=str, text=str)


def send(fd: int, line: bytes) -> None:
    """Writes a whole line to a file descriptor."""
    # a pipe or a socket may take only a part of it
    rest = memoryview(line)
    while rest:
        num_written = os.write(fd, rest)
        rest = rest[num_written:]


def as_line(message: JsonMapping) -> bytes:
    """Encodes a message as a line of JSON. Raises Unreadable if it is too long."""
    line = json.dumps(message).encode() + b"\n"
    if len(line) > MESSAGE_BYTES_MAX:
        raise Unreadable(f"a message of {len(line)} bytes exceeds the limit of {MESSAGE_BYTES_MAX}")
    return line


def read_line(file: IO[bytes]) -> JsonObject:
    """Waits for a message. Raises EOFError at the end of the file, Unreadable for an invalid message."""
    line = file.readline(MESSAGE_BYTES_MAX)
    is_complete = line.endswith(b"\n")
    if not is_complete and len(line) < MESSAGE_BYTES_MAX:
        raise EOFError("the connection is closed")
    if not is_complete:
        raise Unreadable("too long")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(str(error)) from error
    if not isinstance(message, dict):
        raise Unreadable("expected an object")
    return message


def _arguments(value: Any, kind: type) -> list[object]:
    """Returns the arguments of the constructor of `kind` that rebuild a value of this type."""
    if kind in _ATTRIBUTES:
        return [getattr(value, name) for name in _ATTRIBUTES[kind].split()]
    if kind is Decimal:
        return [str(value)]
    if kind is dict:
        # pairs, because keys of JSON are always text
        pairs = [[key, entry] for key, entry in value.items()]
        return [pairs]
    return [list(value)]
