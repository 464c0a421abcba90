"""WorkerGroup: the workers of one role, whose registered methods the driver calls as if they were one local object.

A failure in one rank is raised as soon as it is known, without waiting for ranks that now wait for that one in a
collective; those are ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from verl_lite.batch import wire
from verl_lite.protocol import DataProto, DataProtoFuture
from verl_lite.single_controller.decorator import (
    REGISTRATION,
    Dispatch,
    Dispatched,
    DispatchMode,
    Execute,
    Mesh,
    Registration,
)


class ClassWithInitArgs:
    """A class and the arguments of its constructor, which runs elsewhere. (verl: RayClassWithInitArgs)"""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs


@dataclass
class ResourcePool:
    """Slots for workers.

    process_on_nodes: processes on each machine. use_gpu: one device each. cpus_per_process: cores each, a fraction
    lets several share one.
    """

    process_on_nodes: list[int]
    use_gpu: bool = False
    cpus_per_process: float = 1.0

    def __post_init__(self) -> None:
        if not self.process_on_nodes or min(self.process_on_nodes) < 1:
            raise ValueError(f"process_on_nodes must have at least one process per machine: {self.process_on_nodes}")

    @property
    def world_size(self) -> int:
        """Number of slots."""
        return sum(self.process_on_nodes)

    @property
    def nodes(self) -> list[int]:
        """The machine of each rank."""
        return [node for node, count in enumerate(self.process_on_nodes) for _ in range(count)]


class Transport(Protocol):
    """How calls reach the slots; one for all groups that share them."""

    world_size: int

    def share(self, value: Any) -> Any:
        """A stand-in for a value that several ranks receive; it travels once."""

    def submit(self, rank: int, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Start a call; arguments may be stand-ins. Gives a handle."""

    def wait(self, handles: list[Any]) -> list[Any]:
        """The answers. Raises the first error of any of them at once, as the exception that the worker raised."""

    def close(self) -> None:
        """End the slots."""


class WorkerGroup:
    """The workers of one role. Its registered methods appear here under their own names."""

    def __init__(self, role: str, cls: type, transport: Transport) -> None:
        self.role = role
        self.cls = cls
        self._transport = transport
        self._meshes: dict[str, Mesh] = {}
        self.methods: list[str] = []
        for name in dir(cls):
            registration = getattr(getattr(cls, name, None), REGISTRATION, None)
            if isinstance(registration, Registration):
                if hasattr(WorkerGroup, name):
                    raise ValueError(f"{cls.__name__}.{name} cannot be registered: worker groups use that name")
                self.methods.append(name)
                setattr(self, name, self._bind(name, registration))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._transport.world_size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        role, methods = self.__dict__.get("role"), self.__dict__.get("methods")
        raise AttributeError(f"{role} has no registered method {name!r}; it has {methods}")

    def _bind(self, name: str, registration: Registration) -> Callable[..., Any]:
        def call(*args: Any, blocking: bool = registration.blocking, **kwargs: Any) -> Any:
            return self._call(name, registration.dispatch_mode, registration.execute_mode, blocking, args, kwargs)

        call.__name__, call.__doc__ = name, getattr(self.cls, name).__doc__
        return call

    def _call(
        self,
        name: str,
        mode: DispatchMode,
        execute: Execute,
        blocking: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        dispatched = mode.dispatch(self, tuple(map(_resolved, args)), {k: _resolved(v) for k, v in kwargs.items()})
        ranks = [rank for rank, one in enumerate(dispatched.calls) if one is not None]
        if execute is Execute.RANK_ZERO:
            ranks = [0]
        handles = self._submit(name, dispatched, ranks)

        def finish() -> Any:
            answers = dict(zip(ranks, self._transport.wait(handles), strict=True))
            try:
                return mode.combine(self, [answers[r] for r in dispatched.collect if r in answers], dispatched)
            except (TypeError, ValueError) as error:
                error.add_note(f"in the answers of {self.role}.{name}")
                raise

        return finish() if blocking else DataProtoFuture(finish)

    def _submit(self, name: str, dispatched: Dispatched, ranks: list[int]) -> list[Any]:
        """Start the call on these ranks. What is large travels packed and, for however many ranks, once."""
        shared: dict[int, tuple[Any, Any]] = {}  # the original is kept too: its id must not be reused

        def stand_in(value: Any) -> Any:
            if not isinstance(value, DataProto | wire.Packed | np.ndarray | torch.Tensor):
                return value
            if id(value) not in shared:
                packed = value.pack() if isinstance(value, DataProto) else value
                shared[id(value)] = (value, self._transport.share(packed))
            return shared[id(value)][1]

        handles = []
        for rank in ranks:
            args, kwargs = dispatched.calls[rank] or ((), {})
            given = {key: stand_in(value) for key, value in kwargs.items()}
            handles.append(self._transport.submit(rank, self.role, name, tuple(map(stand_in, args)), given))
        return handles

    def mesh(self, name: str) -> Mesh:
        """A mesh that the workers registered; asked of them once. Raises ValueError if it is unknown or incomplete."""
        if name not in self._meshes:  # workers may register theirs later
            infos = self.execute_all_sync("mesh_info")
            self._meshes = {one: _mesh(one, [info.get(one) for info in infos]) for one in set().union(*infos)}
        if name not in self._meshes:
            known = sorted(self._meshes)
            raise ValueError(f"{self.role} has no mesh {name!r}; registered with Worker.register_mesh: {known}")
        return self._meshes[name]

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Run any method on all ranks with the same arguments; a future of the list of answers."""
        return self._call(method, Dispatch.ONE_TO_ALL, Execute.ALL, False, args, kwargs)

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run any method on all ranks with the same arguments; the list of answers."""
        return self._call(method, Dispatch.ONE_TO_ALL, Execute.ALL, True, args, kwargs)

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Run any method on rank 0; a future of its answer."""
        return self._call(method, Dispatch.RANK_ZERO, Execute.RANK_ZERO, False, args, kwargs)

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run any method on rank 0; its answer."""
        return self._call(method, Dispatch.RANK_ZERO, Execute.RANK_ZERO, True, args, kwargs)

    execute_all, execute_rank_zero = execute_all_async, execute_rank_zero_async

    def shutdown(self) -> None:
        """End the slots, and with them all roles that share them. Calling it again does nothing."""
        self._transport.close()


class ServiceHandle(Protocol):
    """One object in a process of its own. Can be given to workers as an argument."""

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Start a method and go on. What it raises is raised by the next `call`, whoever makes it.

        Sends of one sender arrive in their order; nothing is promised about those of different senders.
        """

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method and wait for its answer."""

    def stop(self) -> None:
        """End the service."""


def _resolved(value: Any) -> Any:
    return value.get() if isinstance(value, DataProtoFuture) else value


def _mesh(name: str, infos: list[tuple[int, int, bool] | None]) -> Mesh:
    """The ranks' views as one, checked: all parts are there, each has exactly one rank that answers."""
    present = [info for info in infos if info is not None]
    size = present[0][1]
    answering = sorted(dp_rank for dp_rank, _, collects in present if collects)
    if None in infos or any(other != size for _, other, _ in present) or answering != list(range(size)):
        raise ValueError(
            f"mesh {name!r} does not fit together: each rank must register it with the same size, and each part must "
            f"have exactly one rank that answers; found (dp_rank, dp_size, is_collect) by rank {infos}"
        )
    return Mesh(size, tuple(info[0] for info in present), tuple(info[2] for info in present))
