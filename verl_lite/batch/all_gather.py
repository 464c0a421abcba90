"""The rows of all ranks on every rank, over torch.distributed. Ranks may hold different numbers of rows."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from verl_lite.batch.columns import Batch, BatchError

B = TypeVar("B", bound=Batch)


def all_gather_data_proto(data: B, process_group: dist.ProcessGroup | None = None) -> B:
    """Replace the rows of `data`, in place as in verl, by those of all ranks in rank order; returns `data`.

    Travels in the wire format (`wire.py`), so padding costs nothing and every number arrives as it was sent. The
    tensors return to the devices that they came from. meta_info stays that of the own rank.

    Args:
        data: (rows of this rank, ...) columns; the same columns on every rank.
        process_group: the ranks that take part, all of which must call this; None = all.

    Raises:
        BatchError: on every rank alike, if the ranks' columns differ.
    """
    packed = data.select(meta_info_keys=[]).pack()
    tensors = [] if data.batch is None else sorted(map(str, data.batch.keys()))
    payloads: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(payloads, ((tensors, sorted(data.non_tensor_batch)), packed), group=process_group)
    names = [found for found, _ in payloads]
    if any(found != names[0] for found in names):
        raise BatchError(f"the ranks' batches must have the same columns, found by rank {names}")
    gathered = data.from_parts([part for _, part in payloads])
    if data.batch is not None:
        for name, value in data.batch.items():
            if isinstance(value, torch.Tensor):
                gathered.batch[name] = gathered.batch[name].to(value.device)
    data.batch, data.non_tensor_batch = gathered.batch, gathered.non_tensor_batch
    return data
