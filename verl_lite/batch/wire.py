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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

_WORTH_PACKING = 0.9  # a span narrower than this share of the dense matrix is worth its two numbers per row
_NARROWEST_PACKED_WIDTH = 8
_FLOATS = (torch.float16, torch.float32, torch.float64)  # the float types that numpy supports
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by number of bytes


MetaInfo = dict[str, Any]
"""Data about a whole batch, by name. Any: users keep values of every type in it, as in verl."""


class WireColumn(NamedTuple):
    """The encoding of one tensor: a slice of another column, the whole tensor, or the entries inside a span.

    Attributes:
        name: name of the column.
        dtype: name of the torch dtype.
        tail: dimensions after the rows.
        span: section of the span; -1 if the whole tensor is in section `values`.
        values: section of the entries inside the span; -1 if all of them are `constant`.
        constant: the bits of the entries inside the span if `values` is -1.
        fill: the bits of the entries outside the span.
        filled: section with a bit for each entry: outside the span, entries are `fill` where it is set and 0
            elsewhere, because `x * mask` produces both 0.0 and -0.0; -1 if all of them are `fill`.
        is_steps: whether differences from left to right are encoded.
        source: the column of which this one is a slice; empty if it is none.
        low: first column of the slice in `source`.
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


class SliceableColumn(Protocol):
    """A column that is pickled unchanged: an array, a tensor that cannot be packed, or a nested TensorDict."""

    def __getitem__(self, rows: slice, /) -> SliceableColumn: ...


@dataclass(frozen=True)
class Meta:
    """The part of a batch that is sent with every slice.

    Attributes:
        meta_info: `DataProto.meta_info`.
        has_batch: whether `DataProto.batch` exists; without columns, it can be an empty TensorDict.
    """

    meta_info: MetaInfo
    has_batch: bool


@dataclass
class Packed:
    """A packed batch of `rows` rows. `slice` is cheap; `unpack` returns the columns.

    Attributes:
        rows: number of rows.
        columns: encodings of the tensors.
        sections: layouts of the arrays.
        arrays: one array per section; a span's array is (rows, 2): position of the first real token, and number of
            tokens up to the last.
        objects: columns to pickle.
        meta: sent with every slice.
        schema: columns and sections, pickled and compressed.
    """

    rows: int
    columns: list[WireColumn]
    sections: list[Section]
    arrays: list[np.ndarray]
    objects: dict[str, SliceableColumn]
    meta: Meta
    schema: bytes

    @functools.cached_property
    def _offsets(self) -> dict[int, np.ndarray]:
        """By span: (rows + 1,) the cumulative numbers of real tokens."""
        offsets = {}
        for section in self.sections:
            if section.span >= 0 and section.span not in offsets:
                lengths = self.arrays[section.span][:, 1]
                offsets[section.span] = np.append(0, lengths.cumsum(dtype=np.int64))
        return offsets

    def slice(self, start: int, stop: int) -> Packed:
        """Returns rows [start, stop) as views."""
        arrays = []
        for section, array in zip(self.sections, self.arrays, strict=True):
            first = start
            end = stop
            if section.span >= 0:
                # rows have different numbers of real tokens
                offsets = self._offsets[section.span]
                first = offsets[start]
                end = offsets[stop]
            arrays.append(array[first:end])

        objects = {name: value[start:stop] for name, value in self.objects.items()}
        return replace(self, rows=stop - start, arrays=arrays, objects=objects)

    def __reduce__(self) -> tuple[Callable[..., Packed], tuple[object, ...]]:
        """Copies all arrays into one buffer, each at its natural alignment."""
        byte_ranges = []
        end = 0
        for array in self.arrays:
            begin = _aligned(end, array.itemsize)
            end = begin + array.nbytes
            byte_ranges.append(slice(begin, end))

        buffer = np.empty(end, dtype=np.uint8)
        for byte_range, array in zip(byte_ranges, self.arrays, strict=True):
            flat = array.reshape(-1)
            buffer[byte_range] = flat.view(np.uint8)
        # `_load` finds the positions again, from the layouts in the schema
        return _load, (self.schema, self.rows, buffer, self.objects, self.meta)

    def unpack(self) -> dict[str, torch.Tensor]:
        """Returns the columns as CPU tensors that own their memory."""
        indices: dict[int, np.ndarray] = {}
        bits: dict[str, np.ndarray] = {}
        # first the columns of which others are slices
        for column in self.columns:
            if not column.source:
                bits[column.name] = self._unpack_column(column, indices)
        for column in self.columns:
            if column.source:
                stop = column.low + column.tail[0]
                entries = bits[column.source][:, column.low : stop]
                # a copy, so that a change of `prompts` in place does not change `input_ids`
                bits[column.name] = entries.copy()

        tensors = {}
        for column in self.columns:
            integers = torch.from_numpy(bits[column.name])
            tensors[column.name] = integers.view(_torch_dtype(column))
        return tensors

    def _unpack_column(self, column: WireColumn, indices: dict[int, np.ndarray]) -> np.ndarray:
        """Returns the bits of a column.

        Args:
            column: its encoding.
            indices: `_indices` of the spans so far, by section; the call adds to them.
        """
        if column.span < 0:
            # arrays from Ray's object store are read-only
            return self.arrays[column.values].copy()

        width = column.tail[0]
        itemsize = _torch_dtype(column).itemsize
        # bits as integers, so that a NaN keeps its payload and -0.0 its sign
        bits = np.full((self.rows, width), column.fill, f"i{itemsize}")
        if column.filled >= 0:
            is_fill = np.unpackbits(self.arrays[column.filled], axis=1, count=width)
            bits[is_fill == 0] = 0

        # shared, because most columns have the same span
        if column.span not in indices:
            indices[column.span] = _indices(self.arrays[column.span], width)
        inside: int | np.ndarray = column.constant
        if column.values >= 0:
            inside = self.arrays[column.values]
        flat = bits.reshape(-1)
        flat[indices[column.span]] = inside

        if column.is_steps:
            np.cumsum(bits, axis=1, out=bits)
        return bits


def pack(tensors: dict[str, torch.Tensor], objects: dict[str, SliceableColumn], meta: Meta, rows: int) -> Packed:
    """Packs the columns of a batch.

    Args:
        tensors: strided tensors (rows, ...) of any dtype up to 8 bytes, on any device.
        objects: columns that are pickled unchanged.
        meta: sent with every slice.
        rows: number of rows.
    """
    packer = _Packer(tensors, rows)
    columns = [packer.encode(name) for name in tensors]
    # once for all slices; parts with equal bytes are concatenated without being unpacked
    schema = zlib.compress(pickle.dumps((columns, packer.sections), protocol=5))
    return Packed(
        rows=rows,
        columns=columns,
        sections=packer.sections,
        arrays=packer.arrays,
        objects=objects,
        meta=meta,
        schema=schema,
    )


def concat(parts: list[Packed]) -> Packed | None:
    """Concatenates batches and keeps the meta of the first; returns None if their encodings differ."""
    first = parts[0]
    for part in parts:
        has_same_names = part.objects.keys() == first.objects.keys()
        if part.schema != first.schema or not has_same_names:
            return None
        # other columns have no common function that concatenates them
        if not all(isinstance(value, np.ndarray) for value in part.objects.values()):
            return None

    arrays = []
    for section in range(len(first.arrays)):
        arrays_of_section = [part.arrays[section] for part in parts]
        arrays.append(np.concatenate(arrays_of_section))
    objects: dict[str, SliceableColumn] = {}
    for name in first.objects:
        objects[name] = np.concatenate([part.objects[name] for part in parts])
    rows = sum(part.rows for part in parts)
    return replace(first, rows=rows, arrays=arrays, objects=objects)


class _Packer:
    """Chooses the encoding of each column.

    Attributes:
        tensors: the columns.
        rows: number of rows.
        bits: their bits, see `_bits`.
        sections, arrays: see `Packed`.
        spans: width of the columns of each span, by its section.
        indices: `_indices` of each span, by its section.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], rows: int) -> None:
        self.tensors = tensors
        self.rows = rows
        self.bits = {name: _bits(tensor) for name, tensor in tensors.items()}
        self.sections: list[Section] = []
        self.arrays: list[np.ndarray] = []
        self.spans: dict[int, int] = {}
        self.indices: dict[int, np.ndarray] = {}
        # first the spans of the masks: the real tokens of most other columns are the same
        for name in tensors:
            if name.endswith("mask") and self._is_matrix(name):
                bits = self.bits[name]
                self._add_span(_span_of(bits), width=bits.shape[1])

    def encode(self, name: str) -> WireColumn:
        """Chooses the encoding of a column and adds its sections."""
        bits = self.bits[name]
        dtype = self.tensors[name].dtype
        dtype_name = str(dtype).removeprefix("torch.")
        column = WireColumn(name, dtype_name, tail=tuple(bits.shape[1:]))
        if self._is_matrix(name):
            encoded = self._encode_matrix(column, bits, dtype)
            if encoded is not None:
                return encoded
        section = self._add(bits)
        return column._replace(values=section)

    def _encode_matrix(self, column: WireColumn, bits: np.ndarray, dtype: torch.dtype) -> WireColumn | None:
        """Encodes a column (rows, width) as a slice or with a span; returns None if neither saves space."""
        width = bits.shape[1]
        low = self._first_in_input_ids(column.name, bits, dtype)
        if low is not None:
            return column._replace(source="input_ids", low=low)
        if column.name == "position_ids" and dtype == torch.int64:
            # positions grow by 1 from token to token, so that most differences are one value
            steps = np.diff(bits, axis=1, prepend=0)
            span = self._add_span(_span_of(steps), width)
            return self._fit(column._replace(is_steps=True, span=span), steps)

        # a span of another column, such as a mask, costs nothing
        for span, span_width in self.spans.items():
            if span_width != width:
                continue
            encoded = self._fit(column._replace(span=span), bits)
            if encoded is not None:
                return encoded

        # a span of its own, from its first to its last entry that is not zero
        entries = bits
        if dtype in _FLOATS:
            # 0.0 and -0.0 are both zero as floats, but not as bits
            entries = bits.view(f"f{bits.itemsize}")
        own_span = _span_of(entries)
        lengths = own_span[:, 1]
        if lengths.sum(dtype=np.int64) > _WORTH_PACKING * bits.size:
            return None
        span = self._add_span(own_span, width)
        return self._fit(column._replace(span=span), bits)

    def _first_in_input_ids(self, name: str, bits: np.ndarray, dtype: torch.dtype) -> int | None:
        """Returns the first column of the prompts or responses in `input_ids`; None if they are no part of it."""
        if name not in ("prompts", "responses") or "input_ids" not in self.bits:
            return None
        if not self._is_matrix("input_ids") or dtype != self.tensors["input_ids"].dtype:
            return None

        # a row of `input_ids` is a prompt and its response; a batch of the user may have other columns of these names
        ids = self.bits["input_ids"]
        width = bits.shape[1]
        low = 0
        if name == "responses":
            low = ids.shape[1] - width
        if low < 0 or not np.array_equal(bits, ids[:, low : low + width]):
            return None
        return low

    def _is_matrix(self, name: str) -> bool:
        """Returns True if the column is a matrix that is wide enough for a span."""
        bits = self.bits[name]
        if bits.ndim != 2 or self.rows == 0:
            return False
        return bits.shape[1] >= _NARROWEST_PACKED_WIDTH

    def _add(self, array: np.ndarray, span: int = -1) -> int:
        """Adds a section and returns its number."""
        # empty for the entries inside a span, whose array has one dimension
        tail = array.shape[1:]
        section = Section(array.dtype.str, tail, span)
        self.sections.append(section)
        self.arrays.append(array)
        return len(self.arrays) - 1

    def _add_span(self, span: np.ndarray, width: int) -> int:
        """Adds a span (rows, 2) of columns of this width, unless there is an equal one. Returns its section."""
        for number, span_width in self.spans.items():
            if span_width == width and np.array_equal(self.arrays[number], span):
                return number
        number = self._add(span)
        self.spans[number] = width
        return number

    def _fit(self, column: WireColumn, bits: np.ndarray) -> WireColumn | None:
        """Encodes the column with its span; returns None if entries outside the span are not one value and zeros."""
        span = self.arrays[column.span]
        if column.span not in self.indices:
            self.indices[column.span] = _indices(span, bits.shape[1])
        inside = bits.reshape(-1).take(self.indices[column.span])
        with_fill = self._fit_outside(column, bits, inside)
        if with_fill is None:
            return None

        lowest = highest = 0
        if inside.size:
            lowest = int(inside.min())
            highest = int(inside.max())
        if lowest == highest:
            return with_fill._replace(constant=lowest)
        # such as token ids, which need four bytes
        if column.dtype == "int64":
            inside = inside.astype(_smallest_int(lowest, highest))
        return with_fill._replace(values=self._add(inside, column.span))

    def _fit_outside(self, column: WireColumn, bits: np.ndarray, inside: np.ndarray) -> WireColumn | None:
        """Encodes the entries outside the span; returns None if they are not one value and zeros.

        They are not collected, but counted, as those of the whole matrix less those inside.

        Args:
            column: the encoding so far.
            bits: (rows, width). Bits are compared, not values, so that the received column is the same bit for bit.
            inside: the entries inside the span.
        """
        num_nonzero = np.count_nonzero(bits) - np.count_nonzero(inside)
        if num_nonzero == 0:
            return column

        # the value of one entry outside the span: before or after it, in the first row that it does not fill
        span = self.arrays[column.span]
        row = int(np.argmax(span[:, 1] < bits.shape[1]))
        start, length = span[row]
        is_before_span = start > 0 or length == 0
        position = 0 if is_before_span else length
        fill = int(bits[row, position])
        if fill == 0:
            # this entry is 0.0, and others may be -0.0, of which only the sign bit is set
            fill = -1 << (8 * bits.itemsize - 1)
        is_fill = bits == fill
        num_fill = np.count_nonzero(is_fill) - np.count_nonzero(inside == fill)
        # a third value
        if num_fill != num_nonzero:
            return None

        num_outside = bits.size - inside.size
        filled = -1
        # some of them are 0
        if num_fill != num_outside:
            filled = self._add(np.packbits(is_fill, axis=1))
        return column._replace(fill=fill, filled=filled)


def _torch_dtype(column: WireColumn) -> torch.dtype:
    """Returns the dtype of a column's tensor."""
    dtype: torch.dtype = getattr(torch, column.dtype)
    return dtype


def _smallest_int(lowest: int, highest: int) -> type[np.signedinteger]:
    """Returns the smallest of three types that holds these values."""
    for dtype in (np.int8, np.int32):
        limits = np.iinfo(dtype)
        if limits.min <= lowest and highest <= limits.max:
            return dtype
    return np.int64


def _aligned(position: int, itemsize: int) -> int:
    """Returns the next position at which an array with entries of this size can begin."""
    return -(-position // itemsize) * itemsize


def _load(schema: bytes, rows: int, buffer: np.ndarray, objects: dict[str, SliceableColumn], meta: Meta) -> Packed:
    """Restores a batch from `Packed.__reduce__`. Its arrays are views of `buffer`."""
    columns, sections = pickle.loads(zlib.decompress(schema))
    arrays: list[np.ndarray] = []
    end = 0
    for section in sections:
        length = rows
        if section.span >= 0:
            # a span is added before its columns, so that its array is restored already
            lengths = arrays[section.span][:, 1]
            length = int(lengths.sum(dtype=np.int64))
        shape = (length, *section.tail)

        dtype = np.dtype(section.dtype)
        begin = _aligned(end, dtype.itemsize)
        end = begin + math.prod(shape) * dtype.itemsize
        flat = buffer[begin:end].view(dtype)
        arrays.append(flat.reshape(shape))
    return Packed(rows, columns, sections, arrays, objects, meta, schema)


def _span_of(values: np.ndarray) -> np.ndarray:
    """Returns (rows, 2): position of the first nonzero entry of each row, and number of entries up to the last one."""
    width = values.shape[1]
    is_set = values != 0
    from_the_end = is_set[:, ::-1]
    start = is_set.argmax(axis=1)
    end = width - from_the_end.argmax(axis=1)
    # argmax is 0 for a row without such an entry
    length = np.where(is_set.any(axis=1), end - start, 0)

    # two numbers for each row and span are the cost of packing
    dtype: type[np.integer] = np.uint16
    if width > np.iinfo(np.uint16).max:
        dtype = np.int32
    span = np.stack([start, length], axis=1)
    return span.astype(dtype)


def _indices(span: np.ndarray, width: int) -> np.ndarray:
    """Returns the positions of all real tokens in the flattened (rows, width) matrix, row by row."""
    # the 16 bits of a span are too few for these positions
    start, length = span.astype(np.int64).T
    # without a loop over rows: the number of each token, plus a difference that is the same for all tokens of a row
    first_index = np.arange(len(span)) * width + start
    num_earlier_tokens = np.cumsum(length) - length
    differences = np.repeat(first_index - num_earlier_tokens, length)
    return np.arange(len(differences)) + differences


def can_pack(tensor: torch.Tensor) -> bool:
    """Returns True if `pack` supports the tensor. Nested, sparse, quantized and 16-byte tensors must be pickled."""
    is_plain = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return is_plain and tensor.dtype.itemsize <= 8


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """Returns the bits as signed integers of the same size, which compare exactly, including NaN and -0.0."""
    tensor = tensor.detach().to("cpu")
    # a conjugated or negated view has the bits of its source
    tensor = tensor.resolve_conj().resolve_neg()
    integers = tensor.contiguous().view(_SIGNED[tensor.dtype.itemsize])
    return integers.numpy()
