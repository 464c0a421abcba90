"""Plain values as JSON, between processes that do not trust each other: no pickle, so that reading runs no code.

Numbers, text, bytes, lists, tuples, sets, dicts, deques, fractions, decimals, dates and numpy arrays keep their type; a
subclass becomes its plain base. Anything else is `export`'s to name. Imports the standard library only.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import fractions
import importlib
import json
import math
import os
from collections import deque
from collections.abc import Callable
from typing import Any

MESSAGE_BYTES_MAX = 16 << 20
_LONG_NUMBER_BITS = 8192
"""Longer whole numbers travel in base 16: Python refuses thousands of decimal digits."""

Exporter = Callable[[Any], Any]


class Unreadable(ValueError):
    """What came from the other side is not a value of this module."""


def no_objects(value: Any) -> Any:
    """For a side that knows plain values only. Raises Unreadable."""
    raise Unreadable(f"not a plain value: {type(value).__name__}")


def encode(value: Any, export: Exporter = no_objects) -> Any:
    """A value as JSON can hold it. export: names what is not plain."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _LONG_NUMBER_BITS else {"hex": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(entry, export) for entry in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, export), encode(entry, export)] for key, entry in value.items()]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(entry, export) for entry in value]}
    for name, (kinds, write, _) in _SPECIAL.items():
        if type(value) in kinds:
            return {name: write(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        plain = value.tolist()
        return {"array": encode(plain, export)} if hasattr(value, "shape") and value.shape else encode(plain, export)
    return export(value)


def decode(data: Any, find: Exporter = no_objects) -> Any:
    """The value again. find: what an exported name stands for. Raises Unreadable."""
    if isinstance(data, list):
        return [decode(entry, find) for entry in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise Unreadable("expected one name")
    [(name, content)] = data.items()
    try:
        if name == "dict":
            return {decode(key, find): decode(entry, find) for key, entry in content}
        if name in _SEQUENCES:
            return _SEQUENCES[name]([decode(entry, find) for entry in content])
        if name in _SPECIAL:
            return _SPECIAL[name][2](content)
        if name == "array":
            return _array(decode(content, find))
    except (TypeError, ValueError, ArithmeticError, KeyError) as error:
        raise Unreadable(str(error)) from error
    return find(data)


def write_message(fd: int, message: dict[str, Any]) -> None:
    """Sends one message. Raises Unreadable if it is too long, OSError if nobody reads."""
    body = json.dumps(message).encode()
    if len(body) > MESSAGE_BYTES_MAX:
        raise Unreadable(f"a message of {len(body)} bytes; {MESSAGE_BYTES_MAX} is the most")
    data = memoryview(len(body).to_bytes(4, "big") + body)
    while data:
        data = data[os.write(fd, data) :]


def read_message(fd: int) -> dict[str, Any]:
    """Waits for one message. Raises EOFError at the end, Unreadable for what is none."""
    length = int.from_bytes(_read(fd, 4), "big")
    if length > MESSAGE_BYTES_MAX:
        raise Unreadable(f"a message of {length} bytes; {MESSAGE_BYTES_MAX} is the most")
    return parse_message(_read(fd, length))


def parse_message(body: bytes) -> dict[str, Any]:
    """One message from its bytes. Raises Unreadable."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Unreadable(str(error)) from error
    if not isinstance(message, dict):
        raise Unreadable("expected an object")
    return message


def _read(fd: int, length: int) -> bytes:
    parts: list[bytes] = []
    while length:
        part = os.read(fd, min(length, 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _array(plain: Any) -> Any:
    try:
        return importlib.import_module("numpy").array(plain)
    except ImportError:
        return plain


_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_Special = tuple[tuple[type, ...], Callable[[Any], Any], Callable[[Any], Any]]
_SPECIAL: dict[str, _Special] = {
    "hex": ((), str, lambda text: int(text, 16)),
    "bytes": ((bytes,), lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "bytearray": (
        (bytearray,),
        lambda value: base64.b64encode(value).decode(),
        lambda text: bytearray(base64.b64decode(text)),
    ),
    "complex": ((complex,), lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "fraction": ((fractions.Fraction,), str, fractions.Fraction),
    "decimal": ((decimal.Decimal,), str, decimal.Decimal),
    "range": ((range,), lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    "datetime": ((datetime.datetime,), datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": ((datetime.date,), datetime.date.isoformat, datetime.date.fromisoformat),
    "time": ((datetime.time,), datetime.time.isoformat, datetime.time.fromisoformat),
    "seconds": (
        (datetime.timedelta,),
        datetime.timedelta.total_seconds,
        lambda seconds: datetime.timedelta(seconds=seconds if math.isfinite(seconds) else 0),
    ),
}
