"""Rows in groups: a batch of rows as a batch of groups of rows, and back (verl's names)."""

from __future__ import annotations

from typing import Any, TypeVar

from verl_lite.batch.columns import Batch, BatchError, copy_meta, tensor_dict

B = TypeVar("B", bound=Batch)


def fold_batch_dim(data: B, new_batch_size: int) -> B:
    """Columns (rows, ...) as (new_batch_size, rows / new_batch_size, ...), neighbours in one group; tensors are views.

    Raises BatchError unless new_batch_size divides the number of rows.
    """
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise BatchError(f"cannot fold {rows} rows into new_batch_size={new_batch_size}: it must divide them")
    return _reshaped(data, 1, (new_batch_size, rows // new_batch_size), new_batch_size)


def unfold_batch_dim(data: B, batch_dims: int = 2) -> B:
    """The inverse: the first `batch_dims` dimensions of every column become one, the rows; tensors are views if can be.

    Raises BatchError unless all columns, tensors or not, have the same sizes in these dimensions.
    """
    if batch_dims < 1:
        raise BatchError(f"batch_dims must be at least 1, found {batch_dims}")
    shapes = {name: tuple(column.shape) for name, column in _columns(data).items()}
    leading = {shape[:batch_dims] for shape in shapes.values()}
    if len(leading) > 1 or any(len(shape) < batch_dims for shape in leading):
        raise BatchError(f"all columns must agree in their first {batch_dims} dimensions, found {shapes}")
    rows = 1
    for size in next(iter(leading), (len(data),)):
        rows *= size
    return _reshaped(data, batch_dims, (rows,), rows)


def _columns(data: Batch) -> dict[str, Any]:
    tensors = {} if data.batch is None else dict(data.batch.items())
    return tensors | data.non_tensor_batch


def _reshaped(data: B, old_dims: int, leading: tuple[int, ...], rows: int) -> B:
    """Every column with `leading` in place of its first `old_dims` dimensions."""
    columns = {name: value.reshape(*leading, *value.shape[old_dims:]) for name, value in _columns(data).items()}
    arrays = {name: columns.pop(name) for name in data.non_tensor_batch}
    batch: Any = None if data.batch is None else tensor_dict(columns, rows)
    return type(data)(batch, arrays, copy_meta(data.meta_info))
