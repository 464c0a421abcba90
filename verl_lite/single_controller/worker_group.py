"""WorkerGroup: the workers of one role, whose registered methods the driver calls like those of a local object.

The failure of one rank is raised immediately. Ranks that wait for the failed rank in a collective are ended.
`LocalTransport` is the inline backend: all ranks run in the driver's process, one call after the other. Batches pass
through the wire format there too, so that no worker can change the caller's objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from verl_lite.batch import wire
from verl_lite.protocol import DataProto, DataProtoFuture
from verl_lite.single_controller.decorator import REGISTRATION, Dispatch, DispatchMode, Mesh, Registration
from verl_lite.single_controller.resource_pool import ClassWithInitArgs, ResourcePool
from verl_lite.single_controller.worker import Slot, close_process_group, construct, invoke


class Transport(Protocol):
    """Sends calls to the slots. All groups that share slots share one transport."""

    world_size: int
    usage: np.ndarray  # (2,): seconds in calls and bytes moved so far (see `invoke`), sums over ranks

    def share(self, value: Any) -> Any:
        """Returns a reference to a value that several ranks receive, so that it is sent once."""

    def submit(self, rank: int, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Starts a call and returns a handle. Arguments can be references from `share`."""

    def wait(self, handles: list[Any]) -> list[Any]:
        """Returns the results. Raises the first exception of any worker immediately."""

    def close(self) -> None:
        """Ends the slots."""


class LocalTransport:
    """Slots as objects of this process. A handle is a result or an exception."""

    def __init__(self, pool: ResourcePool, roles: dict[str, ClassWithInitArgs]) -> None:
        self.world_size, self.usage = pool.world_size, np.zeros(2)
        self._slots = [
            Slot(rank, pool.world_size, pool.process_on_nodes[node], backend="inline")
            for rank, node in enumerate(pool.nodes)
        ]
        for slot in self._slots:
            for role, recipe in roles.items():
                construct(slot, role, recipe)

    def share(self, value: Any) -> Any:
        return value

    def submit(self, rank: int, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            result, usage = invoke(self._slots[rank], role, method, args, kwargs)
            self.usage = self.usage + usage
            return result, None
        except Exception as error:  # `wait` raises it
            return None, error

    def wait(self, handles: list[Any]) -> list[Any]:
        for _, error in handles:
            if error is not None:
                raise error
        return [value for value, _ in handles]

    def close(self) -> None:
        self._slots = []
        close_process_group()


class WorkerGroup:
    """The workers of one role. Each registered method of the worker class is a method of the group."""

    def __init__(self, role: str, cls: type, transport: Transport) -> None:
        self.role = role
        self._transport = transport
        self._meshes: dict[str, Mesh] = {}
        self.methods: list[str] = []
        for name in dir(cls):
            registration = getattr(getattr(cls, name, None), REGISTRATION, None)
            if isinstance(registration, Registration):
                if hasattr(WorkerGroup, name):
                    raise ValueError(f"{cls.__name__}.{name} cannot be registered: worker groups use that name")
                self.methods.append(name)
                setattr(self, name, self._bind(name, getattr(cls, name).__doc__, registration))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._transport.world_size

    @property
    def usage(self) -> np.ndarray:
        """Usage of the slots by all roles; see `Transport`."""
        return self._transport.usage

    def __getattr__(self, name: str) -> Callable[..., Any]:
        role, methods = self.__dict__.get("role"), self.__dict__.get("methods")
        raise AttributeError(f"{role} has no registered method {name!r}; it has {methods}")

    def _bind(self, name: str, doc: str | None, registration: Registration) -> Callable[..., Any]:
        def call(*args: Any, blocking: bool = registration.blocking, **kwargs: Any) -> Any:
            future = self._start(name, registration.dispatch_mode, args, kwargs)
            return future.get() if blocking else future

        call.__name__, call.__doc__ = name, doc
        return call

    def _start(self, name: str, mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DataProtoFuture:
        """Starts a call. Batches, arrays and tensors are packed and sent once for all ranks."""
        positional = tuple(_resolved(value) for value in args)
        keywords = {keyword: _resolved(value) for keyword, value in kwargs.items()}
        dispatched = mode.dispatch(self, positional, keywords)
        if mode.rank_zero:
            dispatched.calls = dispatched.calls[:1]
            dispatched.collect = [0]

        shared: dict[int, tuple[Any, Any]] = {}  # the original is kept, so that its id is not reused

        def stand_in(value: Any) -> Any:
            if not isinstance(value, DataProto | wire.Packed | np.ndarray | torch.Tensor):
                return value
            if id(value) not in shared:
                packed = value.pack() if isinstance(value, DataProto) else value
                shared[id(value)] = (value, self._transport.share(packed))
            _, reference = shared[id(value)]
            return reference

        handles = []
        for rank, (args_of_rank, kwargs_of_rank) in enumerate(dispatched.calls):
            sent_args = tuple(stand_in(value) for value in args_of_rank)
            sent_kwargs = {keyword: stand_in(value) for keyword, value in kwargs_of_rank.items()}
            handles.append(self._transport.submit(rank, self.role, name, sent_args, sent_kwargs))

        def finish() -> Any:
            results = self._transport.wait(handles)
            collected = [results[rank] for rank in dispatched.collect]
            try:
                return mode.combine(self, collected, dispatched)
            except (TypeError, ValueError) as error:
                error.add_note(f"in the answers of {self.role}.{name}")
                raise

        return DataProtoFuture(finish)

    def mesh(self, name: str) -> Mesh:
        """Returns a mesh that the workers registered. Raises ValueError if the mesh is unknown or incomplete."""
        if name not in self._meshes:  # workers can register meshes after their construction
            infos = self.execute_all_sync("mesh_info")
            self._meshes = {mesh: _mesh(mesh, [info.get(mesh) for info in infos]) for mesh in set().union(*infos)}
        if name not in self._meshes:
            registered = sorted(self._meshes)
            raise ValueError(f"{self.role} has no mesh {name!r}; registered with Worker.register_mesh: {registered}")
        return self._meshes[name]

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Runs any method on all ranks with the same arguments. Returns a future of the list of results."""
        return self._start(method, Dispatch.ONE_TO_ALL, args, kwargs)

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs any method on all ranks with the same arguments. Returns the list of results."""
        return self.execute_all_async(method, *args, **kwargs).get()

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Runs any method on rank 0. Returns a future of its result."""
        return self._start(method, Dispatch.RANK_ZERO, args, kwargs)

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs any method on rank 0. Returns its result."""
        return self.execute_rank_zero_async(method, *args, **kwargs).get()

    execute_all, execute_rank_zero = execute_all_async, execute_rank_zero_async

    def shutdown(self) -> None:
        """Ends the slots and the workers of all roles that share them. A second call does nothing."""
        self._transport.close()


def _resolved(value: Any) -> Any:
    return value.get() if isinstance(value, DataProtoFuture) else value


def _mesh(name: str, infos: list[tuple[int, int, bool] | None]) -> Mesh:
    """Builds a mesh from the registrations of all ranks and checks that exactly one rank collects each part."""
    present = [info for info in infos if info is not None]
    size = present[0][1]
    answering = sorted(dp_rank for dp_rank, _, collects in present if collects)
    if None in infos or any(other != size for _, other, _ in present) or answering != list(range(size)):
        raise ValueError(
            f"mesh {name!r} does not fit together: each rank must register it with the same size, and each part must "
            f"have exactly one rank that answers; found (dp_rank, dp_size, is_collect) by rank {infos}"
        )
    return Mesh(size, tuple(info[0] for info in present), tuple(info[2] for info in present))
