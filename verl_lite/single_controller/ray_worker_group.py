"""The ray backend: one actor per slot, which holds the objects of all roles.

The driver waits for all ranks of a call at the same time and raises the first exception of a worker. Ranks that do not
return, because they wait for the failed rank, are ended. All slots are reserved together, as one placement group with
one bundle per machine of the pool; each bundle is on a different machine of the cluster.
"""

import faulthandler
import gc
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_lite.errors import NoRoomError, WorkerDiedError
from verl_lite.protocol import tensor_dict
from verl_lite.registry import import_modules
from verl_lite.single_controller import ray_cluster, ray_errors
from verl_lite.single_controller.decorator import WorkerArguments
from verl_lite.single_controller.liveness import Address, Lookout, silence_of, silent_process
from verl_lite.single_controller.resource_pool import ClassWithInitArgs, ResourcePool
from verl_lite.single_controller.worker import Slot, construct, invoke, open_store

# wait this long for a reservation in a private cluster
_PRIVATE_PATIENCE_S = 60.0
# wait this long for a reservation in a joined cluster before the log mentions it
_SILENT_PATIENCE_S = 3.0
_FIRST_POLL_S = 0.02
_LONGEST_POLL_S = 0.5
# after an error: time for the other ranks to return or to report the real cause
_GRACE_S = 2.0
# the same while all errors so far only report that another rank has ended
_CAUSE_PATIENCE_S = 15.0

Bundle = dict[str, float]


def reserve(pool: ResourcePool) -> PlacementGroup:
    """Reserves the slots of the pool as a placement group with one bundle per machine.

    Waits `ray_kwargs.ray_init.wait_for_nodes_s` seconds for room in a joined cluster.

    Raises:
        NoRoomError: the cluster has no room.
    """
    bundles = _bundles(pool)
    joined = ray_cluster.joined_cluster()
    if joined is not None:
        patience_s = joined.wait_s
        report_after_s = min(patience_s, _SILENT_PATIENCE_S)
    else:
        patience_s = _PRIVATE_PATIENCE_S
        # a private cluster does not grow
        if not any(machine.has(bundles[0]) for machine in ray_cluster.machines()):
            patience_s = 0.0
        report_after_s = patience_s

    strategy = "STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK"
    group = ray_cluster.call_ray(lambda: placement_group(bundles, strategy=strategy))
    start_time = time.monotonic()
    while not group.wait(timeout_seconds=1.0):
        waited_s = time.monotonic() - start_time
        ray_cluster.require_ray()
        if waited_s < report_after_s:
            continue
        missing = shortage(bundles, pool.world_size, ray_cluster.machines(), ray.available_resources())
        if waited_s >= patience_s:
            remove_placement_group(group)
            limit = ""
            if joined is not None:
                limit = f" after {patience_s:g} s (ray_kwargs.ray_init.wait_for_nodes_s)"
            raise NoRoomError(f"there is no room for the run{limit}: {missing}")
        # one message, then silence up to the end of the patience
        report_after_s = patience_s
        if joined is not None:
            joined.log(f"waiting up to {patience_s:g} s for room in the cluster: {missing}")
    return group


def _bundles(pool: ResourcePool) -> list[Bundle]:
    """Returns the resources that the pool needs on each machine."""
    bundles = []
    for processes in pool.process_on_nodes:
        bundle = {"CPU": pool.cpus_per_process * processes}
        if pool.use_gpu:
            bundle["GPU"] = 1.0 * processes
        bundles.append(bundle)
    return bundles


def shortage(bundles: list[Bundle], slots: int, present: list[ray_cluster.Machine], free: Bundle) -> str:
    """Returns a message with the requested and available resources and the possible remedies.

    Args:
        bundles: resources that the run needs on each of its machines.
        slots: number of processes of the run.
        present: machines of the cluster.
        free: free resources of all machines together.
    """
    largest = max(bundles, key=lambda bundle: bundle["CPU"])
    num_fitting = sum(machine.has(largest) for machine in present)
    num_wanted = len(bundles)
    fewer = "fewer devices (trainer.n_gpus_per_node)"
    if 0 < num_fitting < num_wanted:
        fewer = f"trainer.nnodes={num_fitting}"
    machines = "machines" if num_wanted > 1 else "machine"
    listed = ""
    for machine in present:
        listed += f"\n  {machine.name}: {_listed(machine.resources)}"
    return (
        f"the run needs {slots} slots on {num_wanted} {machines} with {_listed(largest)} each; {num_fitting} of the "
        f"{len(present)} machines in the cluster can hold that:{listed}\n  free now, in total: {_listed(free)}\n"
        "Add machines (`ray start --address=...`), wait until other jobs release theirs, or continue with "
        f"{fewer}: any number of devices can load a checkpoint"
    )


def _listed(resources: Bundle) -> str:
    """Formats resources as `2 CPU, 1 GPU`."""
    text = f"{resources.get('CPU', 0.0):g} CPU"
    if "GPU" in resources:
        text += f", {resources['GPU']:g} GPU"
    return text


class SlotProcess:
    """The actor in a worker process: it holds the slot and runs calls on the objects in it."""

    def __init__(self, umask: int, log_file: str | None, stall_timeout_s: float | None) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._log_file = log_file
        # this process ignores the signals; a no-op handler, unlike SIG_IGN, is not inherited by programs of user code
        for number in ray_cluster.BATCH_SYSTEM_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ray_cluster.BATCH_SYSTEM_SIGNALS)
        ray_cluster.begin_process(umask, log_file)
        if log_file is not None:
            # a crash in native code writes its stack to the log
            faulthandler.enable()
        # until all imports are done: there is no garbage yet, and the imports take 10% less time
        gc.disable()
        # imports its dependencies now instead of at the first batch
        tensor_dict({}, 0)

    def begin(self, opens_store: bool) -> tuple[str, Address | None]:
        """Returns Ray's id of this machine and, with `opens_store`, the address of a store that this process opens."""
        node_id = ray.get_runtime_context().get_node_id()
        if not opens_store:
            return node_id, None
        host = ray.util.get_node_ip_address()
        return node_id, (host, open_store(host))

    def construct(self, slot: Slot, roles: dict[str, ClassWithInitArgs], modules: Sequence[str]) -> None:
        """Imports `modules` and constructs the objects of all roles in order."""
        self._slot = slot
        assert slot.store is not None
        os.environ |= {
            "RANK": str(slot.rank),
            "WORLD_SIZE": str(slot.world_size),
            # each process sees only its own device
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": str(slot.local_world_size),
            "MASTER_ADDR": slot.store[0],
            "MASTER_PORT": str(slot.store[1]),
        }
        interface = interface_of(ray.util.get_node_ip_address())
        if interface is not None:
            # otherwise they use the host name or any active interface
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
        with ray_errors.portable_errors():
            import_modules(modules)
            # modules live as long as the process: without the freeze, each full collection would visit them
            gc.freeze()
            gc.enable()
            for role, recipe in roles.items():
                construct(slot, role, recipe)

    def invoke(self, role: str, method: str, names: list[str], *values: object) -> tuple[object, np.ndarray]:
        """Calls a method. The last len(names) values are keyword arguments: Ray resolves only top-level references."""
        ray_cluster.restore_log(self._log_file)
        positional = values[: len(values) - len(names)]
        keywords = dict(zip(names, values[len(positional) :], strict=True))
        arguments = WorkerArguments(positional, keywords)
        # write the stacks to the log shortly before the driver ends the process
        if self._stall_timeout_s is not None:
            faulthandler.dump_traceback_later(0.9 * self._stall_timeout_s)
        try:
            with ray_errors.portable_errors():
                return invoke(self._slot, role, method, arguments)
        finally:
            faulthandler.cancel_dump_traceback_later()


@dataclass(frozen=True)
class _Handle:
    """A running call on a slot.

    Attributes:
        ref: Ray's reference to the result.
        rank: rank of the slot.
        role: role of the worker.
        method: name of the method, for error messages.
        has_usage: True if the result is that of `SlotProcess.invoke`, a pair with the usage.
    """

    ref: ray.ObjectRef
    rank: int
    role: str
    method: str
    has_usage: bool = False


class RayTransport:
    """The slot processes of a pool. For the arguments see `create_worker_groups`."""

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
            raise RuntimeError("trainer.backend=ray needs a Ray cluster; start it with ray_running")
        self.world_size = pool.world_size
        self.usage = np.zeros(2)
        # no time limit for the start
        self._stall_timeout_s: float | None = None
        self._ended: str | None = None
        self._lookout = Lookout()
        # by rank; the machines only in a joined cluster
        self._processes: dict[int, tuple[Address, int]] = {}
        self._machines: dict[int, ray_cluster.Machine] = {}

        name = "+".join(roles)
        self._logs: list[str | None] = [None] * pool.world_size
        if log_dir is not None:
            folder = Path(log_dir).resolve()
            self._logs = [str(folder / f"{name}-{rank}.log") for rank in range(pool.world_size)]
        self._group = reserve(pool)
        self._actors = self._start_actors(pool, env, stall_timeout_s)
        store = self._begin(name)
        self._construct(name, pool, roles, modules, store)
        self._stall_timeout_s = stall_timeout_s

    def _start_actors(
        self, pool: ResourcePool, env: dict[str, str], stall_timeout_s: float | None
    ) -> list[ray.actor.ActorHandle]:
        """Starts one `SlotProcess` for each rank, on the machine that the pool assigns to the rank."""
        actor = ray.remote(SlotProcess)
        num_gpus = 1 if pool.use_gpu else 0
        runtime_env = ray_cluster.worker_runtime(env)
        umask = ray_cluster.current_umask()
        actors = []
        # each bundle is a machine of the pool
        for node, log in zip(pool.nodes, self._logs, strict=True):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
            placed = actor.options(
                scheduling_strategy=strategy,
                num_cpus=pool.cpus_per_process,
                num_gpus=num_gpus,
                runtime_env=runtime_env,
            )
            actors.append(placed.remote(umask, log, stall_timeout_s))
        return actors

    def _begin(self, name: str) -> Address:
        """Waits for the start of the processes, and records where each of them runs.

        Returns the address of the store that connects the ranks, which rank 0 has opened.
        """
        handles = []
        for rank, actor in enumerate(self._actors):
            ref = actor.begin.remote(opens_store=rank == 0)
            handles.append(_Handle(ref, rank, name, "start"))
        started = self._wait(handles)

        # all processes of a private cluster are on this machine
        machine_of_node: dict[str, ray_cluster.Machine] = {}
        if ray_cluster.joined_cluster() is not None:
            machine_of_node = {machine.node_id: machine for machine in ray_cluster.machines()}
        for rank, (node_id, _) in enumerate(started):
            self._processes[rank] = ray_cluster.process_of(self._actors[rank])
            if node_id in machine_of_node:
                self._machines[rank] = machine_of_node[node_id]

        store: Address = started[0][1]
        return store

    def _construct(
        self,
        name: str,
        pool: ResourcePool,
        roles: dict[str, ClassWithInitArgs],
        modules: Sequence[str],
        store: Address,
    ) -> None:
        """Constructs the objects of all roles in the processes. An error ends the processes."""
        # the arguments of the constructors are sent once for all ranks
        shared_roles = self.share(roles)
        handles = []
        for rank, node in enumerate(pool.nodes):
            slot = Slot(rank, pool.world_size, pool.process_on_nodes[node], backend="ray", store=store)
            ref = self._actors[rank].construct.remote(slot, shared_roles, tuple(modules))
            handles.append(_Handle(ref, rank, name, "its constructor"))
        self._wait(handles, fatal=True)

    def share(self, value: object) -> ray.ObjectRef:
        return ray_cluster.call_ray(lambda: ray.put(value))

    def start(self, role: str, method: str, calls: Iterable[WorkerArguments]) -> Callable[[], list[object]]:
        handles = []
        for rank, arguments in enumerate(calls):
            handle = self._submit(rank, role, method, arguments)
            handles.append(handle)
        return partial(self._wait, handles)

    def _submit(self, rank: int, role: str, method: str, arguments: WorkerArguments) -> _Handle:
        """Starts a call of `SlotProcess.invoke` without waiting for it."""
        if self._ended is not None:
            raise WorkerDiedError(f"{role}.{method}: the workers were ended: {self._ended}")
        invoke = self._actors[rank].invoke
        names = list(arguments.keywords)
        values = arguments.values
        ref = ray_cluster.call_ray(lambda: invoke.remote(role, method, names, *values))
        return _Handle(ref, rank, role, method, has_usage=True)

    # Any: the results of the methods of `SlotProcess`, of which Ray's types say nothing
    def _wait(self, handles: list[_Handle], *, fatal: bool = False) -> list[Any]:
        """Waits for all calls and returns their results; see `Transport.start`.

        With `fatal=True`, any error also ends the processes.
        """
        results: dict[ray.ObjectRef, object] = {}
        pending = handles
        poll_s = _FIRST_POLL_S
        start_time = time.monotonic()
        while pending:
            pending, errors = self._collect(pending, results, poll_s)
            # short calls return without delay, and long ones cost the driver two polls a second
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)
            errors += self._silent_workers(pending)
            if errors:
                raise self._handle_crash(errors, pending, fatal)
            limit_s = self._stall_timeout_s
            if pending and limit_s is not None and time.monotonic() - start_time > limit_s:
                raise self._handle_stall(pending, limit_s)
        return [results[handle.ref] for handle in handles]

    def _handle_stall(self, pending: list[_Handle], timeout_s: float) -> Exception:
        """Ends the processes and returns the error that names the calls that have not returned."""
        first = pending[0]
        ranks = sorted(handle.rank for handle in pending)
        who = f"{first.role}.{first.method}: ranks {ranks} of {self.world_size} have"
        log = self._logs[first.rank]
        error = ray_errors.stalled(who, timeout_s, first.role, first.method, log, first.rank)
        self._end("stalled")
        return error

    def _collect(
        self, pending: list[_Handle], results: dict[ray.ObjectRef, object], timeout_s: float
    ) -> tuple[list[_Handle], list[Exception]]:
        """Waits for calls and adds their results to `results`. Returns the unfinished calls and the errors."""
        refs = [handle.ref for handle in pending]
        ready, _ = ray_cluster.call_ray(lambda: ray.wait(refs, num_returns=len(refs), timeout=timeout_s))
        ready_refs = set(ready)
        unfinished: list[_Handle] = []
        errors: list[Exception] = []
        for handle in pending:
            if handle.ref not in ready_refs:
                unfinished.append(handle)
                continue
            try:
                result = ray_cluster.call_ray(partial(ray.get, handle.ref))
                if handle.has_usage:
                    result, usage = result
                    self.usage = self.usage + usage
                results[handle.ref] = result
            except RayTaskError as error:
                # an exception of the worker itself
                errors.append(ray_errors.original_error(error))
            except RayError as error:
                errors.append(self._end_of_process(handle, error))
        return unfinished, errors

    def _end_of_process(self, handle: _Handle, error: RayError) -> WorkerDiedError:
        """Returns the error of a process that has ended during a call."""
        # if the raylet has ended, that is the cause
        ray_cluster.require_ray()
        lost_machine = self._lost_machine(handle)
        if lost_machine is not None:
            return lost_machine

        note = ""
        if isinstance(error, OutOfMemoryError):
            # lists the processes of the machine that use the most memory
            note = str(error)
        elif self._ended is not None:
            note = f"the workers had been ended: {self._ended}"
        return self._death(handle, ray_errors.cause_of_death(error), note)

    def _silent_workers(self, pending: list[_Handle]) -> list[Exception]:
        """Returns the errors of ranks whose process, or whose machine's raylet, no longer answers."""
        # Ray reports the end of a process itself, but a process that is stopped keeps its call pending forever
        watched: dict[Address, _Handle] = {}
        for handle in pending:
            if handle.rank in self._processes:  # not yet while the processes start
                process_address, _ = self._processes[handle.rank]
                watched[process_address] = handle
        for handle in pending:
            if handle.rank in self._machines:
                watched[self._machines[handle.rank].address] = handle

        errors: list[Exception] = []
        for address in self._lookout.lost(watched):
            handle = watched[address]
            cause = f"{silent_process(*self._processes[handle.rank])}. The run ends the process"
            errors.append(self._lost_machine(handle) or self._death(handle, cause))
        return errors

    def _lost_machine(self, handle: _Handle) -> WorkerDiedError | None:
        """Returns an error if the rank's machine does not answer, else None."""
        machine = self._machines.get(handle.rank)
        if machine is None:
            return None
        reason = silence_of(machine.address)
        if reason is None:
            return None
        return self._death(handle, f"its machine has left the cluster: its raylet at {reason}")

    def _death(self, handle: _Handle, cause: str, note: str = "") -> WorkerDiedError:
        """Returns the error of a rank whose process has ended for this reason."""
        # only in a joined cluster
        node = None
        if handle.rank in self._machines:
            node = self._machines[handle.rank].name
        log = self._logs[handle.rank]
        return ray_errors.death(cause, handle.role, handle.rank, handle.method, log, node, note)

    def _handle_crash(self, errors: list[Exception], pending: list[_Handle], fatal: bool) -> Exception:
        """Returns the error to raise: the first that is not a consequence of another one.

        Waits a few seconds for the pending calls, and then ends all slots if some have not returned.

        Args:
            errors: errors so far.
            pending: calls that have not returned.
            fatal: whether to end the slots in any case.
        """
        start_time = time.monotonic()
        while pending:
            # ranks can report the closed connection to a failed rank before that rank reports why it failed
            patience_s = _GRACE_S
            if all(map(ray_errors.is_consequence, errors)):
                patience_s = _CAUSE_PATIENCE_S
            if time.monotonic() >= start_time + patience_s:
                break
            pending, new_errors = self._collect(pending, {}, 0.1)
            errors += new_errors
        if all(map(ray_errors.is_consequence, errors)):
            # the cause may be a machine that is gone, whose ranks cannot report it
            for handle in pending:
                lost_machine = self._lost_machine(handle)
                if lost_machine is not None:
                    errors.append(lost_machine)
        causes = [error for error in errors if not ray_errors.is_consequence(error)]
        first = (causes or errors)[0]
        if pending:
            ranks = [handle.rank for handle in pending]
            first.add_note(f"ranks {ranks} did not return within seconds, so all workers of the pool were ended")
        if pending or fatal or any(isinstance(error, WorkerDiedError) for error in errors):
            self._end(f"{type(first).__name__}: {first}")
        return first

    def close(self) -> None:
        if self._ended is None:
            self._end("shut down")

    def _end(self, reason: str) -> None:
        """Ends all processes. Later calls raise WorkerDiedError with this reason."""
        self._ended = reason
        # calls of Ray would wait forever for a lost part; then `stop_ray` or the guard ends the processes
        if ray_cluster.cluster_answers():
            for actor in self._actors:
                ray.kill(actor)
            remove_placement_group(self._group)


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with this address, or None."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.address == address:
                return name
    return None
