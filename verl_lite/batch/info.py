"""What a batch holds, in words for a log: columns with shapes and types, and bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl_lite.batch.columns import Batch


def get_data_info(data: Batch) -> str:
    """A line each: tensors (shape, dtype, device), arrays (shape, what is in them), meta_info (type)."""
    tensors = {} if data.batch is None else dict(data.batch.items())
    sections = {
        "batch": {name: describe(value) for name, value in tensors.items()},
        "non_tensor_batch": {name: describe(value) for name, value in data.non_tensor_batch.items()},
        "meta_info": {name: describe(value) for name, value in data.meta_info.items()},
    }
    lines = [f"DataProto of {len(data)} rows"]
    for section, entries in sections.items():
        lines += [section, *(f"  {name}: {words}" for name, words in entries.items())]
    return "\n".join(lines)


def describe(value: Any) -> str:
    """A value's type, with what its containers hold: `(4, 8) int64 on cpu`, `(4,) of str`, `dict of int, list`."""
    if isinstance(value, torch.Tensor):
        shape = "(jagged)" if value.is_nested else tuple(value.shape)
        return f"{shape} {str(value.dtype).removeprefix('torch.')} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"{value.shape} of {_types(value.flat) if value.dtype == object else value.dtype}"
    if isinstance(value, dict):
        return f"dict of {_types(value.values())}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {_types(value)}"
    return type(value).__name__


def _types(values: Any) -> str:
    return ", ".join(sorted({type(value).__name__ for value in values})) or "nothing"


def size_in_words(data: Batch) -> str:
    """Bytes of tensors and of arrays. Objects in columns are counted as references, 8 bytes each, and named."""
    tensors = 0 if data.batch is None else data.batch.bytes()
    arrays = sum(array.nbytes for array in data.non_tensor_batch.values())
    objects = [name for name, array in data.non_tensor_batch.items() if array.dtype == object]
    words = f"{len(data)} rows, tensors {tensors / 1e6:.3f} MB, arrays {arrays / 1e6:.3f} MB"
    return words + (f" (without the objects that {', '.join(objects)} refer to)" if objects else "")
