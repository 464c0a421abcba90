"""Values between processes: what comes back is what went, and nothing that is read runs."""

from __future__ import annotations

import datetime
import enum
import json
import os
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest

from verl_lite.sandbox.values import MESSAGE_BYTES_MAX, Unreadable, decode, encode, read_message, write_message


class Colour(enum.IntEnum):
    RED = 3


def there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -7, 1 << 70, 0.1, float("inf"), "é\ud800\0", b"\0\xff", bytearray(b"x"),
        [], [[1], (2, [3])], (), {1, "a"}, frozenset({2}), {}, {(1, 2): {"k": None}, None: 1.5}, deque([1, 2]), 1 + 2j,
        Fraction(1, 3), Decimal("0.10"), range(3, 9, 2), datetime.date(2026, 1, 2), datetime.timedelta(hours=1),
        datetime.datetime(2026, 1, 2, 3, 4, 5), datetime.time(1, 2),
    ],
)  # fmt: skip
def test_plain_values_come_back(value: Any) -> None:
    back = there_and_back(value)
    assert back == value and type(back) is type(value)


def test_long_numbers_come_back() -> None:
    for value in (1 << 99_999, -(1 << 99_999), (1 << 8192) - 1, 1 << 8192):
        assert there_and_back(value) == value


def test_subclasses_become_their_base() -> None:
    pair = namedtuple("pair", "a b")
    for value, plain in (
        (Colour.RED, 3), (pair(1, 2), (1, 2)), (Counter("aa"), {"a": 2}), (OrderedDict(a=1), {"a": 1}),
        (defaultdict(int, {1: 2}), {1: 2}), (numpy.float64(0.5), 0.5), (numpy.int64(3), 3),
    ):  # fmt: skip
        back = there_and_back(value)
        assert back == plain and type(back) is type(plain)
    assert (there_and_back(numpy.array([[1, 2]])) == numpy.array([[1, 2]])).all()
    nan = there_and_back(float("nan"))
    assert nan != nan


@pytest.mark.parametrize(
    "data",
    [{"a": 1, "b": 2}, {}, {"set": [{"dict": []}]}, {"dict": [[1]]}, {"dict": [[[], 1]]}, {"fraction": "1/0"},
     {"decimal": []}, {"range": []}, {"object": 3}, {"import": ["os", "system"]}, {"hex": "zz"}, {"bytes": 3},
     {"tuple": 3}, {"complex": ["a", 1]}, {"date": "yesterday"}],
)  # fmt: skip
def test_what_is_no_value_is_unreadable(data: Any) -> None:
    with pytest.raises(Unreadable):
        decode(data)


def test_objects_are_not_plain() -> None:
    for value in (object(), len, int, (n for n in ())):
        with pytest.raises(Unreadable, match="not a plain value"):
            encode([value])


def test_messages_have_a_length() -> None:
    reader, writer = os.pipe()
    write_message(writer, {"a": [1, "é"]})
    assert read_message(reader) == {"a": [1, "é"]}
    for body, match in ((b"[]", "an object"), (b"{", "Expecting"), (b"[" * 50_000, "recursion")):
        os.write(writer, len(body).to_bytes(4, "big") + body)
        with pytest.raises(Unreadable, match=match):
            read_message(reader)
    os.write(writer, b"\0\0\0\7cut")
    os.close(writer)
    with pytest.raises(EOFError):
        read_message(reader)
    reader, writer = os.pipe()
    os.write(writer, (MESSAGE_BYTES_MAX + 1).to_bytes(4, "big"))
    with pytest.raises(Unreadable, match="is the most"):
        read_message(reader)
    with pytest.raises(Unreadable, match="is the most"):
        write_message(writer, {"a": "x" * MESSAGE_BYTES_MAX})
