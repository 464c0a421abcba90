"""Values between processes: what comes back is what went, and nothing that is read runs."""

from __future__ import annotations

import datetime
import enum
import io
import json
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest

from verl_lite.sandbox import values
from verl_lite.sandbox.values import MESSAGE_BYTES_MAX, Unreadable, as_line, decode, encode, read_line


class Colour(enum.IntEnum):
    RED = 3


def there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -7, 1 << 70, (1 << 8192) - 1, -(1 << 8192), 0.1, float("inf"),
        "é\ud800\0", b"\0\xff", bytearray(b"x"), [], [[1], (2, [3])], (), {1, "a"}, frozenset({2}), {},
        {(1, 2): {"k": None}, None: 1.5}, deque([1, 2]), 1 + 2j, Fraction(1, 3), Decimal("0.10"), range(3, 9, 2),
        datetime.date(2026, 1, 2), datetime.timedelta(hours=1), datetime.datetime(2026, 1, 2, 3, 4, 5),
        datetime.time(1, 2),
    ],
)  # fmt: skip
def test_plain_values_come_back(value: Any) -> None:
    back = there_and_back(value)
    assert back == value and type(back) is type(value)


def test_subclasses_become_their_base_and_iterators_give_their_items(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = namedtuple("pair", "a b")
    for value, plain in (
        (Colour.RED, 3), (pair(1, 2), (1, 2)), (Counter("aa"), {"a": 2}), (OrderedDict(a=1), {"a": 1}),
        (defaultdict(int, {1: 2}), {1: 2}), (numpy.float64(0.5), 0.5), (numpy.int64(3), 3),
    ):  # fmt: skip
        back = there_and_back(value)
        assert back == plain and type(back) is type(plain)
    assert (there_and_back(numpy.array([[1, 2]])) == numpy.array([[1, 2]])).all()
    assert there_and_back(-(1 << 99_999)) == -(1 << 99_999)
    nan = there_and_back(float("nan"))
    assert nan != nan
    assert list(there_and_back(x * x for x in range(4))) == [0, 1, 4, 9]
    monkeypatch.setattr(values, "ITERATOR_ITEMS_MAX", 3)
    with pytest.raises(Unreadable, match="more than 3 items"):
        encode(iter(range(4)))


@pytest.mark.parametrize(
    "data",
    [{"a": 1, "b": 2}, {}, {"set": [[{"dict": [[]]}]]}, {"dict": [[1]]}, {"dict": [[[[], 1]]]}, {"Fraction": "1/0"},
     {"Fraction": [1, 0]}, {"Decimal": ["x"]}, {"range": []}, {"object": 3}, {"import": ["os", "system"]},
     {"int": "zz"}, {"bytes": 3}, {"tuple": 3}, {"complex": ["a", 1]}, {"date": ["yesterday"]}],
)  # fmt: skip
def test_what_is_no_value_is_unreadable(data: Any) -> None:
    with pytest.raises(Unreadable):
        decode(data)


def test_messages_are_lines_of_json_of_a_longest_length() -> None:
    assert read_line(io.BytesIO(as_line({"a": [1, "é\n"]}))) == {"a": [1, "é\n"]}
    for line, match in (
        (b"[]", "an object"),
        (b"{", "Expecting"),
        (b"[" * 50_000, "recursion"),
        (b"1" * 9999, "digits"),
    ):
        with pytest.raises(Unreadable, match=match):
            read_line(io.BytesIO(line + b"\n"))
    with pytest.raises(EOFError):
        read_line(io.BytesIO(b"{}"))
    with pytest.raises(Unreadable, match="too long"):
        read_line(io.BytesIO(b" " * MESSAGE_BYTES_MAX + b"{}\n"))
    with pytest.raises(Unreadable, match="is the most"):
        as_line({"a": "x" * MESSAGE_BYTES_MAX})
