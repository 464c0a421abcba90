"""Conversion between full tensors and shards: distributes rank 0's weights over the ranks and gathers full parameters.

Parameters are gathered in buckets with one collective per bucket: for a small model the number of collectives costs
more time than the number of bytes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True, eq=False)
class WholeWeights:
    """The weights of `FSDPEngine.full_params` on a rank that holds all of them; iterating yields the same.

    The tensors are those that training changes, not copies, so that a receiver can keep this object.

    Attributes:
        buffers: buffers by name.
        parameters: parameters by name.
        dtype: the dtype in which parameters are yielded.
        nbytes: size of all yielded tensors.
    """

    buffers: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    dtype: torch.dtype
    nbytes: int

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """Buffers and parameters in this order."""
        return [*self.buffers.values(), *self.parameters.values()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.buffers.items()
        for name, parameter in self.parameters.items():
            yield name, parameter.to(self.dtype)


def shard_rows(parameter: DTensor, group_size: int) -> int:
    """Returns the rows of dimension 0 on each rank, as `torch.chunk` and FSDP2 split them; the last ranks may have
    fewer."""
    return -(-parameter.shape[0] // group_size)


def saved_buffers(network: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the persistent buffers by name, which belong to a checkpoint (such as biases that balance experts).

    Buffers are not sharded.
    """
    buffers = {}
    for module_name, module in network.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            buffers[prefix + name] = buffer
    return buffers


@torch.no_grad()
def fill_shards(parameters: Mapping[str, torch.Tensor], full: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Copies rank 0's tensors into the shards of all ranks. Collective.

    Args:
        parameters: the sharded parameters by name.
        full: full tensors by the names of `parameters` on rank 0; empty on the other ranks.
        device: the device on which the tensors are broadcast.
    """
    # one parameter at a time, so that a rank needs memory for its shards and one whole parameter
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        if dist.get_rank() == 0:
            source = full[name].to(device=device, dtype=parameter.dtype)
            whole = source.contiguous()
        else:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        dist.broadcast(whole, src=0)

        # with replicas the mesh is (replicas, shards)
        mesh = parameter.device_mesh
        shard_dimension = mesh.ndim - 1
        rows_per_rank = shard_rows(parameter, mesh.size(shard_dimension))
        start = mesh.get_local_rank(shard_dimension) * rows_per_rank
        shard = parameter.to_local()
        shard.copy_(whole[start : start + len(shard)])


@torch.no_grad()
def gather_full(
    parameters: Mapping[str, DTensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    bucket_bytes: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every full parameter, detached and in `dtype`. Collective.

    Args:
        parameters: the sharded parameters by name.
        dtype: dtype of the yielded tensors.
        group: the ranks that together hold one copy of the parameters.
        bucket_bytes: largest number of bytes gathered at one time, unless a single tensor is larger.
    """
    if dist.get_world_size(group) == 1:
        for name, parameter in parameters.items():
            yield name, parameter.to_local().detach().to(dtype)
        return

    # all ranks fill the same buckets, because they see the same sizes in the same order
    bucket: dict[str, DTensor] = {}
    collected_bytes = 0
    for name, parameter in parameters.items():
        parameter_bytes = parameter.numel() * dtype.itemsize
        if bucket and collected_bytes + parameter_bytes > bucket_bytes:
            yield from _gather_bucket(bucket, dtype, group)
            bucket = {}
            collected_bytes = 0
        bucket[name] = parameter
        collected_bytes += parameter_bytes
    if bucket:
        yield from _gather_bucket(bucket, dtype, group)


def _gather_bucket(
    bucket: Mapping[str, DTensor], dtype: torch.dtype, group: dist.ProcessGroup
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathers the parameters of one bucket with one all-gather.

    Yields copies, one at a time: a receiver that keeps none of them needs memory for the bucket and one parameter.
    """
    ranks = dist.get_world_size(group)
    # of the first rank's shards, to which those of the other ranks are padded: an all-gather needs equal sizes
    padded_sizes = []
    for parameter in bucket.values():
        row_size = math.prod(parameter.shape[1:])
        num_rows = shard_rows(parameter, ranks)
        padded_sizes.append(num_rows * row_size)

    own_shards = _padded_shards(list(bucket.values()), padded_sizes, dtype)
    all_shards = own_shards.new_empty(ranks * len(own_shards))
    dist.all_gather_into_tensor(all_shards, own_shards, group=group)
    # frees this rank's shards, which are in `all_shards` now
    del own_shards

    # (ranks, padded size) for each parameter
    shards_by_rank = all_shards.view(ranks, -1)
    shards_by_parameter = shards_by_rank.split(padded_sizes, dim=1)
    for shards, (name, parameter) in zip(shards_by_parameter, bucket.items(), strict=True):
        # joins the parameter's shards, which are apart in memory
        padded_values = shards.reshape(-1)
        # only the last ranks have padding, so that the parameter comes first
        values = padded_values[: parameter.numel()]
        yield name, values.view(parameter.shape)


def _padded_shards(parameters: Sequence[DTensor], sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns this rank's shards in one row, each filled up with zeros to its size."""
    row = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
    for padded_shard, parameter in zip(row.split(sizes), parameters, strict=True):
        # rows are split, as `shard_rows` assumes
        assert parameter.placements[-1] == Shard(0)
        shard = parameter.to_local().flatten()
        padded_shard[: len(shard)].copy_(shard)
    return row
