"""How a batch travels: the padding stays at home, and what arrives is bit for bit what was sent.

For each row the span of real tokens is sent, for each column the values inside that span, laid end to end, token ids in
four bytes. `prompts` and `responses` inside `input_ids`, and `position_ids`, are checked and rebuilt instead of sent. A
column that fits no span is sent as it is. A batch is packed once and sliced per receiver; a slice pickles as one
contiguous buffer (protocol 5, out of band), which Ray's object store hands over without a copy. Tensors arrive on the
CPU, writable.
"""

from __future__ import annotations

import math
import pickle
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

_WORTH_PACKING = 0.9  # a span narrower than this share of the dense matrix is worth its two numbers per row
_NARROWEST_PACKED_WIDTH = 8
_FLOATS = (torch.float16, torch.float32, torch.float64)  # those that numpy has


class Column(NamedTuple):
    """How one tensor is encoded.

    kind: dense (all of it) | span (values inside span number `span`) | ones (1 inside) | part (columns from `low` of
    column `source`) | hold (positions counted from the first real token; after the last one they stay). Outside of the
    span every entry has the bits `fill`; or, with `signs`, is 0.0 or -0.0 as one bit per entry says (`x * mask` leaves
    both). values, signs: numbers of sections.
    """

    name: str
    dtype: str
    tail: tuple[int, ...]
    kind: str = "dense"
    span: int = -1
    fill: int = 0
    values: int = -1
    signs: int = -1
    source: str = ""
    low: int = 0


class Section(NamedTuple):
    """A numpy array of the message: (rows, *tail), or (real tokens of span number `span`,)."""

    dtype: str
    tail: tuple[int, ...] = ()
    span: int = -1


@dataclass
class Packed:
    """A packed batch of `rows` rows. `slice` is cheap; `unpack` gives the columns back.

    arrays: one for each section; span i is array i, (rows, 2): first real token, and tokens up to the last one.
    objects: anything that can be sliced by rows and pickled. meta: travels with every slice.
    """

    rows: int
    columns: list[Column]
    sections: list[Section]
    arrays: list[np.ndarray]
    objects: dict[str, Any]
    meta: dict[str, Any]
    _schema: bytes | None = None
    _offsets: dict[int, np.ndarray] = field(default_factory=dict)

    def slice(self, start: int, stop: int) -> Packed:
        """Rows [start, stop) as views."""
        arrays = []
        for section, array in zip(self.sections, self.arrays, strict=True):
            first, last = start, stop
            if section.span >= 0:
                if section.span not in self._offsets:
                    lengths = self.arrays[section.span][:, 1]
                    self._offsets[section.span] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
                first, last = self._offsets[section.span][[start, stop]]
            arrays.append(array[first:last])
        objects = {name: value[start:stop] for name, value in self.objects.items()}
        return Packed(stop - start, self.columns, self.sections, arrays, objects, self.meta, self.schema_bytes())

    def schema_bytes(self) -> bytes:
        """The part of the message that all slices of a batch share."""
        if self._schema is None:
            plain = ([tuple(column) for column in self.columns], [tuple(section) for section in self.sections])
            self._schema = zlib.compress(pickle.dumps(plain, protocol=5))
        return self._schema

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.schema_bytes(), self.rows, self._buffer(), self.objects, self.meta)

    def _buffer(self) -> np.ndarray:
        """All sections in one block of bytes, each at its natural alignment."""
        places, end = [], 0
        for array in self.arrays:
            begin = -(-end // array.itemsize) * array.itemsize
            end = begin + array.nbytes
            places.append(slice(begin, end))
        buffer = np.empty(end, dtype=np.uint8)
        for place, array in zip(places, self.arrays, strict=True):
            buffer[place] = array.reshape(-1).view(np.uint8)
        return buffer

    def unpack(self) -> dict[str, torch.Tensor]:
        """The columns as CPU tensors that own their memory."""
        indices: dict[int, np.ndarray] = {}
        bits: dict[str, np.ndarray] = {}
        for column in sorted(self.columns, key=lambda c: c.kind == "part"):  # a part after what it is a part of
            if column.kind == "part":
                bits[column.name] = bits[column.source][:, column.low : column.low + column.tail[0]].copy()
            elif column.kind == "dense":
                bits[column.name] = self.arrays[column.values].copy()  # what Ray hands over is read-only
            elif column.kind == "hold":
                bits[column.name] = _positions(self.arrays[column.span], column.tail[0])
            else:
                if column.span not in indices:
                    indices[column.span] = _indices(self.arrays[column.span], column.tail[0])
                bits[column.name] = self._filled(column)
                inside = 1 if column.kind == "ones" else self.arrays[column.values]
                bits[column.name].reshape(-1)[indices[column.span]] = inside
        return {c.name: torch.from_numpy(bits[c.name]).view(getattr(torch, c.dtype)) for c in self.columns}

    def _filled(self, column: Column) -> np.ndarray:
        width, dtype = column.tail[0], np.dtype(f"i{getattr(torch, column.dtype).itemsize}")
        if column.signs < 0:
            return np.full((self.rows, width), column.fill, dtype)
        negative = np.unpackbits(self.arrays[column.signs], axis=1, count=width)
        return negative.astype(dtype) << (8 * dtype.itemsize - 1)


def pack(tensors: dict[str, torch.Tensor], objects: dict[str, Any], meta: dict[str, Any], rows: int) -> Packed:
    """Pack the columns of a batch: strided tensors (rows, ...) of any dtype up to 8 bytes, on any device.

    Args:
        objects: columns that are pickled as they are.
        meta: travels with every slice.
    """
    packer = _Packer(tensors, rows)
    columns = [packer.encode(name) for name in tensors]
    return Packed(rows, columns, packer.sections, packer.arrays, objects, meta)


def concat(parts: list[Packed]) -> Packed | None:
    """The parts as one batch with the first one's meta, or None where their encodings differ."""
    first = parts[0]
    for part in parts:
        if part.schema_bytes() != first.schema_bytes() or part.objects.keys() != first.objects.keys():
            return None
        if not all(isinstance(value, np.ndarray) for value in part.objects.values()):
            return None
    arrays = [np.concatenate(same) for same in zip(*(part.arrays for part in parts), strict=True)]
    objects = {name: np.concatenate([part.objects[name] for part in parts]) for name in first.objects}
    return Packed(sum(p.rows for p in parts), first.columns, first.sections, arrays, objects, first.meta)


class _Packer:
    """Chooses the encoding of each column. The spans come first among the sections: those of the masks."""

    def __init__(self, tensors: dict[str, torch.Tensor], rows: int) -> None:
        self.tensors, self.rows = tensors, rows
        self.bits = {name: _bits(tensor) for name, tensor in tensors.items()}
        self.sections: list[Section] = []
        self.arrays: list[np.ndarray] = []
        self.spans: dict[int, int] = {}  # section of a span -> its width
        self.indices: dict[int, np.ndarray] = {}
        for name in tensors:
            if name.endswith("mask") and self._is_matrix(name):
                self._own_span(name)

    def encode(self, name: str) -> Column:
        bits = self.bits[name]
        column = Column(name, str(self.tensors[name].dtype).removeprefix("torch."), tuple(bits.shape[1:]))
        if not self._is_matrix(name):
            return column._replace(values=self._add(bits, Section(bits.dtype.str, column.tail)))
        if (derived := self._derived(column)) is not None:
            return derived
        spans = [number for number, width in self.spans.items() if width == bits.shape[1]]
        for span in (*spans, None):
            number = self._own_span(name) if span is None else span
            is_wide = self.arrays[number][:, 1].sum(dtype=np.int64) > _WORTH_PACKING * bits.size
            if span is None and (number in spans or is_wide):
                break
            if (fitting := self._fit(column._replace(kind="span", span=number))) is not None:
                return fitting
        return column._replace(values=self._add(bits, Section(bits.dtype.str, column.tail)))

    def _is_matrix(self, name: str) -> bool:
        bits = self.bits[name]
        return bits.ndim == 2 and bits.shape[1] >= _NARROWEST_PACKED_WIDTH and self.rows > 0

    def _add(self, array: np.ndarray, section: Section) -> int:
        self.sections.append(section)
        self.arrays.append(array)
        return len(self.arrays) - 1

    def _own_span(self, name: str) -> int:
        """The section of the span from the first to the last entry of each row that is not zero."""
        bits = self.bits[name]
        is_set = (bits.view(f"f{bits.itemsize}") if self.tensors[name].dtype in _FLOATS else bits) != 0
        start, width = is_set.argmax(axis=1), bits.shape[1]
        length = np.where(is_set.any(axis=1), width - is_set[:, ::-1].argmax(axis=1) - start, 0)
        dtype = np.dtype(np.uint16 if width <= np.iinfo(np.uint16).max else np.int32)
        span = np.stack([start, length], axis=1).astype(dtype)
        for number, known in self.spans.items():
            if known == width and np.array_equal(self.arrays[number], span):
                return number
        number = self._add(span, Section(dtype.str, (2,)))
        self.spans[number] = width
        return number

    def _derived(self, column: Column) -> Column | None:
        """A column that the receiver can rebuild from others."""
        bits, ids = self.bits[column.name], self.bits.get("input_ids")
        if column.name in ("prompts", "responses") and ids is not None and self._is_matrix("input_ids"):
            low = 0 if column.name == "prompts" else ids.shape[1] - bits.shape[1]
            same_type = self.tensors[column.name].dtype == self.tensors["input_ids"].dtype
            if same_type and low >= 0 and np.array_equal(bits, ids[:, low : low + bits.shape[1]]):
                return column._replace(kind="part", source="input_ids", low=low)
        if column.name == "position_ids" and column.dtype == "int64":
            for span, width in self.spans.items():
                if width == bits.shape[1] and np.array_equal(bits, _positions(self.arrays[span], width)):
                    return column._replace(kind="hold", span=span)
        return None

    def _fit(self, column: Column) -> Column | None:
        """The column with its values, if its span leaves out nothing but one value or zeros of both signs."""
        bits, span = self.bits[column.name], self.arrays[column.span]
        width, is_float = bits.shape[1], self.tensors[column.name].is_floating_point()
        outside = bits.size - int(span[:, 1].sum(dtype=np.int64))
        if column.span not in self.indices:
            self.indices[column.span] = _indices(span, width)
        inside = bits.reshape(-1).take(self.indices[column.span])
        others = np.count_nonzero(bits) - np.count_nonzero(inside)  # outside of the span and not 0
        if others:
            row = int(np.argmax(span[:, 1] < width))
            fill = int(bits[row, 0 if span[row, 0] > 0 or span[row, 1] == 0 else span[row, 1]])
            negative_zero = -1 << (8 * bits.itemsize - 1)
            fill = fill or (negative_zero if is_float else 0)
            where = bits == fill
            found = np.count_nonzero(where) - np.count_nonzero(inside == fill)
            if found == outside:
                column = column._replace(fill=fill)
            elif found == others and fill == negative_zero and is_float:
                signs = np.packbits(where, axis=1)
                column = column._replace(signs=self._add(signs, Section("|u1", signs.shape[1:])))
            else:
                return None
        if column.dtype in ("int64", "bool") and inside.size:
            low, high = int(inside.min()), int(inside.max())
            if low == high == 1:
                return column._replace(kind="ones")
            fitting = (d for d in (np.int8, np.int32) if np.iinfo(d).min <= low and high <= np.iinfo(d).max)
            inside = inside.astype(next(fitting, np.int64)) if column.dtype == "int64" else inside
        return column._replace(values=self._add(inside, Section(inside.dtype.str, (), column.span)))


def _load(schema: bytes, rows: int, buffer: np.ndarray, objects: dict[str, Any], meta: dict[str, Any]) -> Packed:
    """The inverse of `Packed.__reduce__`; arrays are views of `buffer`."""
    columns, sections = pickle.loads(zlib.decompress(schema))
    sections = [Section(*plain) for plain in sections]
    arrays: list[np.ndarray] = []
    end = 0
    for section in sections:
        dtype, by_rows = np.dtype(section.dtype), section.span < 0
        count = rows * math.prod(section.tail) if by_rows else int(arrays[section.span][:, 1].sum(dtype=np.int64))
        begin = -(-end // dtype.itemsize) * dtype.itemsize
        end = begin + count * dtype.itemsize
        array = buffer[begin:end].view(dtype)
        arrays.append(array.reshape(rows, *section.tail) if by_rows else array)
    return Packed(rows, [Column(*plain) for plain in columns], sections, arrays, objects, meta, schema)


def _indices(span: np.ndarray, width: int) -> np.ndarray:
    """Positions of all real tokens in the flattened (rows, width) matrix, row after row."""
    start, length = span.astype(np.int64).T
    first = np.arange(len(span)) * width + start - (np.cumsum(length) - length)
    return np.repeat(first, length) + np.arange(int(length.sum()))


def _positions(span: np.ndarray, width: int) -> np.ndarray:
    """0 up to the first real token, then counting; after the last one its number."""
    start, length = span.astype(np.int64).T
    counted = np.arange(width)[None, :] - start[:, None]
    return np.clip(counted, 0, np.maximum(length - 1, 0)[:, None], out=counted)


def can_pack(tensor: torch.Tensor) -> bool:
    """Whether `pack` takes it: nested, sparse, quantized and 16-byte types travel as pickled objects."""
    plain = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return plain and tensor.dtype.itemsize <= 8


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bits as signed integers of the same size: exact comparisons, NaN and -0.0 included."""
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return plain.view(signed).numpy()
