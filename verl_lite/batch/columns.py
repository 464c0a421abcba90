"""What a batch consists of: columns of rows, and facts about the whole. Making them, uniting them, copying them.

Takes and gives plain tensors, numpy arrays and dicts; `DataProto` (`protocol.py`) is built on it. Values that are in
both of two batches must be equal (`same`), otherwise a BatchError names the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch

if TYPE_CHECKING:
    from tensordict import TensorDict


class Batch(Protocol):
    """What the functions of this folder use of a DataProto."""

    batch: TensorDict
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    def __init__(
        self, batch: TensorDict, non_tensor_batch: dict[str, np.ndarray], meta_info: dict[str, Any]
    ) -> None: ...

    def __len__(self) -> int: ...

    def select(self, *, meta_info_keys: Sequence[str]) -> Self: ...

    def pack(self) -> Any: ...

    @classmethod
    def from_parts(cls, parts: list[Any]) -> Self: ...


class BatchError(AssertionError, ValueError):
    """Batches that do not fit together. Both a ValueError and, as in verl, an AssertionError."""


def tensor_dict(tensors: dict[str, Any], rows: int) -> TensorDict:
    """Columns of `rows` rows. tensordict is imported here: it takes 4 s of CPU, which many processes never need."""
    from tensordict import TensorDict

    return TensorDict(tensors, batch_size=[rows])


def as_column(values: Any) -> np.ndarray:
    """One array entry per row. Lists become object arrays: equal-length lists do not collapse into a matrix."""
    if isinstance(values, np.ndarray):
        return values
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def union_tensor_dict(first: TensorDict | None, second: TensorDict | None) -> TensorDict | None:
    """`first` with the columns of `second` added, in place; equal names need equal tensors (NaN equals NaN)."""
    if first is None or second is None:
        return second.copy() if second is not None else first
    if first.batch_size != second.batch_size:
        raise BatchError(f"cannot unite batches of {tuple(first.batch_size)} and {tuple(second.batch_size)} rows")
    for name, value in second.items():
        if name not in first.keys():
            first[name] = value
        elif not same(first[name], value):
            raise BatchError(f"column {name!r} is in both batches with different values")
    return first


def union_numpy_dict(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`first` with the columns of `second` added, in place; equal names need equal arrays (NaN equals NaN)."""
    for name, value in second.items():
        if name in first and not same(first[name], value):
            raise BatchError(f"non-tensor column {name!r} is in both batches with different values")
        first[name] = value
    return first


def concat_meta(metas: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts' meta_info as one: "metrics" (a dict, or a list of them) to a dict of lists, others must be equal."""
    metrics: dict[str, list[Any]] = {}
    found = False
    for meta in metas:
        value = meta.get("metrics")
        found = found or value is not None
        for one in value if isinstance(value, list | tuple) else [value or {}]:
            for name, entry in one.items():
                metrics.setdefault(name, []).append(entry)
    merged = union_meta([{k: v for k, v in meta.items() if k != "metrics"} for meta in metas])
    return merged | {"metrics": metrics} if found else merged


def union_meta(metas: list[dict[str, Any]]) -> dict[str, Any]:
    """All keys of all parts, in new containers; a key in several parts needs equal values, else BatchError."""
    merged: dict[str, Any] = {}
    for name, value in (item for meta in metas for item in meta.items()):
        if name in merged and merged[name] is not value and not same(merged[name], value):
            raise BatchError(f"Conflicting values for meta_info key {name!r}: {merged[name]!r} and {value!r}")
        merged[name] = value
    return copy_meta(merged)


def copy_meta(value: Any) -> Any:
    """Containers are new, what is in them is shared."""
    if type(value) is dict:
        return {name: copy_meta(entry) for name, entry in value.items()}
    if type(value) is list:
        return [copy_meta(entry) for entry in value]
    return value


def same(a: Any, b: Any, seen: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Deep equality in which NaN equals NaN and arrays compare by elements; cycles count as equal where they close."""
    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b) and not (np.isscalar(a) and np.isscalar(b)):
        return False
    seen = seen | {(id(a), id(b))}
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    if hasattr(a, "keys"):  # dict, TensorDict
        return set(a.keys()) == set(b.keys()) and all(same(a[name], b[name], seen) for name in a.keys())
    if isinstance(a, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype != object:
            return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
        return all(same(x, y, seen) for x, y in zip(a.flat, b.flat, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y, seen) for x, y in zip(a, b, strict=True))
    return bool(a == b) or bool(a != a and b != b)
