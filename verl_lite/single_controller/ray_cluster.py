"""Ray as a guest: a private cluster for one run, of which nothing is left when the run ends.

By default a cluster of this run's own on this machine: its own folder, ports chosen by the system, no dashboard, no
usage statistics, access by a random token. A cluster that somebody else started is joined only when its address is
given, RAY_ADDRESS notwithstanding. The end (normal, by an exception, or kill -9 of the driver) takes processes, folder
and shared memory with it; see `guard.py`.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray
from ray._private import ray_constants, services

from verl_lite.errors import ClusterLostError
from verl_lite.machine.host import cpu_count
from verl_lite.single_controller import watcher
from verl_lite.single_controller.guard import Guard, current_guard, set_environment, start_guard, stop_guard
from verl_lite.single_controller.ray_joined import HEAD, JoinedCluster, NodeWatch, join, leave

# One for the life of the process, since Ray remembers the first; from the environment, so no file is written for it.
_AUTH_TOKEN = secrets.token_hex(32)
_PROJECT_ROOT = str(Path(__file__).resolve().parents[2])
_SHARED_MEMORY = Path("/dev/shm")
_SMALLEST_STORE = 80 << 20  # Ray refuses less than 75 MiB
_STARTS = 3
_LOOPBACK = "127.0.0.1"
_POPEN = "ConsolePopen"  # what ray._private.services starts its daemons with
_STORE_LOST_AFTER_S = 6.0  # the control store is on this machine: it answers, or it is gone
_TOO_SLOW = "timed out during startup"
_LEFT_TO_OTHERS = 0.5  # share of the free shared memory that is not taken: NCCL and neighbours need some too


class RayInit(Protocol):
    """What `start_ray` reads of `ray_kwargs.ray_init`."""

    address: str | None
    num_cpus: int | None
    object_store_memory_mb: int
    wait_for_nodes_s: float


@dataclass
class _Cluster:
    """The private cluster of this process."""

    guard: Guard
    owns_guard: bool  # it was started for the cluster alone, and ends with it
    environment: dict[str, str | None]  # what the variables we set were before
    watch: NodeWatch = field(default_factory=lambda: NodeWatch({}))  # of its control store

    @property
    def is_headless(self) -> bool:
        """Whether its control store is gone."""
        return HEAD in self.watch.lost()


_cluster: _Cluster | None = None
_joined: JoinedCluster | None = None


def joined_cluster() -> JoinedCluster | None:
    """The cluster of somebody else that this process works in; None with one of its own, or none."""
    return _joined


def cluster_answers() -> bool:
    """Whether Ray is up and can be asked to do something; its calls wait for many minutes for a head that is gone."""
    cluster = _joined or _cluster
    return ray.is_initialized() and (cluster is None or not cluster.is_headless)


def require_head() -> None:
    """Raises ClusterLostError if the head of the joined cluster, or the control store of the run's own, is gone. Ray
    itself would wait for a minute and then end the process without a word."""
    if _joined is not None:
        _joined.require_head()
    elif _cluster is not None and (reason := _cluster.watch.lost().get(HEAD)):
        raise ClusterLostError(
            f"the run's own Ray has lost its control store ({reason}): it was killed, or the machine ran out of memory "
            "(`dmesg` knows). To go on from the last checkpoint: the same command with trainer.resume_mode=auto"
        )


@contextmanager
def ray_running(
    ray_init: RayInit, run_id: str, *, num_gpus: int | None = None, tell: Callable[[str], None] = print
) -> Iterator[None]:
    """Ray is up inside, see `start_ray`; where it was up before, it stays. tell: takes its sentences."""
    if ray.is_initialized():
        yield
        return
    try:
        for note in start_ray(ray_init, run_id, num_gpus=num_gpus, tell=tell):
            tell(note)
        yield
    finally:
        stop_ray()


def start_ray(
    ray_init: RayInit, run_id: str, *, num_gpus: int | None = None, tell: Callable[[str], None] = print
) -> list[str]:
    """Start the run's private cluster, or join the one at `ray_init.address`. Does nothing where Ray is up already.

    run_id: namespace of the run in a joined cluster. num_gpus: devices of a private cluster, the first of those that
    CUDA_VISIBLE_DEVICES names; None = those that Ray finds. tell: takes what is waited for in a joined cluster.
    Gives sentences on what could not be as asked for.
    """
    global _joined
    notes: list[str] = []
    if ray.is_initialized():
        return notes
    if ray_init.address is not None:
        with _signal_handlers_kept():
            _joined = join(ray_init.address, run_id, ray_init.wait_for_nodes_s, tell)
    else:
        notes = _start_private(ray_init, run_id, num_gpus)
    atexit.register(stop_ray)
    return notes


def _start_private(ray_init: RayInit, run_id: str, num_gpus: int | None) -> list[str]:
    global _cluster
    store = plan_object_store(ray_init.object_store_memory_mb << 20)
    guard, owns_guard = current_guard(), False
    if guard is None:
        guard, owns_guard = start_guard(), True
    previous = set_environment(
        {
            watcher.CLUSTER_MARK: guard.token,
            "RAY_AUTH_MODE": None,  # Ray then turns it on itself; set from outside it would be read too early
            "RAY_AUTH_TOKEN": _AUTH_TOKEN,
            "RAY_AUTH_TOKEN_PATH": None,
            "RAY_ADDRESS": None,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_task_events_report_interval_ms": "0",  # a history of calls for the dashboard: 3 MiB in 100 small steps
            "AUTOSCALER_METRIC_PORT": "0",  # else 44217, which only one cluster of a machine can have
        }
    )
    _cluster = _Cluster(guard, owns_guard, previous)
    with ExitStack() as undo, _signal_handlers_kept(), _daemons_in_own_groups(), _loopback_only():
        undo.callback(stop_ray)
        _init_patiently(
            guard,
            address="local",
            num_cpus=ray_init.num_cpus or cpu_count(),
            num_gpus=num_gpus,
            object_store_memory=store.size,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,  # below are remarks about the way we start it
            namespace=run_id,
            _node_ip_address=_LOOPBACK,
            _temp_dir=str(guard.folder / "ray"),
            object_spilling_directory=str(guard.temp),
            _plasma_directory=None if store.in_shared_memory else str(guard.temp),
        )
        host, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
        _cluster.watch = NodeWatch({HEAD: (host, int(port))}, lost_after_s=_STORE_LOST_AFTER_S).start()
        undo.pop_all()
    del os.environ[watcher.CLUSTER_MARK]  # what the driver starts from now on is not the cluster's
    return [store.note] if store.note else []


def _init_patiently(guard: Guard, **options: Any) -> None:
    """`ray.init`, again from the start where it was too slow: on a busy machine Ray gives up after 30 s, and has no
    option for that. Raises RuntimeError if it does not help."""
    for _ in range(_STARTS):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray raises it bare
            if _TOO_SLOW not in str(error):
                raise
            _end_processes(guard)
    raise RuntimeError(
        f"Ray did not start within 30 s, {_STARTS} times: is this machine overloaded? load {os.getloadavg()}"
    )


@dataclass(frozen=True)
class ObjectStore:
    """Bytes of Ray's object store, whether they are in /dev/shm, and a sentence if that is not as asked for."""

    size: int
    in_shared_memory: bool = True
    note: str = ""


def plan_object_store(asked: int, shared_memory: Path = _SHARED_MEMORY) -> ObjectStore:
    """A store that leaves half of the free shared memory to others. What does not fit in it is spilled to disk.

    With too little shared memory for the smallest store it is a file in the temporary folder: slower, and it runs.
    """
    free = shutil.disk_usage(shared_memory).free if shared_memory.is_dir() else 0
    room = int(free * (1 - _LEFT_TO_OTHERS))
    if asked <= room:
        return ObjectStore(asked)
    key = f"ray_kwargs.ray_init.object_store_memory_mb={asked >> 20}"
    found = f"{shared_memory} has {free >> 20} MiB free"
    mend = "in a container, --shm-size=2g gives more"
    if room >= _SMALLEST_STORE:
        return ObjectStore(room, note=f"{found}: {key} lowered to {room >> 20}, what is more goes to disk ({mend})")
    return ObjectStore(asked, False, f"{found}: Ray's object store is a file in the temporary folder, slower ({mend})")


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray sets a handler of its own for SIGTERM, which knows nothing of the run."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _daemons_in_own_groups() -> Iterator[None]:
    """Ray starts its daemons in process groups of their own, and so their workers. Else what a terminal that closes,
    `timeout` or a batch system sends to the group of the driver ends them before the driver can save."""
    popen = getattr(services, _POPEN)
    setattr(services, _POPEN, functools.partial(popen, process_group=0))
    try:
        yield
    finally:
        setattr(services, _POPEN, popen)


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Ray takes the machine's address where it is told a local one, unless it believes that there are no clusters; the
    daemons then listen on all interfaces. A private cluster is nobody else's business."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def stop_ray() -> None:
    """End this run's cluster and what it left; leave a joined one. Calling it again does nothing."""
    global _cluster, _joined
    if _joined is not None:
        cluster_of_others, _joined = _joined, None
        leave(cluster_of_others)
    if _cluster is None:
        return
    cluster, _cluster = _cluster, None
    cluster.watch.close()
    _end_processes(cluster.guard, headless=cluster.is_headless)
    set_environment(cluster.environment)
    if cluster.owns_guard:
        stop_guard()


def _end_processes(guard: Guard, headless: bool = False) -> None:
    """headless: nothing answers any more; Ray's own shutdown would wait for it with the interpreter's lock held."""
    shared = watcher.shared_memory_of(watcher.marked_processes(watcher.CLUSTER_MARK, guard.token))
    if headless:
        atexit.unregister(ray.shutdown)
    else:
        ray.shutdown()
    sessions = [str(path) for path in (guard.folder / "ray").glob("session_*")]
    watcher.end(watcher.CLUSTER_MARK, guard.token, sessions, patience_s=2.0, shared=shared)


def worker_env(env: dict[str, str]) -> dict[str, str]:
    """`env` with a PYTHONPATH on which worker processes find what the driver finds, this project first."""
    installed = (sys.prefix, sys.base_prefix)
    own = [path for path in sys.path if path and Path(path).is_dir() and not path.startswith(installed)]
    paths = dict.fromkeys([_PROJECT_ROOT, *own, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))])
    return env | {"PYTHONPATH": os.pathsep.join(paths)}
