"""A batch as one TensorDict and back: verl's form for code that speaks TensorDict only.

Tensors are columns of it, columns of objects are NonTensorStacks (one entry per row), facts about the whole are
NonTensorData. Tensors and objects are shared, not copied. Imported when first needed, as tensordict is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl_lite.batch.columns import BatchError, as_column, copy_meta, tensor_dict


class BatchParts(NamedTuple):
    """The three fields of a DataProto."""

    batch: TensorDict | None
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]


def join_parts(parts: BatchParts, rows: int) -> TensorDict:
    """One TensorDict of batch_size [rows]. A name in two of the parts is a BatchError."""
    joined = TensorDict({}, batch_size=[rows]) if parts.batch is None else parts.batch.copy()
    stacks: dict[str, Any] = {
        name: NonTensorStack(*(NonTensorData(entry) for entry in column))
        for name, column in parts.non_tensor_batch.items()
    }
    facts: dict[str, Any] = {name: NonTensorData(copy_meta(value)) for name, value in parts.meta_info.items()}
    for kind, entries in (("non_tensor_batch", stacks), ("meta_info", facts)):
        for name, value in entries.items():
            if name in joined.keys():
                raise BatchError(
                    f"{kind}[{name!r}] has the name of a column: a TensorDict holds one of them, rename it"
                )
            joined.set(name, value)
    return joined


def separate_parts(joined: TensorDict, meta_info: dict[str, Any] | None = None) -> BatchParts:
    """The inverse of `join_parts`; `meta_info` is added, and a name that is already there is a BatchError.

    Columns of objects come back as object arrays, whatever type of array they were.
    """
    if len(joined.batch_size) != 1:
        raise BatchError(f"the TensorDict must have one batch dimension, found {tuple(joined.batch_size)}")
    tensors: dict[str, torch.Tensor | TensorDict] = {}
    arrays: dict[str, np.ndarray] = {}
    facts = copy_meta(meta_info or {})
    for name in map(str, joined.keys()):
        value = joined.get(name)
        if isinstance(value, NonTensorStack):
            arrays[name] = as_column(value.tolist())
        elif not isinstance(value, NonTensorData):
            tensors[name] = value
        elif name in facts:
            raise BatchError(f"meta_info has {name!r}, and so has the TensorDict: remove one of them")
        else:
            facts[name] = copy_meta(value.data)
    rows = joined.batch_size[0]
    batch = tensor_dict(tensors, rows) if tensors or (rows and not arrays) else None
    return BatchParts(batch, arrays, facts)
