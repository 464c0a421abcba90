"""How a batch travels: the padding stays at home, and what arrives is bit for bit what was sent.

Takes the columns of a batch (torch tensors padded to a common width) and gives a `Packed`: for each row the span of
real tokens, for each column the values inside that span, laid end to end, token ids in four bytes, masks as lengths
or bits. Columns that others determine (`prompts` and `responses` inside `input_ids`, `position_ids` from the
attention mask) are checked and rebuilt instead of sent. A column that fits no span is sent as it is, so nothing is ever
lost. A batch is packed once and sliced per receiver; a slice pickles as one contiguous buffer (protocol 5, out of
band), which Ray's object store hands over without a copy. Tensors arrive on the CPU, writable.
"""

from __future__ import annotations

import pickle
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

# A span narrower than this share of the dense matrix is worth its two numbers per row.
_WORTH_PACKING = 0.9
_NARROWEST_PACKED_WIDTH = 8
_ROWS_PER_BLOCK = 32  # comparisons run over blocks that stay in the cache
_INT32 = np.iinfo(np.int32)


class Layout(NamedTuple):
    """Where the real tokens of a (rows, width) column are: one span per row.

    `parent` None: the spans are sent. Otherwise they are those of layout number `parent`, cut to its columns
    [low, high) and counted from `low`: prompt and response halves of the attention mask.
    """

    width: int
    parent: int | None
    low: int
    high: int


class Column(NamedTuple):
    """How one tensor is encoded.

    kind: dense (all of it) | span (values inside the layout) | narrow (the same, int64 in four bytes) | bits (0 or 1
    inside, one bit each) | ones (1 inside) | part (columns [low, high) of column `source`) | hold, zero (positions
    counted from the first real token; after the last one they stay, or are zero). Outside the layout every entry has
    the bits `fill`; or, where `signed`, is 0.0 or -0.0 as one bit per entry says (`x * mask` leaves both).
    """

    name: str
    dtype: str
    tail: tuple[int, ...]
    kind: str
    layout: int = -1
    fill: int = 0
    signed: bool = False
    source: str = ""
    low: int = 0
    high: int = 0


class Span(NamedTuple):
    """First real token and number of tokens up to the last one, both (rows,) int64."""

    start: np.ndarray
    length: np.ndarray

    def clip(self, low: int, high: int) -> Span:
        start = np.clip(self.start, low, high)
        stop = np.clip(self.start + self.length, low, high)
        return Span(np.where(stop > start, start - low, 0), stop - start)

    def indices(self, width: int) -> np.ndarray:
        """Positions of all real tokens in the flattened (rows, width) matrix, row after row."""
        total = int(self.length.sum())
        before = np.cumsum(self.length) - self.length
        first = np.arange(len(self.length)) * width + self.start - before
        return np.repeat(first, self.length) + np.arange(total)

    def equals(self, other: Span) -> bool:
        return np.array_equal(self.start, other.start) and np.array_equal(self.length, other.length)


@dataclass
class Packed:
    """A packed batch of `rows` rows. `slice` is cheap; `unpack` gives the columns back."""

    rows: int
    layouts: list[Layout]
    columns: list[Column]
    spans: list[Span]
    values: dict[str, np.ndarray]  # dense: (rows, ...) ; span, narrow, bits (as bool): (tokens,)
    signs: dict[str, np.ndarray]  # of a signed column: (rows, width / 8) uint8, a set bit is a -0.0
    objects: dict[str, Any]  # anything that can be sliced by rows and pickled
    meta: dict[str, Any]
    _offsets: dict[int, np.ndarray] = field(default_factory=dict)
    _schema: bytes | None = None

    def slice(self, start: int, stop: int) -> Packed:
        """Rows [start, stop) as views."""
        values: dict[str, np.ndarray] = {}
        for column in self.columns:
            value = self.values.get(column.name)
            if value is None:
                continue
            if column.kind == "dense":
                values[column.name] = value[start:stop]
            else:
                offsets = self._token_offsets(column.layout)
                values[column.name] = value[offsets[start] : offsets[stop]]
        spans = [Span(span.start[start:stop], span.length[start:stop]) for span in self.spans]
        signs = {name: value[start:stop] for name, value in self.signs.items()}
        objects = {name: value[start:stop] for name, value in self.objects.items()}
        rows, schema = stop - start, self.schema_bytes()
        return Packed(rows, self.layouts, self.columns, spans, values, signs, objects, self.meta, _schema=schema)

    def _token_offsets(self, layout: int) -> np.ndarray:
        if layout not in self._offsets:
            self._offsets[layout] = np.concatenate([[0], np.cumsum(self.spans[layout].length)])
        return self._offsets[layout]

    def schema_bytes(self) -> bytes:
        """The part of the message that all slices of a batch share."""
        if self._schema is None:
            plain = ([tuple(layout) for layout in self.layouts], [tuple(column) for column in self.columns])
            self._schema = zlib.compress(pickle.dumps(plain, protocol=5))
        return self._schema

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.schema_bytes(), self.rows, self._buffer(), self.objects, self.meta)

    def _buffer(self) -> np.ndarray:
        """All numbers in one block of bytes, in the order of the schema, each section at its natural alignment."""
        sections: list[np.ndarray] = []
        for layout, span in zip(self.layouts, self.spans, strict=True):
            if layout.parent is None:
                dtype = _span_dtype(layout.width)
                sections += [span.start.astype(dtype), span.length.astype(dtype)]
        for column in self.columns:
            value = self.values.get(column.name)
            if value is not None:
                sections.append(np.packbits(value) if column.kind == "bits" else value)
            if column.signed:
                sections.append(self.signs[column.name])
        places = []
        end = 0
        for section in sections:
            begin = -(-end // section.itemsize) * section.itemsize
            end = begin + section.nbytes
            places.append((begin, end))
        buffer = np.empty(end, dtype=np.uint8)
        for (begin, stop), section in zip(places, sections, strict=True):
            buffer[begin:stop] = section.reshape(-1).view(np.uint8)
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors on the wire, schema included, objects and meta_info not."""
        return len(self.schema_bytes()) + self._buffer().nbytes

    def unpack(self) -> dict[str, torch.Tensor]:
        """The columns as CPU tensors that own their memory."""
        indices: dict[int, np.ndarray] = {}
        arrays: dict[str, np.ndarray] = {}
        for column in sorted(self.columns, key=lambda c: c.kind == "part"):  # a part after what it is a part of
            if column.kind == "part":
                arrays[column.name] = arrays[column.source][:, column.low : column.high].copy()
            else:
                arrays[column.name] = self._expand(column, indices)
        return {c.name: _tensor(arrays[c.name], c.dtype) for c in self.columns}

    def _expand(self, column: Column, indices: dict[int, np.ndarray]) -> np.ndarray:
        dtype = _bit_dtype(_torch_dtype(column.dtype).itemsize)
        if column.kind == "dense":
            return np.array(self.values[column.name], dtype=dtype)  # a copy: what Ray hands over is read-only
        width = column.tail[0]
        if column.kind in ("hold", "zero"):
            return _positions(self.spans[column.layout], width, hold=column.kind == "hold")
        if column.layout not in indices:
            indices[column.layout] = self.spans[column.layout].indices(width)
        shape = (self.rows, width)
        if column.signed:
            negative = np.unpackbits(self.signs[column.name], axis=1, count=width)
            matrix = negative.astype(dtype) << (8 * dtype.itemsize - 1)
        else:
            matrix = np.zeros(shape, dtype) if column.fill == 0 else np.full(shape, column.fill, dtype)
        matrix.reshape(-1)[indices[column.layout]] = 1 if column.kind == "ones" else self.values[column.name]
        return matrix


def pack(tensors: dict[str, torch.Tensor], objects: dict[str, Any], meta: dict[str, Any], rows: int) -> Packed:
    """Pack the columns of a batch.

    Args:
        tensors: strided tensors of shape (rows, ...), any dtype of at most 8 bytes, any device.
        objects: columns that are pickled as they are; sliced by rows.
        meta: travels with every slice.
    """
    return _Packer({name: _bits(tensor) for name, tensor in tensors.items()}, tensors, rows).run(objects, meta)


def concat(parts: list[Packed]) -> Packed | None:
    """The parts as one batch, or None where their encodings differ (unpack them one by one then).

    meta is that of the first part: the caller merges them.
    """
    first = parts[0]
    for part in parts:
        if part.schema_bytes() != first.schema_bytes() or part.objects.keys() != first.objects.keys():
            return None
        if not all(isinstance(value, np.ndarray) for value in part.objects.values()):
            return None
    spans = [
        Span(np.concatenate([p.spans[i].start for p in parts]), np.concatenate([p.spans[i].length for p in parts]))
        for i in range(len(first.layouts))
    ]
    values = {name: np.concatenate([part.values[name] for part in parts]) for name in first.values}
    signs = {name: np.concatenate([part.signs[name] for part in parts]) for name in first.signs}
    objects = {name: np.concatenate([part.objects[name] for part in parts]) for name in first.objects}
    rows = sum(part.rows for part in parts)
    return Packed(rows, first.layouts, first.columns, spans, values, signs, objects, first.meta, _schema=first._schema)


class _Packer:
    """Chooses the encoding of each column; the state is the layouts found so far."""

    def __init__(self, arrays: dict[str, np.ndarray], tensors: dict[str, torch.Tensor], rows: int) -> None:
        self.arrays = arrays
        self.tensors = tensors
        self.rows = rows
        self.layouts: list[Layout] = []
        self.spans: list[Span] = []
        self.indices: dict[int, np.ndarray] = {}
        self.values: dict[str, np.ndarray] = {}
        self.signs: dict[str, np.ndarray] = {}

    def run(self, objects: dict[str, Any], meta: dict[str, Any]) -> Packed:
        self._find_layouts()
        columns = [self._encode(name) for name in self.arrays]
        return Packed(self.rows, self.layouts, columns, self.spans, self.values, self.signs, objects, meta)

    def _find_layouts(self) -> None:
        """The attention mask's spans, their two halves, and those of the response mask where they differ."""
        attention = self._matrix("attention_mask")
        response = self._matrix("response_mask")
        widths = [m.shape[1] for m in (self._matrix("responses"), response) if m is not None]
        if attention is not None:
            width = attention.shape[1]
            whole = self._add(Layout(width, None, 0, width), _own_span(attention))
            if widths and widths[0] < width:
                middle = width - widths[0]
                self._add(Layout(widths[0], whole, middle, width), self.spans[whole].clip(middle, width))
                self._add(Layout(middle, whole, 0, middle), self.spans[whole].clip(0, middle))
        if response is not None:
            self._own_layout(response)

    def _matrix(self, name: str) -> np.ndarray | None:
        array = self.arrays.get(name)
        if array is None or array.ndim != 2 or array.shape[1] < _NARROWEST_PACKED_WIDTH or self.rows == 0:
            return None
        return array

    def _add(self, layout: Layout, span: Span) -> int:
        self.layouts.append(layout)
        self.spans.append(span)
        return len(self.layouts) - 1

    def _own_layout(self, matrix: np.ndarray) -> int:
        """The layout of a column's own non-zero values: an existing one if it is the same."""
        span = _own_span(matrix)
        width = matrix.shape[1]
        for number, (layout, known) in enumerate(zip(self.layouts, self.spans, strict=True)):
            if layout.width == width and known.equals(span):
                return number
        return self._add(Layout(width, None, 0, width), span)

    def _encode(self, name: str) -> Column:
        array = self.arrays[name]
        dtype = str(self.tensors[name].dtype).removeprefix("torch.")
        column = Column(name, dtype, tuple(array.shape[1:]), "dense")
        matrix = self._matrix(name)
        if matrix is None:
            self.values[name] = array
            return column
        derived = self._derived(column, matrix)
        if derived is not None:
            return derived
        width = matrix.shape[1]
        candidates = [n for n, layout in enumerate(self.layouts) if layout.width == width]
        if name == "prompts":
            candidates.reverse()  # where prompts and responses are equally wide, the left half fits
        for number in candidates:
            fitting = self._fit(column._replace(layout=number), matrix)
            if fitting is not None:
                return self._flatten(*fitting)
        if name not in ("attention_mask", "response_mask"):  # their own layout is among the candidates
            number = self._own_layout(_values(matrix, self.tensors[name].dtype))
            fitting = self._fit(column._replace(layout=number), matrix)
            if fitting is not None and self.spans[number].length.sum() <= _WORTH_PACKING * matrix.size:
                return self._flatten(*fitting)
        self.values[name] = array
        return column

    def _derived(self, column: Column, matrix: np.ndarray) -> Column | None:
        """A column that the receiver can rebuild from others."""
        ids = self._matrix("input_ids")
        if column.name in ("prompts", "responses") and ids is not None:
            same_type = self.tensors[column.name].dtype == self.tensors["input_ids"].dtype
            own, whole = matrix.shape[1], ids.shape[1]
            low = 0 if column.name == "prompts" else whole - own
            if same_type and own <= whole and _equal_blocks(matrix, ids[:, low : low + own]):
                return column._replace(kind="part", source="input_ids", low=low, high=low + own)
        if column.name == "position_ids" and column.dtype == "int64":
            for number, layout in enumerate(self.layouts):
                if layout.width == matrix.shape[1]:
                    for kind in ("hold", "zero"):
                        if _counts_positions(matrix, self.spans[number], hold=kind == "hold"):
                            return column._replace(kind=kind, layout=number)
        return None

    def _fit(self, column: Column, matrix: np.ndarray) -> tuple[Column, np.ndarray] | None:
        """The column with its fill, or signed, and its values, if the layout leaves out nothing else; else None."""
        span, width = self.spans[column.layout], matrix.shape[1]
        outside = matrix.size - int(span.length.sum())
        inside = self._gather(matrix, column.layout)
        if outside == 0:
            return column, inside
        others = np.count_nonzero(matrix) - np.count_nonzero(inside)  # outside the layout and not 0
        if others == 0:
            return column, inside
        row = int(np.argmax(span.length < width))
        fill = int(matrix[row, 0 if span.start[row] > 0 or span.length[row] == 0 else span.length[row]])
        negative_zero = -1 << (8 * matrix.itemsize - 1)
        if self.tensors[column.name].is_floating_point():
            fill = fill or negative_zero
        where = matrix == fill
        found = np.count_nonzero(where) - np.count_nonzero(inside == fill)
        if found == outside:
            return column._replace(fill=fill), inside
        if found == others and fill == negative_zero and self.tensors[column.name].is_floating_point():
            self.signs[column.name] = np.packbits(where, axis=1)
            return column._replace(signed=True), inside
        return None

    def _gather(self, matrix: np.ndarray, number: int) -> np.ndarray:
        if number not in self.indices:
            self.indices[number] = self.spans[number].indices(matrix.shape[1])
        return matrix.reshape(-1).take(self.indices[number])

    def _flatten(self, column: Column, inside: np.ndarray) -> Column:
        """The values inside the layout, in as few bytes as their type and range allow."""
        if column.dtype in ("int64", "bool") and inside.size:
            low, high = int(inside.min()), int(inside.max())
            if column.fill == 0 and low == high == 1:
                return column._replace(kind="ones")
            if column.fill == 0 and low >= 0 and high <= 1:
                self.values[column.name] = inside.astype(bool)
                return column._replace(kind="bits")
            if column.dtype == "int64" and low >= _INT32.min and high <= _INT32.max:
                self.values[column.name] = inside.astype(np.int32)
                return column._replace(kind="narrow")
        self.values[column.name] = inside
        return column._replace(kind="span")


def _load(schema: bytes, rows: int, buffer: np.ndarray, objects: dict[str, Any], meta: dict[str, Any]) -> Packed:
    """The inverse of `Packed.__reduce__`; arrays are views of `buffer`."""
    plain_layouts, plain_columns = pickle.loads(zlib.decompress(schema))
    layouts = [Layout(*plain) for plain in plain_layouts]
    columns = [Column(*plain) for plain in plain_columns]
    end = 0

    def take(count: int, dtype: np.dtype) -> np.ndarray:
        nonlocal end
        begin = -(-end // dtype.itemsize) * dtype.itemsize
        end = begin + count * dtype.itemsize
        return buffer[begin:end].view(dtype)

    spans: list[Span] = []
    for layout in layouts:
        if layout.parent is None:
            dtype = _span_dtype(layout.width)
            spans.append(Span(take(rows, dtype).astype(np.int64), take(rows, dtype).astype(np.int64)))
        else:
            spans.append(spans[layout.parent].clip(layout.low, layout.high))
    tokens = [int(span.length.sum()) for span in spans]
    values: dict[str, np.ndarray] = {}
    signs: dict[str, np.ndarray] = {}
    for column in columns:
        item = _bit_dtype(_torch_dtype(column.dtype).itemsize)
        if column.kind == "dense":
            values[column.name] = take(rows * int(np.prod(column.tail)), item).reshape(rows, *column.tail)
        elif column.kind == "span":
            values[column.name] = take(tokens[column.layout], item)
        elif column.kind == "narrow":
            values[column.name] = take(tokens[column.layout], np.dtype(np.int32))
        elif column.kind == "bits":
            count = tokens[column.layout]
            packed = take(-(-count // 8), np.dtype(np.uint8))
            values[column.name] = np.unpackbits(packed, count=count).view(bool)
        if column.signed:
            width = -(-column.tail[0] // 8)
            signs[column.name] = take(rows * width, np.dtype(np.uint8)).reshape(rows, width)
    return Packed(rows, layouts, columns, spans, values, signs, objects, meta, _schema=schema)


def _own_span(matrix: np.ndarray) -> Span:
    """From the first to the last entry that is not zero, in each row."""
    set_bits = matrix != 0
    start = set_bits.argmax(axis=1)
    last = matrix.shape[1] - 1 - set_bits[:, ::-1].argmax(axis=1)
    found = set_bits[np.arange(len(matrix)), start]
    return Span(start, np.where(found, last - start + 1, 0))


def _positions(span: Span, width: int, *, hold: bool) -> np.ndarray:
    """0 up to the first real token, then counting; after the last one its number (`hold`) or 0."""
    counted = np.arange(width)[None, :] - span.start[:, None]
    last = np.maximum(span.length - 1, 0)[:, None]
    if hold:
        return np.minimum(np.maximum(counted, 0, out=counted), last, out=counted)
    return np.where((counted < 0) | (counted > last), 0, counted)


def _counts_positions(matrix: np.ndarray, span: Span, *, hold: bool) -> bool:
    for begin in range(0, len(matrix), _ROWS_PER_BLOCK):
        rows = slice(begin, begin + _ROWS_PER_BLOCK)
        block = Span(span.start[rows], span.length[rows])
        if not np.array_equal(matrix[rows], _positions(block, matrix.shape[1], hold=hold)):
            return False
    return True


def _equal_blocks(a: np.ndarray, b: np.ndarray) -> bool:
    """array_equal that stops at the first difference."""
    blocks = [slice(i, i + _ROWS_PER_BLOCK) for i in range(0, len(a), _ROWS_PER_BLOCK)]
    return all(np.array_equal(a[rows], b[rows]) for rows in blocks)


def _span_dtype(width: int) -> np.dtype:
    return np.dtype(np.uint16 if width <= np.iinfo(np.uint16).max else np.int32)


def _bit_dtype(itemsize: int) -> np.dtype:
    return np.dtype(f"i{itemsize}")


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def can_pack(tensor: torch.Tensor) -> bool:
    """Whether `pack` takes it: nested, sparse, quantized and 16-byte types travel as pickled objects."""
    plain = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return plain and tensor.dtype.itemsize <= 8


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bits as signed integers of the same size: exact comparisons, NaN and -0.0 included."""
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return plain.view(signed).numpy()


def _values(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The bits as numbers where numpy has the type, so that -0.0 is zero."""
    return bits.view(f"f{bits.itemsize}") if dtype in (torch.float16, torch.float32, torch.float64) else bits


def _tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(array).view(_torch_dtype(dtype))
