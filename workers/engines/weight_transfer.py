"""Transfer of weights from the trainer's first rank to rollout engines in other processes, over a collective.

`WeightChannel` connects the trainer's first rank (rank 0) with all ranks of the engines (ranks 1 and up) by a process
group of its own: NCCL between GPUs, gloo otherwise. Parameters are packed into buckets, and each bucket is one
broadcast. Names and shapes travel through the group's store, in which the receivers also count their buckets, so that
an error names the receiver that is late.

Ray's direct transport cannot replace this module (Ray 2.60): it sends each tensor to one receiver at a time, cannot
interrupt a transfer, and answers a failed one by killing the actors at both ends, one of which is the trainer.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl_lite.errors import TransferError

Weights = Iterable[tuple[str, torch.Tensor]]
_ALIGNMENT = 16  # bytes; tensors in a bucket start at multiples of it, so that they can be viewed in their dtype


@dataclass(frozen=True)
class ChannelEnd:
    """Where an end of a channel is.

    Attributes:
        address: address of the store, which the sender hosts.
        names: name of each end for error messages, by rank.
        rank: rank of this end; 0 is the sender.
        timeout_s: see `WeightChannel`.
    """

    address: tuple[str, int]
    names: tuple[str, ...]
    rank: int
    timeout_s: float

    def connect(self, device: torch.device, store: dist.TCPStore | None = None) -> "WeightChannel":
        """Returns this end, connected to all others.

        Args:
            device: Device on which tensors are packed and received.
            store: The store, at the sender; None = connects to its address.
        """
        if store is None:
            host, port = self.address
            limit = timedelta(seconds=self.timeout_s)
            try:
                store = dist.TCPStore(host, port, is_master=False, timeout=limit)
            except RuntimeError as error:
                raise TransferError(f"{self.names[self.rank]} cannot reach the trainer at {self.address}") from error
        return WeightChannel(store, self.names, self.rank, device, self.timeout_s)


class _Entry(NamedTuple):
    """A tensor in a bucket. start: number of its first byte."""

    name: str
    dtype: str
    shape: list[int]
    start: int


@dataclass(frozen=True)
class _Header:
    """The description of a bucket, which travels as JSON: its size in bytes and its tensors."""

    bytes: int
    tensors: list[_Entry]


class WeightChannel:
    """One end of the channel. Collective: all ends are constructed at the same time.

    Args:
        store: store of the channel.
        names: see `ChannelEnd`.
        rank: see `ChannelEnd`.
        device: device on which tensors are packed and received.
        timeout_s: time limit of one bucket, and of loading the last one.
    """

    def __init__(
        self,
        store: dist.TCPStore,
        names: Sequence[str],
        rank: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._names = names
        self._rank = rank
        self._device = device
        self._limit = timedelta(seconds=timeout_s)
        self._number = 0  # buckets and ends of weights so far
        store.set_timeout(self._limit)
        # torch's group keeps its keys in the same store, apart from those of the channel by this prefix
        connections = dist.PrefixStore("group", store)
        self._group: Any  # torch's types of both groups lack `broadcast`
        try:
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._limit
                self._group = dist.ProcessGroupNCCL(connections, rank, len(names), options)
            else:
                self._group = dist.ProcessGroupGloo(connections, rank, len(names), self._limit)
        except RuntimeError as error:
            raise TransferError(f"no connection between {', '.join(names)} within {timeout_s:g} s") from error

    def send(self, weights: Weights, bucket_bytes: int) -> int:
        """Sends all weights and waits until the receivers have loaded them. Returns the number of bytes.

        Args:
            weights: names and tensors.
            bucket_bytes: maximum size of a bucket; a larger tensor is a bucket of its own.

        Raises:
            TransferError: names the receivers that are late.
        """
        sent = 0
        try:
            for header, packed in _buckets(weights, bucket_bytes, self._device):
                content = json.dumps(asdict(header))
                self._send_header(content)
                # before the next bucket, so that the time limit applies to each of them
                self._group.broadcast(packed, 0).wait(self._limit)
                sent += packed.numel()
            self._send_header("null")
            # the receivers also count the end of the weights, after they have loaded the last bucket
            keys = [_loaded(rank, self._number) for rank in self._receivers()]
            self._store.wait(keys, self._limit)
        except RuntimeError as error:
            raise TransferError(f"weight update: {self._late()}") from error
        return sent

    def _send_header(self, content: str) -> None:
        """Announces the next bucket, or with "null" the end of the weights."""
        self._store.set(f"header/{self._number}", content)
        self._number += 1

    def _receivers(self) -> range:
        return range(1, len(self._names))

    def _late(self) -> str:
        """Describes the receivers that do not have the last bucket."""
        # receivers that can still finish get a second, so that only those that are really late are named
        time.sleep(1.0)
        late = []
        for rank in self._receivers():
            key = _loaded(rank, self._number)
            if not self._store.check([key]):
                late.append(self._names[rank])
        culprits = ", ".join(late) or "the connection"
        return f"{culprits} failed, or did not answer for {self._limit.total_seconds():g} s"

    def receive(self, load: Callable[[Iterator[tuple[str, torch.Tensor]]], None]) -> None:
        """Calls `load` with the weights of one `send`.

        Raises:
            TransferError: The weights do not arrive.
        """
        stream = self._stream()
        try:
            load(stream)
        finally:
            # if `load` raises, the rest is received nevertheless: a broadcast needs all receivers
            for _ in stream:
                pass

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            while (bucket := self._next_bucket()) is not None:
                yield from bucket
            self._store.set(_loaded(self._rank, self._number), "")
        except RuntimeError as error:
            raise TransferError(f"weight update: {self._names[self._rank]} received no weights: {error}") from error

    def _next_bucket(self) -> list[tuple[str, torch.Tensor]] | None:
        """Receives the next bucket. Returns None at the end of the weights."""
        header = self._store.get(f"header/{self._number}")
        content = json.loads(header)
        self._number += 1
        if content is None:
            return None
        packed = torch.empty(content["bytes"], dtype=torch.uint8, device=self._device)
        self._group.broadcast(packed, 0).wait(self._limit)
        self._store.set(_loaded(self._rank, self._number), "")

        tensors = []
        for fields in content["tensors"]:
            entry = _Entry(*fields)
            dtype: torch.dtype = getattr(torch, entry.dtype)
            end = entry.start + math.prod(entry.shape) * dtype.itemsize
            own_bytes = packed[entry.start : end]
            tensor = own_bytes.view(dtype).view(entry.shape)
            tensors.append((entry.name, tensor))
        return tensors


def _loaded(rank: int, number: int) -> str:
    """Returns the key that exists in the store once this receiver has this number of buckets."""
    return f"loaded/{rank}/{number}"


def _buckets(weights: Weights, bucket_bytes: int, device: torch.device) -> Iterator[tuple[_Header, torch.Tensor]]:
    """Yields buckets of at most `bucket_bytes`, each as a header and its bytes."""
    tensors: list[torch.Tensor] = []
    entries: list[_Entry] = []
    size = 0
    for name, tensor in weights:
        # a tensor above the limit is a bucket of its own
        if tensors and size + tensor.nbytes > bucket_bytes:
            header = _Header(size, entries)
            yield header, _packed(tensors, header, device)
            tensors = []
            entries = []
            size = 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        entry = _Entry(name, dtype, list(tensor.shape), size)
        tensors.append(tensor)
        entries.append(entry)
        num_units = math.ceil(tensor.nbytes / _ALIGNMENT)
        size += num_units * _ALIGNMENT
    if tensors:
        header = _Header(size, entries)
        yield header, _packed(tensors, header, device)


def _packed(tensors: Sequence[torch.Tensor], header: _Header, device: torch.device) -> torch.Tensor:
    """Copies the tensors of a bucket into a new tensor of bytes."""
    packed = torch.empty(header.bytes, dtype=torch.uint8, device=device)
    for tensor, entry in zip(tensors, header.tensors, strict=True):
        end = entry.start + tensor.nbytes
        own_bytes = packed[entry.start : end]
        target = own_bytes.view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor)
    return packed
