"""The wire format of a batch: padding is not sent, and the received batch equals the sent batch bit for bit.

The format stores, for each row, the span of its real tokens and, for each column, the concatenated values inside these
spans, with token ids in four bytes. `prompts` and `responses` are slices of `input_ids` and are restored from it;
`position_ids` are stored as differences. A column that fits no span is sent unchanged. A slice pickles as one
contiguous buffer (protocol 5, out of band), which Ray's object store passes on without a copy. Received tensors are on
the CPU and writable.
"""

from __future__ import annotations

import functools
import math
import pickle
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

_WORTH_PACKING = 0.9  # a span narrower than this share of the dense matrix is worth its two numbers per row
_NARROWEST_PACKED_WIDTH = 8
_FLOATS = (torch.float16, torch.float32, torch.float64)  # the float types that numpy supports


class Column(NamedTuple):
    """The encoding of one tensor: a slice of another column (`source`, from its column `low`), the whole tensor
    (`span` -1), or the entries inside a span: section `values`, or `constant` everywhere.

    Entries outside the span have the bits `fill`. With section `filled` they are `fill` where its bit is set and 0
    elsewhere, because `x * mask` produces both 0.0 and -0.0. is_steps: differences from left to right are encoded.
    """

    name: str
    dtype: str
    tail: tuple[int, ...]
    span: int = -1
    values: int = -1
    constant: int = 0
    fill: int = 0
    filled: int = -1
    is_steps: bool = False
    source: str = ""
    low: int = 0


class Section(NamedTuple):
    """The layout of one numpy array: (rows, *tail), or (number of real tokens in section `span`,)."""

    dtype: str
    tail: tuple[int, ...] = ()
    span: int = -1


@dataclass
class Packed:
    """A packed batch of `rows` rows. `slice` is cheap; `unpack` returns the columns.

    arrays: one array per section; a span's array is (rows, 2): position of the first real token, and number of tokens
    up to the last. objects: row-sliceable columns to pickle. meta: sent with every slice. schema: columns and sections.
    """

    rows: int
    columns: list[Column]
    sections: list[Section]
    arrays: list[np.ndarray]
    objects: dict[str, Any]
    meta: dict[str, Any]
    schema: bytes

    @functools.cached_property
    def _offsets(self) -> dict[int, np.ndarray]:
        spans = {section.span for section in self.sections if section.span >= 0}
        return {span: np.append(0, self.arrays[span][:, 1].cumsum(dtype=np.int64)) for span in spans}

    def slice(self, start: int, stop: int) -> Packed:
        """Returns rows [start, stop) as views."""
        arrays = []
        for section, array in zip(self.sections, self.arrays, strict=True):
            first, last = (start, stop) if section.span < 0 else self._offsets[section.span][[start, stop]]
            arrays.append(array[first:last])
        objects = {name: value[start:stop] for name, value in self.objects.items()}
        return Packed(stop - start, self.columns, self.sections, arrays, objects, self.meta, self.schema)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies all arrays into one buffer, each at its natural alignment."""
        places, end = [], 0
        for array in self.arrays:
            begin = -(-end // array.itemsize) * array.itemsize
            end = begin + array.nbytes
            places.append(slice(begin, end))
        buffer = np.empty(end, dtype=np.uint8)
        for place, array in zip(places, self.arrays, strict=True):
            buffer[place] = array.reshape(-1).view(np.uint8)
        return _load, (self.schema, self.rows, buffer, self.objects, self.meta)

    def unpack(self) -> dict[str, torch.Tensor]:
        """Returns the columns as CPU tensors that own their memory."""
        indices: dict[int, np.ndarray] = {}
        bits: dict[str, np.ndarray] = {}
        for column in sorted(self.columns, key=lambda one: bool(one.source)):  # slices after their source
            if column.source:
                bits[column.name] = bits[column.source][:, column.low : column.low + column.tail[0]].copy()
                continue
            if column.span < 0:
                bits[column.name] = self.arrays[column.values].copy()  # arrays from Ray's object store are read-only
                continue
            width, itemsize = column.tail[0], getattr(torch, column.dtype).itemsize
            found = bits[column.name] = np.full((self.rows, width), column.fill, f"i{itemsize}")
            if column.filled >= 0:
                found[np.unpackbits(self.arrays[column.filled], axis=1, count=width) == 0] = 0
            if column.span not in indices:
                indices[column.span] = _indices(self.arrays[column.span], width)
            inside = column.constant if column.values < 0 else self.arrays[column.values]
            found.reshape(-1)[indices[column.span]] = inside
            if column.is_steps:
                np.cumsum(found, axis=1, out=found)
        return {c.name: torch.from_numpy(bits[c.name]).view(getattr(torch, c.dtype)) for c in self.columns}


def pack(tensors: dict[str, torch.Tensor], objects: dict[str, Any], meta: dict[str, Any], rows: int) -> Packed:
    """Packs the columns of a batch. tensors: strided tensors (rows, ...) of any dtype up to 8 bytes, on any device.
    objects: columns that are pickled unchanged. meta: sent with every slice."""
    packer = _Packer(tensors, rows)
    columns = [packer.encode(name) for name in tensors]
    schema = zlib.compress(pickle.dumps((columns, packer.sections), protocol=5))
    return Packed(rows, columns, packer.sections, packer.arrays, objects, meta, schema)


def concat(parts: list[Packed]) -> Packed | None:
    """Concatenates batches and keeps the meta of the first; returns None if their encodings differ."""
    first = parts[0]
    for part in parts:
        if part.schema != first.schema or part.objects.keys() != first.objects.keys():
            return None
        if not all(isinstance(value, np.ndarray) for value in part.objects.values()):
            return None
    arrays = [np.concatenate(same) for same in zip(*(part.arrays for part in parts), strict=True)]
    objects = {name: np.concatenate([part.objects[name] for part in parts]) for name in first.objects}
    rows = sum(part.rows for part in parts)
    return Packed(rows, first.columns, first.sections, arrays, objects, first.meta, first.schema)


class _Packer:
    """Chooses the encoding of each column. It tries the spans of the masks first."""

    def __init__(self, tensors: dict[str, torch.Tensor], rows: int) -> None:
        self.tensors, self.rows = tensors, rows
        self.bits = {name: _bits(tensor) for name, tensor in tensors.items()}
        self.sections: list[Section] = []
        self.arrays: list[np.ndarray] = []
        self.spans: dict[int, int] = {}  # section number of a span -> width of its columns
        self.indices: dict[int, np.ndarray] = {}
        for name in tensors:
            if name.endswith("mask") and self._is_matrix(name):
                self._add_span(_span_of(self.bits[name]), self.bits[name].shape[1])

    def encode(self, name: str) -> Column:
        bits, dtype = self.bits[name], self.tensors[name].dtype
        column = Column(name, str(dtype).removeprefix("torch."), tuple(bits.shape[1:]))
        found = self._encode_matrix(column, bits, dtype) if self._is_matrix(name) else None
        return found or column._replace(values=self._add(bits))

    def _encode_matrix(self, column: Column, bits: np.ndarray, dtype: torch.dtype) -> Column | None:
        ids, width = self.bits.get("input_ids"), bits.shape[1]
        if column.name in ("prompts", "responses") and ids is not None and self._is_matrix("input_ids"):
            low = 0 if column.name == "prompts" else ids.shape[1] - width
            if dtype == self.tensors["input_ids"].dtype and np.array_equal(bits, ids[:, max(low, 0) : low + width]):
                return column._replace(source="input_ids", low=low)
        if column.name == "position_ids" and dtype == torch.int64:
            steps = np.diff(bits, axis=1, prepend=0)
            return self._fit(column._replace(is_steps=True, span=self._add_span(_span_of(steps), width)), steps)
        for span in [number for number, other in self.spans.items() if other == width]:
            if (found := self._fit(column._replace(span=span), bits)) is not None:
                return found
        own = _span_of(bits.view(f"f{bits.itemsize}") if dtype in _FLOATS else bits)  # 0.0 and -0.0 are both zero
        if own[:, 1].sum(dtype=np.int64) > _WORTH_PACKING * bits.size:
            return None
        return self._fit(column._replace(span=self._add_span(own, width)), bits)

    def _is_matrix(self, name: str) -> bool:
        bits = self.bits[name]
        return bits.ndim == 2 and bits.shape[1] >= _NARROWEST_PACKED_WIDTH and self.rows > 0

    def _add(self, array: np.ndarray, span: int = -1) -> int:
        self.sections.append(Section(array.dtype.str, () if span >= 0 else array.shape[1:], span))
        self.arrays.append(array)
        return len(self.arrays) - 1

    def _add_span(self, span: np.ndarray, width: int) -> int:
        for number, other in self.spans.items():
            if other == width and np.array_equal(self.arrays[number], span):
                return number
        number = self._add(span)
        self.spans[number] = width
        return number

    def _fit(self, column: Column, bits: np.ndarray) -> Column | None:
        """Encodes the column with its span; returns None if entries outside the span are not one value and zeros."""
        span = self.arrays[column.span]
        if column.span not in self.indices:
            self.indices[column.span] = _indices(span, bits.shape[1])
        inside = bits.reshape(-1).take(self.indices[column.span])
        nonzero_outside = np.count_nonzero(bits) - np.count_nonzero(inside)
        if nonzero_outside:
            row = int(np.argmax(span[:, 1] < bits.shape[1]))
            first = int(bits[row, 0 if span[row, 0] > 0 or span[row, 1] == 0 else span[row, 1]])
            column = column._replace(fill=first or -1 << (8 * bits.itemsize - 1))  # the bits of -0.0 if first is 0
            where = bits == column.fill
            found = np.count_nonzero(where) - np.count_nonzero(inside == column.fill)
            if found != nonzero_outside:
                return None
            if found != bits.size - inside.size:
                column = column._replace(filled=self._add(np.packbits(where, axis=1)))
        low, high = (int(inside.min()), int(inside.max())) if inside.size else (0, 0)
        if low == high:
            return column._replace(constant=low)
        if column.dtype == "int64":
            fitting = (d for d in (np.int8, np.int32) if np.iinfo(d).min <= low and high <= np.iinfo(d).max)
            inside = inside.astype(next(fitting, np.int64))
        return column._replace(values=self._add(inside, column.span))


def _load(schema: bytes, rows: int, buffer: np.ndarray, objects: dict[str, Any], meta: dict[str, Any]) -> Packed:
    """Restores a batch from `Packed.__reduce__`. Its arrays are views of `buffer`."""
    columns, sections = pickle.loads(zlib.decompress(schema))
    arrays: list[np.ndarray] = []
    end = 0
    for section in sections:
        dtype, by_rows = np.dtype(section.dtype), section.span < 0
        count = rows * math.prod(section.tail) if by_rows else int(arrays[section.span][:, 1].sum(dtype=np.int64))
        begin = -(-end // dtype.itemsize) * dtype.itemsize
        end = begin + count * dtype.itemsize
        array = buffer[begin:end].view(dtype)
        arrays.append(array.reshape(rows, *section.tail) if by_rows else array)
    return Packed(rows, columns, sections, arrays, objects, meta, schema)


def _span_of(values: np.ndarray) -> np.ndarray:
    """Returns (rows, 2): position of the first nonzero entry of each row, and number of entries up to the last one."""
    is_set, width = values != 0, values.shape[1]
    start = is_set.argmax(axis=1)
    length = np.where(is_set.any(axis=1), width - is_set[:, ::-1].argmax(axis=1) - start, 0)
    return np.stack([start, length], axis=1).astype(np.uint16 if width <= np.iinfo(np.uint16).max else np.int32)


def _indices(span: np.ndarray, width: int) -> np.ndarray:
    """Returns the positions of all real tokens in the flattened (rows, width) matrix, row by row."""
    start, length = span.astype(np.int64).T
    first = np.arange(len(span)) * width + start - (np.cumsum(length) - length)
    return np.repeat(first, length) + np.arange(int(length.sum()))


def can_pack(tensor: torch.Tensor) -> bool:
    """Returns True if `pack` supports the tensor. Nested, sparse, quantized and 16-byte tensors must be pickled."""
    plain = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return plain and tensor.dtype.itemsize <= 8


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """Returns the bits as signed integers of the same size, which compare exactly, including NaN and -0.0."""
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return plain.view(signed).numpy()
