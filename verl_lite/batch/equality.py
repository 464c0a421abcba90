"""Equality of what batches hold: arrays, tensors, and plain containers of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


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
