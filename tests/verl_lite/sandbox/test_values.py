"""Values between processes: what comes back is what went, and nothing that is read runs."""

from __future__ import annotations

import datetime
import enum
import io
import json
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest

from verl_lite.sandbox import values
from verl_lite.sandbox.values import MESSAGE_BYTES_MAX, Unreadable, as_line, decode, encode, read_line

PLAIN = [
    None, True, 0, -7, 1 << 70, (1 << 8192) - 1, -(1 << 8192), -(1 << 99_999), 0.1, float("inf"), "é\ud800\0",
    b"\0\xff", bytearray(b"x"), [], [[1], (2, [3])], (), {1, "a"}, frozenset({2}), {}, {(1, 2): {"k": None}, None: 1.5},
    deque([1, 2]), 1 + 2j, Fraction(1, 3), Decimal("0.10"), range(3, 9, 2), datetime.date(2026, 1, 2),
    datetime.timedelta(hours=1), datetime.datetime(2026, 1, 2, 3, 4, 5), datetime.time(1, 2),
]  # fmt: skip
NONE = [
    {"a": 1, "b": 2}, {}, {"set": [[{"dict": [[]]}]]}, {"dict": [[1]]}, {"dict": [[[[], 1]]]}, {"Fraction": "1/0"},
    {"Fraction": [1, 0]}, {"Decimal": ["x"]}, {"range": []}, {"object": 3}, {"import": ["os", "system"]},
    {"int": "zz"}, {"bytes": 3}, {"tuple": 3}, {"complex": ["a", 1]}, {"date": ["yesterday"]},
]  # fmt: skip
Colour = enum.IntEnum("Colour", "RED")
Pair = namedtuple("Pair", "a b")


def there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


def test_plain_values_come_back_and_subclasses_become_their_base(monkeypatch: pytest.MonkeyPatch) -> None:
    bases = ((Colour.RED, 1), (Pair(1, 2), (1, 2)), (Counter("aa"), {"a": 2}), (OrderedDict(a=1), {"a": 1}))
    scalars = ((numpy.float64(0.5), 0.5), (numpy.int64(3), 3))
    for value, plain in (*((value, value) for value in PLAIN), *bases, *scalars):
        back = there_and_back(value)
        assert back == plain and type(back) is type(plain), value
    assert (there_and_back(numpy.array([[1, 2]])) == numpy.array([[1, 2]])).all()
    assert str(there_and_back(float("nan"))) == "nan"
    assert list(there_and_back(x * x for x in range(4))) == [0, 1, 4, 9]
    monkeypatch.setattr(values, "ITERATOR_ITEMS_MAX", 3)
    with pytest.raises(Unreadable, match="more than 3 items"):
        encode(iter(range(4)))


@pytest.mark.parametrize("data", NONE)
def test_what_is_no_value_is_unreadable(data: Any) -> None:
    with pytest.raises(Unreadable):
        decode(data)


def test_messages_are_lines_of_json_of_a_longest_length() -> None:
    assert read_line(io.BytesIO(as_line({"a": [1, "é\n"]}))) == {"a": [1, "é\n"]}
    bad = ((b"[]", "an object"), (b"{", "Expecting"), (b"[" * 50_000, "recursion"), (b"1" * 9999, "digits"))
    for line, match in (*bad, (b" " * MESSAGE_BYTES_MAX + b"{}", "too long")):
        with pytest.raises(Unreadable, match=match):
            read_line(io.BytesIO(line + b"\n"))
    with pytest.raises(EOFError):
        read_line(io.BytesIO(b"{}"))
    with pytest.raises(Unreadable, match="exceeds the limit"):
        as_line({"a": "x" * MESSAGE_BYTES_MAX})
