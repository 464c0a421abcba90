"""WorkerGroup: the workers of one role, whose registered methods the driver calls like those of a local object.

The failure of one rank is raised immediately. Ranks that wait for the failed rank in a collective are ended.
`LocalTransport` is the inline backend: all ranks run in the driver's process, one call after the other. Batches pass
through the wire format there too, so that no worker can change the caller's objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from verl_lite.batch import wire
from verl_lite.protocol import DataProto, DataProtoFuture
from verl_lite.single_controller.decorator import (
    REGISTRATION,
    Dispatch,
    DispatchMode,
    Mesh,
    Registration,
    WorkerArguments,
)
from verl_lite.single_controller.resource_pool import ClassWithInitArgs, ResourcePool
from verl_lite.single_controller.worker import MeshPlace, Slot, close_process_group, construct, invoke


class Transport(Protocol):
    """Sends calls to the slots. All groups that share slots share one transport."""

    world_size: int
    # (2,): seconds in calls and bytes moved so far (see `invoke`), sums over ranks
    usage: np.ndarray

    def share(self, value: object) -> object:
        """Returns a reference to a value that several ranks receive, so that it is sent once."""

    def start(self, role: str, method: str, calls: Iterable[WorkerArguments]) -> Callable[[], list[object]]:
        """Starts a method on the first ranks, the i-th call on rank i.

        Returns a function that waits for the calls and returns their results in order. It raises the first exception of
        any worker immediately.

        Args:
            role: role of the workers.
            method: name of the method.
            calls: arguments by rank. They can be references from `share`.
        """

    def close(self) -> None:
        """Ends the slots."""


@dataclass(frozen=True)
class _Outcome:
    """The end of a call of `LocalTransport`: its result, or the exception that it raised."""

    result: object = None
    error: Exception | None = None


class LocalTransport:
    """Slots as objects of this process. A call has ended when `start` returns."""

    def __init__(self, pool: ResourcePool, roles: dict[str, ClassWithInitArgs]) -> None:
        self.world_size = pool.world_size
        self.usage = np.zeros(2)
        self._slots = []
        for rank, node in enumerate(pool.nodes):
            local_world_size = pool.process_on_nodes[node]
            slot = Slot(rank, pool.world_size, local_world_size, backend="inline")
            self._slots.append(slot)
        for slot in self._slots:
            for role, recipe in roles.items():
                construct(slot, role, recipe)

    def share(self, value: object) -> object:
        return value

    def start(self, role: str, method: str, calls: Iterable[WorkerArguments]) -> Callable[[], list[object]]:
        outcomes = []
        for rank, arguments in enumerate(calls):
            outcome = self._run(self._slots[rank], role, method, arguments)
            outcomes.append(outcome)

        def wait() -> list[object]:
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
            return [outcome.result for outcome in outcomes]

        return wait

    def _run(self, slot: Slot, role: str, method: str, arguments: WorkerArguments) -> _Outcome:
        """Runs a call to its end, and adds its usage."""
        try:
            result, usage = invoke(slot, role, method, arguments)
        except Exception as error:
            # raised when the caller waits, as with Ray
            return _Outcome(error=error)
        self.usage = self.usage + usage
        return _Outcome(result)

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
        # with the methods of base classes, which `vars` leaves out
        for name in dir(cls):
            method = getattr(cls, name, None)
            registration = getattr(method, REGISTRATION, None)
            if not isinstance(registration, Registration):
                continue
            if hasattr(WorkerGroup, name):
                raise ValueError(f"{cls.__name__}.{name} cannot be registered: worker groups use that name")
            self.methods.append(name)
            method_of_group = self._bind(name, method.__doc__, registration)
            setattr(self, name, method_of_group)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._transport.world_size

    @property
    def usage(self) -> np.ndarray:
        """Usage of the slots by all roles; see `Transport`."""
        return self._transport.usage

    # Any: a group has the methods of its worker class, which a type checker cannot know
    def __getattr__(self, name: str) -> Callable[..., Any]:
        # self.role would call this method again in an object without attributes, such as a group that is unpickled
        role = self.__dict__.get("role")
        methods = self.__dict__.get("methods")
        raise AttributeError(f"{role} has no registered method {name!r}; it has {methods}")

    def _bind(self, name: str, doc: str | None, registration: Registration) -> Callable[..., object]:
        """Returns the method of the group for a registered method of the worker class."""

        def call(*args: object, blocking: bool = registration.blocking, **kwargs: object) -> object:
            arguments = WorkerArguments(args, kwargs)
            future = self._start(name, registration.dispatch_mode, arguments)
            if blocking:
                return future.get()
            return future

        call.__name__ = name
        call.__doc__ = doc
        return call

    def _start(self, method: str, mode: DispatchMode, arguments: WorkerArguments) -> DataProtoFuture[Any]:
        """Starts a call. Batches, arrays and tensors are packed and sent once for all ranks."""
        dispatched = mode.dispatch(self, arguments.map(_resolved))
        if mode.rank_zero:
            dispatched.calls = dispatched.calls[:1]
            dispatched.collect = [0]

        shared: dict[int, _Shared] = {}

        def reference_to(value: object) -> object:
            if not isinstance(value, DataProto | wire.Packed | np.ndarray | torch.Tensor):
                return value
            if id(value) not in shared:
                packed = value.pack() if isinstance(value, DataProto) else value
                reference = self._transport.share(packed)
                shared[id(value)] = _Shared(value, reference)
            return shared[id(value)].reference

        # a generator, so that the first ranks run while the values of the others are still shared
        calls = (arguments_of_rank.map(reference_to) for arguments_of_rank in dispatched.calls)
        wait = self._transport.start(self.role, method, calls)

        def finish() -> object:
            results = wait()
            collected = [results[rank] for rank in dispatched.collect]
            try:
                return mode.combine(self, collected, dispatched)
            except (TypeError, ValueError) as error:
                error.add_note(f"in the answers of {self.role}.{method}")
                raise

        return DataProtoFuture(finish)

    def mesh(self, name: str) -> Mesh:
        """Returns a mesh that the workers registered. Raises ValueError if the mesh is unknown or incomplete."""
        # workers can register meshes after their construction
        if name not in self._meshes:
            registered_by_rank: list[dict[str, MeshPlace]] = self.execute_all_sync("mesh_info")
            mesh_names: set[str] = set().union(*registered_by_rank)
            meshes = {}
            for mesh_name in mesh_names:
                registrations = [registered.get(mesh_name) for registered in registered_by_rank]
                meshes[mesh_name] = _mesh(mesh_name, registrations)
            # only after all checks, so that the next call checks again
            self._meshes = meshes
        if name not in self._meshes:
            registered = sorted(self._meshes)
            raise ValueError(f"{self.role} has no mesh {name!r}; registered with Worker.register_mesh: {registered}")
        return self._meshes[name]

    # Any below: the method, and with it the type of its result, is chosen by name

    def execute_all_async(self, method: str, *args: object, **kwargs: object) -> DataProtoFuture[list[Any]]:
        """Runs any method on all ranks with the same arguments. Returns a future of the list of results."""
        return self._start(method, Dispatch.ONE_TO_ALL, WorkerArguments(args, kwargs))

    def execute_all_sync(self, method: str, *args: object, **kwargs: object) -> list[Any]:
        """Runs any method on all ranks with the same arguments. Returns the list of results."""
        return self.execute_all_async(method, *args, **kwargs).get()

    def execute_rank_zero_async(self, method: str, *args: object, **kwargs: object) -> DataProtoFuture[Any]:
        """Runs any method on rank 0. Returns a future of its result."""
        return self._start(method, Dispatch.RANK_ZERO, WorkerArguments(args, kwargs))

    def execute_rank_zero_sync(self, method: str, *args: object, **kwargs: object) -> Any:
        """Runs any method on rank 0. Returns its result."""
        return self.execute_rank_zero_async(method, *args, **kwargs).get()

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    def shutdown(self) -> None:
        """Ends the slots and the workers of all roles that share them. A second call does nothing."""
        self._transport.close()


@dataclass(frozen=True)
class _Shared:
    """A shared value. It is kept while its call is started, so that Python gives its id to no other value."""

    value: object
    reference: object


def _resolved(value: object) -> object:
    """Waits for a future of an earlier call; returns any other value unchanged."""
    if isinstance(value, DataProtoFuture):
        return value.get()
    return value


def _mesh(name: str, registrations: Sequence[MeshPlace | None]) -> Mesh:
    """Builds a mesh from the registrations of all ranks and checks that exactly one rank collects each part."""
    present = [registration for registration in registrations if registration is not None]
    sizes = {registration.dp_size for registration in present}
    size = present[0].dp_size
    collected_parts = sorted(registration.dp_rank for registration in present if registration.is_collect)
    is_incomplete = len(present) < len(registrations)
    if is_incomplete or len(sizes) > 1 or collected_parts != list(range(size)):
        listed = [registration and tuple(registration) for registration in registrations]
        raise ValueError(
            f"mesh {name!r} does not fit together: each rank must register it with the same size, and each part must "
            f"have exactly one rank that answers; found (dp_rank, dp_size, is_collect) by rank {listed}"
        )
    dp_rank = tuple(registration.dp_rank for registration in present)
    is_collect = tuple(registration.is_collect for registration in present)
    return Mesh(size, dp_rank, is_collect)
