"""Worker, the base class of all code that runs on a device, and the slot (process) in which workers run.

A slot is one process (ray) or one object in the driver's process (inline). It holds one worker for each colocated role;
workers access each other through `self.slot.roles`. `init_process_group` connects the ranks through a store that rank 0
keeps open on a port chosen by the system, so that no other process can take the port in between.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from verl_lite.batch.wire import Packed
from verl_lite.errors import add_circumstances
from verl_lite.machine import profiling
from verl_lite.machine.device import empty_cache
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import REGISTRATION, Dispatch, WorkerArguments, register, unpacked

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.distributed import TCPStore


@dataclass
class Slot:
    """The place of one rank in a worker group, with the workers of all roles.

    Attributes:
        rank: the rank, from 0 to world_size - 1.
        world_size: number of ranks.
        local_world_size: number of ranks on this machine.
        backend: "ray" or "inline".
        store: address of the store that connects the ranks; None = this process opens one.
        roles: the workers by role.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    backend: str = "inline"
    store: tuple[str, int] | None = None
    roles: dict[str, object] = field(default_factory=dict)


class MeshPlace(NamedTuple):
    """The place of a rank in a mesh. For the attributes see `Worker.register_mesh`."""

    dp_rank: int
    dp_size: int
    is_collect: bool


_constructing: ContextVar[tuple[Slot, str] | None] = ContextVar("constructing", default=None)
_held_store: TCPStore | None = None


class Worker:
    """Base class of workers. `rank`, `world_size`, `role` and `slot` are set before the constructor runs."""

    rank: int
    world_size: int
    role: str
    slot: Slot
    _meshes: dict[str, MeshPlace]

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # not in __init__, so that a constructor can use them before, or without, super().__init__()
        worker = super().__new__(cls)
        # a worker that is constructed without a group, as in a test, has a slot for itself
        worker.slot, worker.role = _constructing.get() or (Slot(), cls.__name__)
        worker.rank = worker.slot.rank
        worker.world_size = worker.slot.world_size
        worker._meshes = {}
        return worker

    def register_mesh(self, mesh_name: str, dp_rank: int, dp_size: int, is_collect: bool = True) -> None:
        """Declares the part of a batch that this rank gets in calls dispatched over `mesh_name`.

        Args:
            mesh_name: name of the mesh.
            dp_rank: index of the part, from 0 to dp_size - 1.
            dp_size: number of parts.
            is_collect: True if this rank's result is used; True for exactly one rank of each part.

        Raises:
            ValueError: if the name is already registered or dp_rank is not below dp_size.
        """
        is_part = 0 <= dp_rank < dp_size
        if mesh_name in self._meshes or not is_part:
            raise ValueError(f"mesh {mesh_name!r}: registered already, or dp_rank {dp_rank} is not in [0, {dp_size})")
        self._meshes[mesh_name] = MeshPlace(dp_rank, dp_size, is_collect)

    def mesh_info(self) -> dict[str, MeshPlace]:
        """Returns the place of this rank by mesh."""
        return dict(self._meshes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, folder: str) -> None:
        """Starts the profile of this process, which roles in the same process share."""
        profiling.start_profile(Path(folder) / f"{self.role}_rank_{self.rank}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> str:
        """Ends the profile and writes it; see `profiling.stop_profile`."""
        return profiling.stop_profile()

    def host_missing_path(self, path: str, patience_s: float = 10.0) -> str | None:
        """Returns the name of this machine if the path does not appear within `patience_s` seconds, else None."""
        # network file systems can take some seconds to show a new file
        deadline = time.monotonic() + patience_s
        while not Path(path).exists():
            if time.monotonic() >= deadline:
                return socket.gethostname()
            time.sleep(0.2)
        return None

    def init_process_group(self, backend: str, timeout_s: float = 600.0, device_id: torch.device | None = None) -> None:
        """Joins torch.distributed's default group of all ranks. A second call in the same process does nothing.

        Args:
            backend: gloo, nccl, or e.g. "cpu:gloo,cuda:nccl".
            timeout_s: time that a collective waits for other ranks, in seconds.
            device_id: this rank's GPU. If given, NCCL connects now instead of at the first collective.

        Raises:
            ValueError: with the inline backend and more than one rank, because one process can only be one rank.
        """
        import torch.distributed as dist

        if self.slot.backend == "inline" and self.world_size > 1:
            raise ValueError(
                f"trainer.backend=inline has one process, found {self.world_size} ranks that want torch.distributed: "
                "set trainer.n_gpus_per_node=1 or trainer.backend=ray"
            )
        # the workers of all roles in a process share one group
        if dist.is_initialized():
            return
        store = self._connected_store()
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default", store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device_id,
        )

    def _connected_store(self) -> TCPStore:
        """Returns the store of the ranks: the one that this process holds (rank 0), or a connection to it."""
        from torch.distributed import TCPStore

        address = self.slot.store
        if address is None:
            # a worker outside of a pool opens a store for itself
            open_store("127.0.0.1")
        if _held_store is not None:
            return _held_store
        assert address is not None
        host, port = address
        return TCPStore(host, port, is_master=False)


def open_store(host: str) -> int:
    """Opens the store of the ranks in this process, keeps it for the life of the process, and returns its port."""
    global _held_store
    if _held_store is None:
        _held_store = host_store(host)
    return _held_store.port


def host_store(host: str) -> TCPStore:
    """Opens a store at a port that the system chooses."""
    from torch.distributed import TCPStore

    # torch's own server would listen on all interfaces
    listener = socket.create_server((host, 0))
    _, port, *_ = listener.getsockname()
    # the store closes it
    descriptor = listener.detach()
    # without a wait: the workers learn the port only from the return of this call
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def close_process_group() -> None:
    """Leaves the default group and closes the store, if they exist."""
    import torch.distributed as dist

    global _held_store
    if _held_store is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        _release_groups_of_meshes()
    _held_store = None


def _release_groups_of_meshes() -> None:
    """Lets device meshes forget their process groups, which are destroyed.

    The caches of DTensor keep the meshes of every run for the life of the process, and a group has 13 open files and 4
    threads. A mesh without its group looks the group up by its name.
    """
    from torch.distributed.device_mesh import DeviceMesh

    for candidate in gc.get_objects():
        if type(candidate) is DeviceMesh:
            vars(candidate).get("_pg_registry", {}).clear()
    # networks are cycles of references, which would keep their groups until Python looks for cycles
    gc.collect()


def construct(slot: Slot, role: str, make: Callable[[], object]) -> None:
    """Constructs the worker of a role in its slot."""
    token = _constructing.set((slot, role))
    try:
        with _with_circumstances(slot, role, "its constructor"):
            slot.roles[role] = make()
    finally:
        _constructing.reset(token)


def invoke(slot: Slot, role: str, method: str, arguments: WorkerArguments) -> tuple[object, np.ndarray]:
    """Runs a worker's method. Batches are packed in arguments and results, with every backend.

    Returns the result, and the usage: seconds, and bytes of batches and of `profiling.count_moved`.
    """
    function = getattr(slot.roles[role], method)
    usage_before = profiling.usage()
    with _with_circumstances(slot, role, method), profiling.span(method):
        # also in the driver's process, so that no worker can change the tensors of a split batch
        received = arguments.map(unpacked)
        result = function(*received.positional, **received.keywords)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)

        registration = getattr(function, REGISTRATION, None)
        if registration is not None and registration.clear_cache:
            empty_cache()

        if isinstance(result, DataProto):
            result = result.pack()
        for value in (*arguments.values, result):
            if isinstance(value, Packed):
                num_bytes = sum(array.nbytes for array in value.arrays)
                profiling.count_moved(num_bytes)
        return result, profiling.usage() - usage_before


@contextmanager
def _with_circumstances(slot: Slot, role: str, method: str) -> Iterator[None]:
    """Adds role, rank and method to an exception, as a note and as `Circumstances`."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised in {role}, rank {slot.rank}, {method}")
        add_circumstances(error, role=role, rank=slot.rank, method=method)
        raise
