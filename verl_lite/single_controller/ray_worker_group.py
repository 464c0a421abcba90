"""The ray backend: one actor per slot, which holds the objects of all roles.

Values that several ranks receive are put into the object store once. The driver waits for all ranks of a call at once:
the first error is raised as the exception that the worker raised, with the remote traceback as a note, and ranks that
do not come back, since they wait for the failed one, are ended.

The slots are reserved as one placement group: all or nothing. Each machine of the pool is one bundle, and no two share
a machine of the cluster. In a cluster that was joined machines may come later, or get free: there the reservation
waits, and says for what. A service is one object in an actor of its own, whose handle can be given to workers.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verl_lite.errors import ClusterLostError, NoRoomError, WorkerDiedError, add_circumstances
from verl_lite.protocol import tensor_dict
from verl_lite.registry import import_modules
from verl_lite.single_controller.local_worker_group import LocalService
from verl_lite.single_controller.ray_cluster import (
    Machine,
    cluster_answers,
    joined_cluster,
    machines,
    require_head,
    silence_of,
    worker_env,
)
from verl_lite.single_controller.ray_errors import (
    cause_of_death,
    death,
    is_consequence,
    original_error,
    portable_errors,
    stacks_if_it_stalls,
    stalled,
)
from verl_lite.single_controller.worker import Slot, construct, invoke, open_store
from verl_lite.single_controller.worker_group import ClassWithInitArgs, ResourcePool

_PRIVATE_PATIENCE_S = 60.0
_SILENT_PATIENCE_S = 3.0  # as long as that nobody wonders
_FIRST_LOOK_S = 0.02
_LONGEST_LOOK_S = 0.5
_GRACE_S = 2.0  # after an error: time for the other ranks to come back, or to give the real cause
_CAUSE_PATIENCE_S = 15.0  # the same while all that is known are consequences of something else

Bundle = dict[str, float]


@dataclass
class RayResourcePool(ResourcePool):
    """Reserves on `reserve`, gives back on `release`."""

    _group: PlacementGroup | None = field(default=None, init=False, repr=False)

    @property
    def bundles(self) -> list[Bundle]:
        """What each machine is asked for."""
        return [
            {"CPU": self.cpus_per_process * count} | ({"GPU": float(count)} if self.use_gpu else {})
            for count in self.process_on_nodes
        ]

    def reserve(self) -> list[PlacementGroupSchedulingStrategy]:
        """Where the process of each rank goes. Raises NoRoomError if there is no room, in a joined cluster after
        `ray_kwargs.ray_init.wait_for_nodes_s`."""
        joined = joined_cluster()
        patience_s = _PRIVATE_PATIENCE_S if joined is None else joined.wait_s
        if joined is None and not any(machine.has(self.bundles[0]) for machine in machines()):
            patience_s = 0.0  # it grows no more
        group = placement_group(self.bundles, strategy="STRICT_SPREAD" if len(self.bundles) > 1 else "STRICT_PACK")
        self._group, begun, said = group, time.monotonic(), False
        while not group.wait(timeout_seconds=1.0):
            waited_s = time.monotonic() - begun
            require_head()
            if waited_s >= patience_s:
                self.release()
                limit = f" after {patience_s:g} s (ray_kwargs.ray_init.wait_for_nodes_s)" if joined else ""
                shortage = self.shortage(machines(), ray.available_resources())
                raise NoRoomError(f"there is no room for the run{limit}: {shortage}")
            if joined is not None and not said and waited_s >= _SILENT_PATIENCE_S:
                said = True
                shortage = self.shortage(machines(), ray.available_resources())
                joined.log(f"waiting up to {patience_s:g} s for room in the cluster: {shortage}")
        return [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node) for node in self.nodes]

    def shortage(self, present: list[Machine], free: Bundle) -> str:
        """What is asked for, what there is, and what to change. present: machines; free: in all of them together."""
        asked = max(self.bundles, key=lambda bundle: bundle["CPU"])
        fitting, wanted = sum(machine.has(asked) for machine in present), len(self.bundles)
        fewer = f"trainer.nnodes={fitting}" if 0 < fitting < wanted else "less (trainer.n_gpus_per_node)"
        listed = "".join(f"\n  {machine.name}: {_listed(machine.resources)}" for machine in present)
        return (
            f"{self.world_size} slots are asked for, on {wanted} machine{'s' * (wanted > 1)} with {_listed(asked)} "
            f"each; {fitting} of the {len(present)} machines there can hold that:{listed}\n  free now, in all: "
            f"{_listed(free)}\nAdd machines (`ray start --address=...`), wait for those who use them, or go on with "
            f"{fewer}: any number of devices can load a checkpoint"
        )

    def release(self) -> None:
        """Give the reservation back."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)


def _listed(resources: Bundle) -> str:
    """`2 CPU, 1 GPU`."""
    kinds = ["CPU", *({"GPU"} & resources.keys())]
    return ", ".join(f"{resources.get(kind, 0.0):g} {kind}" for kind in kinds)


class SlotProcess:
    """What runs in a worker process: the slot, and calls on the objects in it."""

    def __init__(self, log_file: str | None, stall_timeout_s: float | None) -> None:
        self._stall_timeout_s = stall_timeout_s
        if log_file is not None:
            redirect_output(log_file)
            faulthandler.enable()  # a crash in native code leaves its stack there
        tensor_dict({}, 0)  # imports what the first batch would otherwise wait for

    def open_store(self) -> tuple[str, int]:
        """Address of the store that this process opened and holds."""
        host = ray.util.get_node_ip_address()
        return host, open_store(host)

    def node_id(self) -> str:
        """Ray's name of this machine."""
        return ray.get_runtime_context().get_node_id()

    def construct(self, slot: Slot, roles: dict[str, ClassWithInitArgs], modules: Sequence[str]) -> None:
        """Import `modules`, and make the objects of all roles, in order."""
        self._slot = slot
        assert slot.store is not None
        os.environ |= {
            "RANK": str(slot.rank),
            "WORLD_SIZE": str(slot.world_size),
            "LOCAL_RANK": "0",  # each process sees only its own device
            "LOCAL_WORLD_SIZE": str(slot.local_world_size),
            "MASTER_ADDR": slot.store[0],
            "MASTER_PORT": str(slot.store[1]),
        }
        interface = interface_of(ray.util.get_node_ip_address())
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else by the host's name
        with portable_errors():
            import_modules(modules)
            for role, recipe in roles.items():
                construct(slot, role, recipe.cls, recipe.args, recipe.kwargs)

    def invoke(self, role: str, method: str, names: list[str], *values: Any) -> Any:
        """Call a method; the last len(names) values are keyword arguments: Ray resolves only top-level references."""
        positional = values[: len(values) - len(names)]
        keywords = dict(zip(names, values[len(positional) :], strict=True))
        with portable_errors(), stacks_if_it_stalls(self._stall_timeout_s):
            return invoke(self._slot, role, method, positional, keywords)


@dataclass(frozen=True)
class _Handle:
    """A running call."""

    ref: ray.ObjectRef
    rank: int
    role: str
    method: str


class RayTransport:
    """The slot processes of a pool; for the arguments see `create_worker_groups`."""

    def __init__(
        self,
        pool: ResourcePool,
        roles: dict[str, ClassWithInitArgs],
        modules: Sequence[str],
        env: dict[str, str],
        log_dir: str | Path | None,
        stall_timeout_s: float | None,
    ) -> None:
        if not ray.is_initialized():
            raise RuntimeError("trainer.backend=ray needs a cluster: call start_ray first")
        self.world_size = pool.world_size
        self._stall_timeout_s: float | None = None  # starting may take as long as it takes
        self._ended: str | None = None
        self._joined = joined_cluster()
        name = "+".join(roles)
        folder = None if log_dir is None else Path(log_dir).resolve()
        self._logs = [None if folder is None else str(folder / f"{name}-{r}.log") for r in range(pool.world_size)]
        self._pool = RayResourcePool(pool.process_on_nodes, pool.use_gpu, pool.cpus_per_process)
        actor: Any = ray.remote(SlotProcess)
        options: dict[str, Any] = {
            "num_cpus": pool.cpus_per_process,
            "num_gpus": 1 if pool.use_gpu else 0,
            "runtime_env": {"env_vars": worker_env(env)},
        }
        self._actors: list[Any] = [
            actor.options(scheduling_strategy=place, **options).remote(log, stall_timeout_s)
            for place, log in zip(self._pool.reserve(), self._logs, strict=True)
        ]
        self._machines: dict[int, Machine] = {}  # by rank, in a joined cluster
        started = [_Handle(one.node_id.remote(), rank, name, "start") for rank, one in enumerate(self._actors)]
        store, *nodes = self.wait([_Handle(self._actors[0].open_store.remote(), 0, name, "start"), *started])
        known = {} if self._joined is None else {machine.node_id: machine for machine in machines()}
        self._machines = {rank: known[node_id] for rank, node_id in enumerate(nodes) if node_id in known}
        if self._joined is not None:
            self._joined.follow(list(self._machines.values()))
        shared, constructing = ray.put(roles), []
        for rank, node in enumerate(pool.nodes):
            slot = Slot(rank, pool.world_size, pool.process_on_nodes[node], backend="ray", store=store)
            ref = self._actors[rank].construct.remote(slot, shared, tuple(modules))
            constructing.append(_Handle(ref, rank, name, "its constructor"))
        self.wait(constructing, fatal=True)
        self._stall_timeout_s = stall_timeout_s

    def share(self, value: Any) -> Any:
        return ray.put(value)

    def submit(self, rank: int, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Handle:
        if self._ended is not None:
            raise WorkerDiedError(f"{role}.{method}: the workers were ended: {self._ended}")
        ref = self._actors[rank].invoke.remote(role, method, list(kwargs), *args, *kwargs.values())
        return _Handle(ref, rank, role, method)

    def wait(self, handles: list[Any], *, fatal: bool = False) -> list[Any]:
        """The answers; see Transport. fatal: an error ends the slots even if every rank came back."""
        by_ref = {handle.ref: handle for handle in handles}
        values: dict[Any, Any] = {}
        pending = list(by_ref)
        look, begun = _FIRST_LOOK_S, time.monotonic()
        while pending:
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=look)
            look = min(2 * look, _LONGEST_LOOK_S)
            silent = [by_ref[ref] for ref in pending]
            errors = self._fetch([by_ref[ref] for ref in ready], values) + self._unreachable(silent)
            if errors:
                raise self._handle_crash(errors, silent, values, fatal)
            if self._stall_timeout_s is not None and time.monotonic() - begun > self._stall_timeout_s:
                first, ranks = silent[0], sorted(handle.rank for handle in silent)
                who = f"{first.role}.{first.method}: ranks {ranks} of {self.world_size} have"
                log = self._logs[first.rank]
                error = stalled(who, self._stall_timeout_s, first.role, first.method, log, first.rank)
                self._end("stalled")
                raise error
        return [values[handle.ref] for handle in handles]

    def _fetch(self, ready: list[_Handle], values: dict[Any, Any]) -> list[Exception]:
        """Values of finished calls go to `values`; gives the errors."""
        errors: list[Exception] = []
        for handle in ready:
            try:
                values[handle.ref] = ray.get(handle.ref)
            except RayTaskError as error:
                errors.append(original_error(error))
            except RayError as error:
                machine = self._machines.get(handle.rank)
                if machine is not None and (reason := silence_of(machine.address)):
                    errors.append(self._machine_lost(handle, reason))
                else:
                    ended = "" if self._ended is None else f"the workers had been ended: {self._ended}"
                    notes = (str(error) if isinstance(error, OutOfMemoryError) else "", ended)
                    errors.append(self._death(handle, cause_of_death(error), notes))
        return errors

    def _unreachable(self, pending: list[_Handle]) -> list[Exception]:
        """Errors for the ranks whose machine does not answer any more. Raises ClusterLostError."""
        try:
            require_head()
        except ClusterLostError as error:
            self._ended = str(error)
            raise
        lost = {} if self._joined is None else self._joined.watch.lost()
        places = [(handle, self._machines.get(handle.rank)) for handle in pending]
        return [self._machine_lost(handle, lost[m.name]) for handle, m in places if m is not None and m.name in lost]

    def _machine_lost(self, handle: _Handle, reason: str) -> WorkerDiedError:
        return self._death(handle, f"its machine has left the cluster: {reason}")

    def _death(self, handle: _Handle, cause: str, notes: tuple[str, ...] = ()) -> WorkerDiedError:
        node = self._machines[handle.rank].name if handle.rank in self._machines else None
        return death(cause, handle.role, handle.rank, handle.method, self._logs[handle.rank], node, notes)

    def _handle_crash(
        self, errors: list[Exception], pending: list[_Handle], values: dict[Any, Any], fatal: bool
    ) -> Exception:
        """The error to raise: the earliest that is not a mere consequence of another. Ends slots that do not answer."""
        begun = time.monotonic()
        while pending:
            patience = _CAUSE_PATIENCE_S if all(is_consequence(error) for error in errors) else _GRACE_S
            if time.monotonic() >= begun + patience:
                break
            ready, _ = ray.wait([one.ref for one in pending], num_returns=len(pending), timeout=0.1)
            errors += self._fetch([one for one in pending if one.ref in ready], values)
            pending = [one for one in pending if one.ref not in ready]
        if all(is_consequence(error) for error in errors):
            for handle in pending:
                machine = self._machines.get(handle.rank)
                if machine is not None and (reason := silence_of(machine.address)):
                    errors.append(self._machine_lost(handle, reason))
        first = min(errors, key=is_consequence)  # min keeps the earliest of equals
        if pending:
            ranks = [handle.rank for handle in pending]
            first.add_note(f"ranks {ranks} had not answered seconds later: the pool's workers were ended")
        if pending or fatal or any(isinstance(error, WorkerDiedError) for error in errors):
            self._end(f"{type(first).__name__}: {first}")
        return first

    def close(self) -> None:
        if self._ended is None:
            self._end("shut down")

    def _end(self, reason: str) -> None:
        self._ended = reason
        if cluster_answers():
            for actor in self._actors:
                ray.kill(actor)
            self._pool.release()


class ServiceProcess:
    """What runs in the service's process."""

    def __init__(self, recipe: ClassWithInitArgs, log_file: str | None) -> None:
        self._recipe = recipe
        if log_file is not None:
            redirect_output(log_file)

    def start(self) -> None:
        """Make the object; apart from the constructor, so that its error arrives as it was raised."""
        with portable_errors():
            self._service = LocalService(self._recipe)

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        self._service.send(method, *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with portable_errors():
            return self._service.call(method, *args, **kwargs)


class RayServiceHandle:
    """Handle of a service; pickles."""

    def __init__(self, actor: Any, name: str, log: str | None, stall_timeout_s: float | None) -> None:
        self._actor, self._name, self._log, self._stall_timeout_s = actor, name, log, stall_timeout_s

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        self._actor.send.remote(method, *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.wait(self._actor.call.remote(method, *args, **kwargs), method)

    def wait(self, ref: Any, method: str) -> Any:
        """The answer of a running call; raises what the service raised."""
        begun = time.monotonic()
        while not ray.wait([ref], timeout=_LONGEST_LOOK_S)[0]:
            require_head()
            if self._stall_timeout_s is not None and time.monotonic() - begun > self._stall_timeout_s:
                raise stalled(f"{self._name}.{method} has", self._stall_timeout_s, self._name, method, self._log)
        try:
            return ray.get(ref)
        except RayTaskError as error:
            cause = original_error(error)
            add_circumstances(cause, role=self._name, method=method)
        except RayError as error:
            cause = death(cause_of_death(error), self._name, None, method, self._log)
        raise cause

    def stop(self) -> None:
        if cluster_answers():
            ray.kill(self._actor)


def start_ray_service(
    recipe: ClassWithInitArgs,
    env: dict[str, str],
    log_dir: str | Path | None,
    max_concurrency: int,
    stall_timeout_s: float | None,
) -> RayServiceHandle:
    """See `start_service`."""
    name = recipe.cls.__name__
    log = None if log_dir is None else str(Path(log_dir).resolve() / f"{name}.log")
    options: dict[str, Any] = {
        "num_cpus": 0,
        "runtime_env": {"env_vars": worker_env(env)},
        "max_concurrency": max_concurrency,
        # beside the driver: a machine that leaves does not take it along, and it sees the driver's files
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    }
    actor: Any = ray.remote(ServiceProcess).options(**options).remote(recipe, log)
    handle = RayServiceHandle(actor, name, log, stall_timeout_s)
    handle.wait(actor.start.remote(), "its constructor")
    return handle


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None if none is listed with it."""
    found = psutil.net_if_addrs().items()
    return next((name for name, entries in found if any(entry.address == address for entry in entries)), None)


def redirect_output(log_file: str) -> None:
    """Append all that this process prints, C libraries included, to a file."""
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
