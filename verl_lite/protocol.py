"""DataProto, the batch type of all components, with the methods of verl's DataProto.

Results never share `meta_info` with their source. `union`, `pop`, `rename`, `reorder` and `to` change a batch in place,
because verl's users rely on that; `a | b` returns the union without changing a or b. A pickled batch contains no
padding (`wire.py`).
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, overload

import numpy as np
import torch

from verl_lite.batch import wire
from verl_lite.batch.meta import BatchError, concat_meta, copy_meta, union_meta, unite
from verl_lite.batch.wire import MetaInfo

if TYPE_CHECKING:
    from tensordict import TensorCollection, TensorDict

T = TypeVar("T")
Value = TypeVar("Value")

Index = slice | list[int] | list[bool] | np.ndarray | torch.Tensor
RowIndex = slice | torch.Tensor


@dataclass
class DataProtoItem:
    """One row of a DataProto."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, object] = field(default_factory=dict)
    meta_info: MetaInfo = field(default_factory=dict)


# no comparison by fields: that of two tensors has no truth value
@dataclass(eq=False)
class DataProto:
    """A batch of rows: tensors with a common first dimension (`batch`), numpy arrays of the same length for other
    columns (`non_tensor_batch`), and data about the whole batch (`meta_info`).

    `batch` is None if there are no tensors. Its type omits None, because code that reads a column knows that tensors
    exist. verl's auto-padding is not needed: `chunk` accepts any number of rows, and a dispatch pads a copy (`pad`).
    """

    batch: TensorDict = None  # type: ignore[assignment]
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: MetaInfo = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = self.non_tensor_batch or {}
        self.meta_info = self.meta_info or {}
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raises BatchError unless all columns have the same number of rows."""
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise BatchError(f"batch must have one batch dimension, found batch_size {tuple(self.batch.batch_size)}")
        rows = len(self)
        for name, value in self.non_tensor_batch.items():
            is_array = isinstance(value, np.ndarray)
            # a scalar array has no length
            if not is_array or value.ndim == 0 or len(value) != rows:
                actual = getattr(value, "shape", type(value).__name__)
                raise BatchError(f"non_tensor_batch[{name!r}] must be a numpy array of {rows} rows, found {actual}")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor | TensorCollection] | TensorDict | None = None,
        non_tensors: Mapping[str, Sequence[object] | np.ndarray] | None = None,
        meta_info: MetaInfo | None = None,
        num_batch_dims: int = 1,
    ) -> DataProto:
        """Creates a batch from tensors and from sequences of arbitrary objects. The arguments are not changed."""
        columns: dict[str, torch.Tensor | TensorCollection] = {}
        if tensors is not None:
            columns.update(tensors.items())
        sizes = {}
        for name, column in columns.items():
            sizes[name] = -1
            if column.ndim:
                sizes[name] = column.shape[0]
        row_counts = set(sizes.values())
        if num_batch_dims != 1 or len(row_counts) > 1 or -1 in row_counts:
            raise BatchError(f"all tensors must have the same number of rows, found {sizes} (-1: a scalar)")

        batch = None
        if columns:
            [rows] = row_counts
            batch = tensor_dict(columns, rows)
        arrays = {name: as_column(value) for name, value in (non_tensors or {}).items()}
        return cls(batch, arrays, copy_meta(meta_info or {}))  # type: ignore[arg-type]

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, torch.Tensor | np.ndarray], meta_info: MetaInfo | None = None
    ) -> DataProto:
        """Creates a batch from one dict: tensors go to `batch`, numpy arrays to `non_tensor_batch`."""
        tensors = {}
        arrays = {}
        for name, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif isinstance(value, np.ndarray):
                arrays[name] = value
            else:
                raise ValueError(f"column {name!r} must be a tensor or a numpy array, found {type(value).__name__}")
        return cls.from_dict(tensors, arrays, meta_info)

    @classmethod
    def from_packed(cls, packed: wire.Packed) -> DataProto:
        """Restores a packed batch. The result shares only the objects in its columns with `packed`."""
        tensors: dict[str, object] = dict(packed.unpack())
        arrays = {}
        for name, value in packed.objects.items():
            if isinstance(value, np.ndarray):
                # a slice of a packed batch has views of its arrays
                arrays[name] = value.copy()
            else:  # a tensor that cannot be packed
                tensors[name] = value
        batch = tensor_dict(tensors, packed.rows) if packed.meta.has_batch else None
        return cls(batch, arrays, copy_meta(packed.meta.meta_info))  # type: ignore[arg-type]

    @classmethod
    def from_parts(cls, parts: list[wire.Packed]) -> DataProto:
        """Restores packed parts as one batch; see `concat`."""
        joined = wire.concat(parts)
        if joined is None:
            # the parts have different columns, or encodings that depend on their rows
            batches = [cls.from_packed(part) for part in parts]
            return DataProto.concat(batches)
        result = cls.from_packed(joined)
        result.meta_info = concat_meta([part.meta.meta_info for part in parts])
        return result

    def pack(self) -> wire.Packed:
        """Converts to the wire format: real tokens only, sliceable by rows. It copies tensors but not objects."""
        tensors: dict[str, torch.Tensor] = {}
        objects: dict[str, wire.SliceableColumn] = dict(self.non_tensor_batch)
        if self.batch is not None:
            for name, value in self.batch.items():
                if isinstance(value, torch.Tensor) and wire.can_pack(value):
                    tensors[name] = value
                else:
                    objects[name] = value
        meta = wire.Meta(self.meta_info, has_batch=self.batch is not None)
        return wire.pack(tensors, objects, meta, len(self))

    # pickle, Ray and save_to_disk all use the wire format
    def __reduce__(self) -> tuple[Callable[[wire.Packed], DataProto], tuple[wire.Packed]]:
        return type(self).from_packed, (self.pack(),)

    def __deepcopy__(self, memo: dict[int, object]) -> DataProto:
        # without this method copy.deepcopy would call __reduce__, whose tensors are on the CPU
        batch = self.batch
        if batch is not None:
            batch = batch.clone()
        arrays = copy.deepcopy(self.non_tensor_batch, memo)
        meta = copy.deepcopy(self.meta_info, memo)
        return type(self)(batch, arrays, meta)

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        first = next(iter(self.non_tensor_batch.values()), None)
        if isinstance(first, np.ndarray) and first.ndim:
            return len(first)
        # no column, or one that `check_consistency` is about to refuse, which needs a length too
        return 0

    def __contains__(self, name: str) -> bool:
        is_tensor = self.batch is not None and name in self.batch.keys()
        return is_tensor or name in self.non_tensor_batch

    @overload
    def __getitem__(self, item: int | np.integer) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: Index) -> DataProto: ...
    def __getitem__(self, item: int | np.integer | Index) -> DataProtoItem | DataProto:
        """Returns a DataProtoItem for an int, and a DataProto for a slice, or for indices or a bool mask."""
        if isinstance(item, slice):
            return self._rows(item)
        if isinstance(item, list):
            return self.select_idxs(item)
        if isinstance(item, np.ndarray | torch.Tensor) and item.ndim:
            return self.select_idxs(item)

        # a TypeError for anything but a whole number
        row = operator.index(item)
        tensors = None
        if self.batch is not None:
            tensors = self.batch[row]
        entries = {name: value[row] for name, value in self.non_tensor_batch.items()}
        return DataProtoItem(tensors, entries, copy_meta(self.meta_info))

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Returns the named columns; None selects all of that kind. Tensors are shared unless `deepcopy`."""
        batch = self.batch
        if batch is not None and batch_keys is None:
            batch = batch.copy()
        elif batch is not None:
            batch = batch.select(*batch_keys)
        arrays = _entries_of(self.non_tensor_batch, non_tensor_batch_keys)
        meta = _entries_of(self.meta_info, meta_info_keys)
        result = type(self)(batch, arrays, copy_meta(meta))
        if deepcopy:
            result = copy.deepcopy(result)
        return result

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor) -> DataProto:
        """Returns copies of rows, by indices or a bool mask. Raises BatchError for uint8, which may mean either."""
        index = torch.as_tensor(idxs)
        if index.dtype == torch.uint8 or index.is_floating_point():
            raise BatchError(f"rows are chosen by whole numbers or a bool mask, found {index.dtype}: convert it")
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        return self._rows(index.long())

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Returns rows [start:end:step]; tensors are views."""
        return self._rows(slice(start, end, step))

    def _rows(self, index: RowIndex) -> DataProto:
        """Selects rows. index: a slice, or a tensor of row numbers on any device."""
        # numpy needs the index on the host, a tensor on its own device
        array_index: Index = index
        tensor_index = index
        if isinstance(index, torch.Tensor):
            array_index = index.cpu().numpy()
            if self.batch is not None and self.batch.device is not None:
                tensor_index = index.to(self.batch.device)
        arrays = {name: value[array_index] for name, value in self.non_tensor_batch.items()}
        batch = self.batch
        if batch is not None:
            batch = batch[tensor_index]
        return type(self)(batch, arrays, copy_meta(self.meta_info))

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Removes columns from this batch in place and returns them as a batch. Raises BatchError if one is missing."""
        tensors: TensorDict | dict[str, torch.Tensor | TensorCollection] = {}
        if self.batch is not None:
            tensors = self.batch
        # all checks before the first removal, so that an error changes nothing
        _require_names(list(tensors.keys()), batch_keys)
        _require_names(list(self.non_tensor_batch), non_tensor_batch_keys)
        _require_names(list(self.meta_info), meta_info_keys)
        return type(self).from_dict(
            {name: tensors.pop(name) for name in batch_keys or ()},
            {name: self.non_tensor_batch.pop(name) for name in non_tensor_batch_keys or ()},
            {name: self.meta_info.pop(name) for name in meta_info_keys or ()},
        )

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Renames tensors in place."""
        old_names = _name_list(old_keys)
        new_names = _name_list(new_keys)
        if len(old_names) != len(new_names):
            raise ValueError(f"rename needs as many new names as old ones, found {old_names} and {new_names}")
        if self.batch is None:
            return self
        # all are removed first, so that two names can be swapped
        columns = [self.batch.pop(name) for name in old_names]
        for name, column in zip(new_names, columns, strict=True):
            self.batch[name] = column
        return self

    def union(self, other: DataProto) -> DataProto:
        """Adds the columns and meta_info of `other` in place. Raises BatchError if an entry of both has two values."""
        if self.batch is not None and other.batch is not None:
            if self.batch.batch_size != other.batch.batch_size:
                raise BatchError(f"cannot unite batches of {len(self)} and {len(other)} rows")
            unite(self.batch, other.batch, "column")
        elif other.batch is not None:
            # a copy, so that later columns of this batch are not added to the other one
            self.batch = other.batch.copy()
        unite(self.non_tensor_batch, other.non_tensor_batch, "non-tensor column")
        # new containers, because results never share meta_info with their sources
        self.meta_info = union_meta([self.meta_info, other.meta_info])
        self.check_consistency()
        return self

    def __or__(self, other: DataProto) -> DataProto:
        """Returns the union as a new batch."""
        return self.select().union(other)

    def reorder(self, indices: torch.Tensor | np.ndarray | Sequence[int]) -> None:
        """Reorders the rows in place."""
        ordered = self.select_idxs(indices)
        self.batch = ordered.batch
        self.non_tensor_batch = ordered.non_tensor_batch

    def to(self, device: torch.device | str) -> DataProto:
        """Moves the tensors in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def pad(self, divisor: int) -> DataProto:
        """Returns a batch whose length is a multiple of `divisor`, with copies of row 0 appended if necessary.

        The appended rows have no weight: `is_padding` (rows,) bool is True and `response_mask`, if present, is 0.
        """
        rows = len(self)
        missing = -rows % divisor
        if missing == 0:
            return self.select()
        rows_and_padding = list(range(rows)) + [0] * missing
        padded = self.select_idxs(rows_and_padding)
        if padded.batch is None:
            padded.batch = tensor_dict({}, rows + missing)
        if "is_padding" not in padded.batch.keys():
            # the device of the other columns, because the TensorDict may have none of its own
            device = next((column.device for column in padded.batch.values()), None)
            padded.batch["is_padding"] = torch.zeros(rows + missing, dtype=torch.bool, device=device)
        padded.batch["is_padding"][rows:] = True
        if "response_mask" in padded.batch.keys():
            padded.batch["response_mask"][rows:] = 0
        return padded

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Repeats each row `repeat_times` times: aabb with `interleave`, else abab."""
        rows = torch.arange(len(self))
        if interleave:
            return self._rows(rows.repeat_interleave(repeat_times))
        return self._rows(rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | torch.Tensor | np.ndarray) -> DataProto:
        """Repeats row i repeat_times[i] times."""
        counts = torch.as_tensor(repeat_times, dtype=torch.long).flatten()
        num_rows = len(self)
        if len(counts) != num_rows:
            raise BatchError(f"repeat_times has {len(counts)} entries, the batch {num_rows} rows")
        rows = torch.arange(num_rows)
        return self._rows(rows.repeat_interleave(counts))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Splits into `chunks` batches whose lengths differ by at most one, longer batches first. Tensors are views."""
        return [self.slice(start, stop) for start, stop in chunk_bounds(len(self), chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Splits into batches of `split_size` rows; the last batch may be shorter."""
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Concatenates batches. meta_info["metrics"] becomes a dict of lists; other keys must have equal values."""
        if not data:
            raise ValueError("DataProto.concat needs at least one batch")
        # before anything is joined, so that the error names the column and the parts
        _require_same_columns(data)
        first = data[0]
        batch = None
        if first.batch is not None:
            batch = first.batch.cat([part.batch for part in data])
        arrays = {}
        for name in first.non_tensor_batch:
            arrays[name] = np.concatenate([part.non_tensor_batch[name] for part in data])
        meta = concat_meta([part.meta_info for part in data])
        return type(first)(batch, arrays, meta)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, bool] | None = None,
    ) -> Iterator[DataProto]:
        """Iterates over mini-batches for `epochs` epochs. dataloader_kwargs={"shuffle": True} shuffles each epoch.

        Raises BatchError if mini_batch_size does not divide the rows, or if dataloader_kwargs has another key.
        """
        options = dataloader_kwargs or {}
        unknown_options = options.keys() - {"shuffle"}
        is_divisible = len(self) % mini_batch_size == 0
        if unknown_options or not is_divisible:
            raise BatchError(
                f"dataloader_kwargs={options}, mini_batch_size={mini_batch_size}: only shuffle is known, and the size "
                f"must divide {len(self)} rows"
            )
        generator = None
        if options.get("shuffle", False):
            # a generator of its own, because a draw from torch's default would change the caller's next numbers
            generator = torch.Generator()
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)
        # the generator is a method of its own, so that a wrong argument raises here and not at the first batch
        return self._mini_batches(mini_batch_size, epochs, generator)

    def _mini_batches(self, size: int, epochs: int, generator: torch.Generator | None) -> Iterator[DataProto]:
        """Yields mini-batches, in an order that `generator` draws for each epoch; None = rows in order."""
        for _ in range(epochs):
            order = torch.arange(len(self))
            if generator is not None:
                order = torch.randperm(len(self), generator=generator)
            for rows in order.split(size):
                yield self._rows(rows)

    def save_to_disk(self, filepath: str | Path) -> None:
        """Writes the batch as a pickle, which `load_from_disk` reads."""
        Path(filepath).write_bytes(pickle.dumps(self, protocol=5))

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Loads a file written by `save_to_disk`. The file is a pickle: load only files that you trust."""
        return pickle.loads(Path(filepath).read_bytes())


class DataProtoFuture(Generic[T]):
    """A result that workers are still computing. A method with blocking=False returns it, and other worker methods
    accept it as an argument."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish = functools.cache(finish)

    def get(self) -> T:
        """Waits for the result and returns it, the same object in each call."""
        return self._finish()


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Returns (padded batch, number of added rows). It repeats rows from the start, unmarked as in verl; see `pad`."""
    rows = len(data)
    missing = -rows % size_divisor
    if missing == 0:
        return data, 0
    # the remainder, because a batch can be shorter than the number of missing rows
    repeated_rows = np.arange(rows + missing) % rows
    return data.select_idxs(repeated_rows), missing


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Returns the batch without its last `pad_size` rows."""
    if not pad_size:
        return data
    rows = len(data) - pad_size
    return data.slice(0, max(0, rows))


def chunk_bounds(rows: int, chunks: int) -> list[tuple[int, int]]:
    """Returns [start, stop) of each of `chunks` parts, split as by numpy.array_split."""
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, found {chunks}")
    size, num_longer = divmod(rows, chunks)
    bounds = []
    start = 0
    for part in range(chunks):
        stop = start + size
        if part < num_longer:
            stop += 1
        bounds.append((start, stop))
        start = stop
    return bounds


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """Combines rows into a batch."""
    first = items[0]
    batch = None
    if first.batch is not None:
        batch = first.batch.stack([item.batch for item in items])
    arrays = {}
    for name in first.non_tensor_batch:
        arrays[name] = as_column([item.non_tensor_batch[name] for item in items])
    return DataProto(batch, arrays, copy_meta(first.meta_info))  # type: ignore[arg-type]


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Reshapes columns (rows, ...) to (new_batch_size, rows / new_batch_size, ...); adjacent rows form a group."""
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise BatchError(f"cannot fold {rows} rows into new_batch_size={new_batch_size}: it must divide them")
    group_size = rows // new_batch_size
    return _reshaped(data, 1, (new_batch_size, group_size))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Inverse of `fold_batch_dim`: merges the first `batch_dims` dimensions of every column into rows."""
    shapes = {name: tuple(column.shape) for name, column in _columns(data).items()}
    leading_shapes = {shape[:batch_dims] for shape in shapes.values()}
    has_short_shape = any(len(shape) < batch_dims for shape in leading_shapes)
    if batch_dims < 1 or len(leading_shapes) > 1 or has_short_shape:
        raise BatchError(f"all columns must agree in their first {batch_dims} dimensions, found {shapes}")
    # without a column, the number of rows stays
    rows = len(data)
    if leading_shapes:
        [leading_shape] = leading_shapes
        rows = math.prod(leading_shape)
    return _reshaped(data, batch_dims, (rows,))


def _entries_of(source: Mapping[str, Value], names: Sequence[str] | None) -> dict[str, Value]:
    """Returns the named entries, or all of them for None. Ignores names that do not exist."""
    if names is None:
        return dict(source)
    return {name: value for name, value in source.items() if name in names}


def _name_list(names: str | Sequence[str]) -> list[str]:
    # a text is one name, not a sequence of characters
    if isinstance(names, str):
        return [names]
    return list(names)


def _require_names(present: Sequence[object], names: Sequence[str] | None) -> None:
    """Raises BatchError unless all names that `pop` removes are present."""
    missing = [name for name in names or () if name not in present]
    if missing:
        raise BatchError(f"cannot pop {missing}: this batch has {present}")


def _columns(data: DataProto) -> dict[str, np.ndarray | torch.Tensor | TensorCollection]:
    """Returns all columns by name."""
    columns: dict[str, np.ndarray | torch.Tensor | TensorCollection] = dict(data.non_tensor_batch)
    if data.batch is not None:
        columns.update(data.batch.items())
    return columns


def _require_same_columns(parts: Sequence[DataProto]) -> None:
    """Raises BatchError if a column is missing in some of the parts."""
    names_of_parts = [set(_columns(part)) for part in parts]
    all_names = set().union(*names_of_parts)
    # sorted, so that the message names the same column in every process
    for name in sorted(all_names):
        with_column = []
        without_column = []
        for part, names in enumerate(names_of_parts):
            if name in names:
                with_column.append(part)
            else:
                without_column.append(part)
        if without_column:
            raise BatchError(
                f"concat: column {name!r} is missing in part {without_column[0]}, and is in parts {with_column}"
            )


def _reshaped(data: DataProto, old_dims: int, leading: tuple[int, ...]) -> DataProto:
    """Returns the batch with the first `old_dims` dimensions of every column replaced by `leading`."""
    arrays = {}
    for name, array in data.non_tensor_batch.items():
        shape = (*leading, *array.shape[old_dims:])
        arrays[name] = array.reshape(*shape)
    batch = None
    if data.batch is not None:
        tensors = {}
        for name, tensor in data.batch.items():
            shape = (*leading, *tensor.shape[old_dims:])
            tensors[name] = tensor.reshape(*shape)
        batch = tensor_dict(tensors, leading[0])
    return type(data)(batch, arrays, copy_meta(data.meta_info))


def tensor_dict(tensors: Mapping[str, object], rows: int) -> TensorDict:
    """Creates a TensorDict of `rows` rows."""
    # not at the top: the import takes 4 s of CPU, and many processes need no tensors
    from tensordict import TensorDict

    return TensorDict(tensors, batch_size=[rows])


def as_column(values: Sequence[object] | np.ndarray) -> np.ndarray:
    """Returns an array with one entry per row. A list of equally long lists becomes an object array, not a matrix."""
    if isinstance(values, np.ndarray):
        return values
    # numpy.array would make a matrix of lists of equal lengths
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column
