"""The merging and comparison of columns and meta_info, by which batches are united and concatenated."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from verl_lite.batch.wire import MetaInfo

Value = TypeVar("Value")
Array = TypeVar("Array", torch.Tensor, np.ndarray)


class BatchError(AssertionError, ValueError):
    """Raised for batches or columns that do not match. Both a ValueError and, as in verl, an AssertionError."""


def union_meta(metas: list[MetaInfo]) -> MetaInfo:
    """Merges the keys of all parts into new containers. Raises BatchError if a key has different values."""
    merged: MetaInfo = {}
    for meta in metas:
        unite(merged, meta, "Conflicting values for meta_info key")
    return copy_meta(merged)


def unite(first: MutableMapping[str, Value], second: Mapping[str, Value], kind: str) -> None:
    """Adds the entries of `second` to `first` in place. Raises BatchError if a name has different values."""
    for name, value in second.items():
        if name not in first.keys():
            first[name] = value
        elif not same(first[name], value):
            raise BatchError(f"{kind} {name!r}: both batches have it, with different values")


def concat_meta(metas: list[MetaInfo]) -> MetaInfo:
    """Merges meta_info: "metrics" (dicts or lists of dicts) becomes a dict of lists; other values must be equal."""
    metrics: dict[str, list[object]] = {}
    has_metrics = False
    others = []
    for meta in metas:
        others.append({name: value for name, value in meta.items() if name != "metrics"})
        metrics_of_part = meta.get("metrics")
        if metrics_of_part is None:
            continue
        has_metrics = True
        if not isinstance(metrics_of_part, list | tuple):
            metrics_of_part = [metrics_of_part]
        for entries in metrics_of_part:
            for name, entry in entries.items():
                metrics.setdefault(name, []).append(entry)

    merged = union_meta(others)
    if has_metrics:
        merged["metrics"] = metrics
    return merged


def copy_meta(meta_info: MetaInfo) -> MetaInfo:
    """Copies the dict, and the dicts and lists in it recursively; all other objects are shared."""
    return {name: _copied(value) for name, value in meta_info.items()}


def _copied(value: object) -> object:
    if type(value) is dict:
        return {name: _copied(entry) for name, entry in value.items()}
    if type(value) is list:
        return [_copied(entry) for entry in value]
    return value


def same(first: object, second: object) -> bool:
    """Compares deeply; NaN equals NaN, and arrays are compared by element."""
    # a number may come back from a worker as a numpy scalar
    are_scalars = np.isscalar(first) and np.isscalar(second)
    if type(first) is not type(second) and not are_scalars:
        return False
    match first, second:
        case Mapping(), Mapping():  # dict, TensorDict
            return _same_columns(first, second)
        case list() | tuple(), list() | tuple():
            return _same_entries(first, second)
        case torch.Tensor(), torch.Tensor():
            return _same_values(first, second)
        case np.ndarray(), np.ndarray():
            return _same_values(first, second)
    are_both_nan = first != first and second != second
    return bool(first == second) or bool(are_both_nan)


def _same_columns(first: Mapping[str, object], second: Mapping[str, object]) -> bool:
    # a TensorDict iterates over its rows, and only keys() over its names
    names = first.keys()
    if set(names) != set(second.keys()):
        return False
    return all(same(first[name], second[name]) for name in names)


def _same_entries(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(same, first, second))


def _same_values(first: Array, second: Array) -> bool:
    """Compares two tensors or two arrays by element."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    # a comparison of whole object arrays would compare their entries by `==`, which is ambiguous for arrays
    if isinstance(first, np.ndarray) and first.dtype == np.dtype(object):
        return _same_entries(list(first), list(second))
    are_both_nan = (first != first) & (second != second)
    are_equal = (first == second) | are_both_nan
    return bool(are_equal.all())
