"""What a batch consists of: columns of rows, and facts about the whole. Making them, uniting them, copying them.

Values that are in both of two batches must be equal (`same`), otherwise a BatchError names the key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from tensordict import TensorDict


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
    return _united(first, second, "column")


def union_numpy_dict(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`first` with the columns of `second` added, in place; equal names need equal arrays (NaN equals NaN)."""
    return _united(first, second, "non-tensor column")


def union_meta(metas: list[dict[str, Any]]) -> dict[str, Any]:
    """All keys of all parts, in new containers; a key in several parts needs equal values, else BatchError."""
    merged: dict[str, Any] = {}
    for meta in metas:
        _united(merged, meta, "Conflicting values for meta_info key")
    return copy_meta(merged)


def _united(first: Any, second: Any, kind: str) -> Any:
    for name, value in second.items():
        if name not in first.keys():
            first[name] = value
        elif not same(first[name], value):
            raise BatchError(f"{kind} {name!r}: both batches have it, with different values")
    return first


def concat_meta(metas: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts' meta_info as one: "metrics" (a dict, or a list of them) to a dict of lists, others must be equal."""
    metrics: dict[str, list[Any]] = {}
    found = [meta["metrics"] for meta in metas if meta.get("metrics") is not None]
    for value in found:
        for one in value if isinstance(value, list | tuple) else [value]:
            for name, entry in one.items():
                metrics.setdefault(name, []).append(entry)
    merged = union_meta([{k: v for k, v in meta.items() if k != "metrics"} for meta in metas])
    return merged | {"metrics": metrics} if found else merged


def copy_meta(value: Any) -> Any:
    """Containers are new, what is in them is shared."""
    if type(value) is dict:
        return {name: copy_meta(entry) for name, entry in value.items()}
    return [copy_meta(entry) for entry in value] if type(value) is list else value


def same(a: Any, b: Any) -> bool:
    """Deep equality in which NaN equals NaN and arrays compare by elements."""
    if a is b:
        return True
    if type(a) is not type(b) and not (np.isscalar(a) and np.isscalar(b)):
        return False
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    if hasattr(a, "keys"):  # dict, TensorDict
        return set(a.keys()) == set(b.keys()) and all(same(a[name], b[name]) for name in a.keys())
    if isinstance(a, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype != object:
            return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
        return all(same(x, y) for x, y in zip(a.flat, b.flat, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or bool(a != a and b != b)
