"""The ray backend: one actor per slot, which holds the objects of all roles.

Values that several ranks receive are put into the object store once. The driver waits for all ranks of a call at once:
the first error is raised as the exception that the worker raised, with the remote traceback as a note, and ranks that
do not come back, since they wait for the failed one, are ended. What Ray says of a death is translated in
`ray_errors.py`.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError

from verl_lite.errors import ClusterLostError, StalledError, WorkerDiedError, add_circumstances, circumstances
from verl_lite.protocol import tensor_dict
from verl_lite.registry import import_modules
from verl_lite.single_controller.ray_cluster import cluster_answers, joined_cluster, require_head, worker_env
from verl_lite.single_controller.ray_errors import (
    SlotMemory,
    death,
    is_consequence,
    machine_lost,
    original_error,
    save_driver_stacks,
    stacks_if_it_stalls,
)
from verl_lite.single_controller.ray_joined import Machine, machines, silence_of
from verl_lite.single_controller.ray_resource_pool import RayResourcePool
from verl_lite.single_controller.resource_pool import ResourcePool
from verl_lite.single_controller.worker import Slot, construct, invoke, open_store
from verl_lite.single_controller.worker_group import ClassWithInitArgs

_FIRST_LOOK_S = 0.02
_LONGEST_LOOK_S = 0.5
_GRACE_S = 2.0  # after an error: time for the other ranks to come back, or to tell the real cause
_CAUSE_PATIENCE_S = 15.0  # the same while all that is known are consequences of something else


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

    def process(self) -> tuple[int, str]:
        """The process's id, and Ray's name of the machine where it has it."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def construct(self, slot: Slot, roles: dict[str, ClassWithInitArgs], modules: Sequence[str]) -> None:
        """Import `modules`, and make the objects of all roles, in order."""
        self._slot = slot
        assert slot.store is not None
        host, port = slot.store
        os.environ |= {
            "RANK": str(slot.rank),
            "WORLD_SIZE": str(slot.world_size),
            "LOCAL_RANK": "0",  # each process sees only its own device
            "LOCAL_WORLD_SIZE": str(slot.local_world_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
        interface = interface_of(ray.util.get_node_ip_address())
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else by the host's name
        with Portable():
            import_modules(modules)
            for role, recipe in roles.items():
                construct(slot, role, recipe.cls, recipe.args, recipe.kwargs)

    def invoke(self, role: str, method: str, names: list[str], *values: Any) -> Any:
        """Call a method; the last len(names) values are keyword arguments: Ray resolves only top-level references."""
        positional = values[: len(values) - len(names)]
        keywords = dict(zip(names, values[len(positional) :], strict=True))
        with Portable(), stacks_if_it_stalls(self._stall_timeout_s):
            return invoke(self._slot, role, method, positional, keywords)


@dataclass(frozen=True)
class _Handle:
    """A running call."""

    ref: ray.ObjectRef
    rank: int
    role: str
    method: str


class RayTransport:
    """The slot processes of a pool."""

    def __init__(
        self,
        pool: ResourcePool,
        roles: dict[str, ClassWithInitArgs],
        *,
        modules: Sequence[str],
        env: dict[str, str],
        log_dir: str | Path | None,
        stall_timeout_s: float | None,
    ) -> None:
        self.world_size = pool.world_size
        self._stall_timeout_s: float | None = None  # starting may take as long as it takes
        self._ended: str | None = None
        own = RayResourcePool(pool.process_on_nodes, pool.use_gpu, pool.cpus_per_process)
        self._pool = pool if isinstance(pool, RayResourcePool) else own
        self._actors: list[Any] = []
        self._memory = SlotMemory()
        self._machines: dict[int, Machine] = {}  # by rank, in a joined cluster
        self._joined = joined_cluster()
        name = "+".join(roles)
        folder = None if log_dir is None else Path(log_dir).resolve()
        self._logs = [None if folder is None else str(folder / f"{name}-{r}.log") for r in range(self.world_size)]
        actor: Any = ray.remote(SlotProcess)
        options: dict[str, Any] = {
            "num_cpus": pool.cpus_per_process,
            "num_gpus": 1 if pool.use_gpu else 0,
            "runtime_env": {"env_vars": worker_env(env)},
        }
        for place, log in zip(self._pool.reserve(), self._logs, strict=True):
            self._actors.append(actor.options(scheduling_strategy=place, **options).remote(log, stall_timeout_s))
        self._construct(pool, roles, modules, name)
        self._stall_timeout_s = stall_timeout_s

    def _construct(
        self, pool: ResourcePool, roles: dict[str, ClassWithInitArgs], modules: Sequence[str], name: str
    ) -> None:
        where = "its constructor"
        started = [_Handle(actor.process.remote(), rank, name, "start") for rank, actor in enumerate(self._actors)]
        store, *processes = self.wait([_Handle(self._actors[0].open_store.remote(), 0, name, "start"), *started])
        for rank, (pid, node_id) in enumerate(processes):
            if node_id == ray.get_runtime_context().get_node_id():
                self._memory.watch(rank, pid)
        self._locate([node_id for _, node_id in processes])
        shared = ray.put(roles)
        handles = []
        for rank, node in enumerate(pool.nodes):
            slot = Slot(rank, pool.world_size, pool.process_on_nodes[node], backend="ray", store=store)
            handles.append(
                _Handle(self._actors[rank].construct.remote(slot, shared, tuple(modules)), rank, name, where)
            )
        self.wait(handles, fatal=True)

    def _locate(self, node_ids: list[str]) -> None:
        """Notes on which machine each rank is, and watches those."""
        if self._joined is None:
            return
        known = {machine.node_id: machine for machine in machines()}
        self._machines = {rank: known[node_id] for rank, node_id in enumerate(node_ids) if node_id in known}
        self._joined.follow(list(self._machines.values()))

    def share(self, value: Any) -> Any:
        return ray.put(value)

    def submit(self, rank: int, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Handle:
        if self._ended is not None:
            raise WorkerDiedError(f"{role}.{method}: the workers were ended: {self._ended}")
        values = [value.ref if isinstance(value, _Handle) else value for value in (*args, *kwargs.values())]
        ref = self._actors[rank].invoke.remote(role, method, list(kwargs), *values)
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
            for handle in (by_ref[ref] for ref in (*ready, *pending)):
                self._memory.look(handle.rank, f"{handle.role}.{handle.method}")
            errors = self._fetch(ready, by_ref, values)
            errors += self._unreachable([by_ref[ref] for ref in pending])
            if errors:
                raise self._first(errors, pending, by_ref, values, fatal)
            if self._stall_timeout_s is not None and time.monotonic() - begun > self._stall_timeout_s:
                raise self._stalled([by_ref[ref] for ref in pending])
        return [values[handle.ref] for handle in handles]

    def _fetch(self, ready: list[Any], by_ref: dict[Any, _Handle], values: dict[Any, Any]) -> list[Exception]:
        """Values of finished calls go to `values`; gives the errors."""
        try:
            values |= dict(zip(ready, ray.get(ready), strict=True))
            return []
        except RayError:
            pass  # which of them failed is found one by one
        errors = []
        for ref in ready:
            try:
                values[ref] = ray.get(ref)
            except RayTaskError as error:
                errors.append(original_error(error))
            except RayError as error:
                errors.append(self._died(by_ref[ref], error))
        return errors

    def _first(
        self,
        errors: list[Exception],
        pending: list[Any],
        by_ref: dict[Any, _Handle],
        values: dict[Any, Any],
        fatal: bool,
    ) -> Exception:
        """The error to raise: the earliest that is not a mere consequence of another. Ends slots that do not answer."""
        begun = time.monotonic()
        while pending:
            patience = _CAUSE_PATIENCE_S if all(is_consequence(error) for error in errors) else _GRACE_S
            if time.monotonic() >= begun + patience:
                break
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=0.1)
            errors += self._fetch(ready, by_ref, values)
        if all(is_consequence(error) for error in errors):
            errors += [
                self._machine_lost(by_ref[ref], machine, reason)
                for ref in pending
                if (machine := self._machines.get(by_ref[ref].rank)) and (reason := silence_of(machine.address))
            ]
        first = min(errors, key=is_consequence)  # min keeps the earliest of equals
        died = any(isinstance(error, WorkerDiedError) for error in errors)
        if pending or died or fatal:
            waiting = [by_ref[ref].rank for ref in pending]
            if waiting:
                first.add_note(f"ranks {waiting} had not answered seconds later: the pool's workers were ended")
            self._end(f"{type(first).__name__}: {first}")
        return first

    def _unreachable(self, pending: list[_Handle]) -> list[Exception]:
        """Errors for the ranks whose machine does not answer any more. Raises ClusterLostError."""
        try:
            require_head()
        except ClusterLostError as error:
            self._ended = str(error)
            raise
        if self._joined is None:
            return []
        lost = self._joined.watch.lost()
        return [
            self._machine_lost(handle, machine, lost[machine.name])
            for handle in pending
            if (machine := self._machines.get(handle.rank)) is not None and machine.name in lost
        ]

    def _machine_lost(self, handle: _Handle, machine: Machine, reason: str) -> WorkerDiedError:
        log = self._logs[handle.rank]
        return machine_lost(reason, machine.name, handle.role, handle.rank, handle.method, log)

    def _died(self, handle: _Handle, error: RayError) -> WorkerDiedError:
        log, memory = self._logs[handle.rank], self._memory.describe(handle.rank)
        machine = self._machines.get(handle.rank)
        if machine is not None and (reason := silence_of(machine.address)):
            return self._machine_lost(handle, machine, reason)
        node = None if machine is None else machine.name
        died = death(error, handle.role, handle.rank, handle.method, log, memory, node)
        if self._ended is not None:
            died.add_note(f"the workers had been ended: {self._ended}")
        return died

    def _stalled(self, silent: list[_Handle]) -> StalledError:
        """The error that says who did not answer; ends the slots."""
        first = silent[0]
        ranks = sorted(handle.rank for handle in silent)
        error = StalledError(
            f"{first.role}.{first.method}: ranks {ranks} of {self.world_size} have not answered for "
            f"{self._stall_timeout_s:g} s (trainer.stall_timeout_s). The stacks of their threads are at the end of "
            f"their logs, such as {self._logs[first.rank]}. Raise the limit if the work simply takes longer"
        )
        log, machine = self._logs[first.rank], self._machines.get(first.rank)
        node = None if machine is None else machine.name
        add_circumstances(error, role=first.role, rank=first.rank, node=node, method=first.method, log=log)
        if told := save_driver_stacks(log, str(error)):
            error.add_note(told)
        self._end("stalled")
        return error

    def close(self) -> None:
        if self._ended is None:
            self._end("shut down")

    def _end(self, reason: str) -> None:
        self._ended = reason
        if cluster_answers():
            for actor in self._actors:
                ray.kill(actor)
            self._pool.release()


class Portable:
    """Turns an exception that cannot travel between processes into a RuntimeError that says the same."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if not isinstance(error, Exception):
            return
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except (TypeError, AttributeError, ValueError, KeyError, RuntimeError, cloudpickle.PicklingError) as reason:
            portable = RuntimeError(f"{type(error).__name__}: {error}")
            for note in [*getattr(error, "__notes__", ()), f"(the exception itself does not pickle: {reason})"]:
                portable.add_note(note)
            vars(circumstances(portable)).update(vars(circumstances(error)))
            raise portable from error


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
