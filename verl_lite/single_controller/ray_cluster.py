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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import ray
from ray._private import ray_constants, services

from verl_lite.errors import ClusterLostError
from verl_lite.machine.host import cpu_count
from verl_lite.single_controller import watcher
from verl_lite.single_controller.guard import Guard, current_guard, set_environment, start_guard, stop_guard
from verl_lite.single_controller.ray_joined import HEAD, JoinedCluster, NodeWatch, head_address, join

# One for the life of the process, since Ray remembers the first; from the environment, so no file is written for it.
_AUTH_TOKEN = secrets.token_hex(32)
_PROJECT_ROOT = str(Path(__file__).resolve().parents[2])
_SMALLEST_STORE = 80 << 20  # Ray refuses less than 75 MiB
_STARTS = 3
_STORE_LOST_AFTER_S = 6.0  # the control store is on this machine: it answers, or it is gone


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
    watch: NodeWatch  # of its control store


_cluster: _Cluster | None = None
_joined: JoinedCluster | None = None


def joined_cluster() -> JoinedCluster | None:
    """The cluster of somebody else that this process works in; None with one of its own, or none."""
    return _joined


def cluster_answers() -> bool:
    """True if Ray is up and can be asked to do something; its calls wait for many minutes for a head that is gone."""
    cluster = _joined or _cluster
    return ray.is_initialized() and (cluster is None or HEAD not in cluster.watch.lost())


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
    """Ray is up inside, see `start_ray`; where it was up before, it stays."""
    if ray.is_initialized():
        yield
        return
    try:
        start_ray(ray_init, run_id, num_gpus=num_gpus, log=tell)
        yield
    finally:
        stop_ray()


def start_ray(
    ray_init: RayInit, run_id: str, *, num_gpus: int | None = None, log: Callable[[str], None] = print
) -> None:
    """Start the run's private cluster, or join the one at `ray_init.address`. Does nothing where Ray is up already.

    Args:
        run_id: namespace of the run in a joined cluster.
        num_gpus: devices of a private cluster, the first of those that CUDA_VISIBLE_DEVICES names; None = those that
            Ray finds.
        log: takes what is waited for in a joined cluster.
    """
    global _joined
    if ray.is_initialized():
        return
    with _signal_handlers_kept():
        if ray_init.address is not None:
            _joined = join(ray_init.address, run_id, ray_init.wait_for_nodes_s, log)
        else:
            _start_private(ray_init, run_id, num_gpus)
    atexit.register(stop_ray)


def _start_private(ray_init: RayInit, run_id: str, num_gpus: int | None) -> None:
    global _cluster
    owns_guard = current_guard() is None
    guard = current_guard() or start_guard()
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
    _cluster = _Cluster(guard, owns_guard, previous, NodeWatch({}))
    # Daemons, and so workers, are in process groups of their own: else what a terminal that closes, `timeout` or a
    # batch system sends to the driver's group ends them before the driver can save.
    in_own_groups = functools.partial(services.ConsolePopen, process_group=0)
    try:
        with (
            _replaced(services, "ConsolePopen", in_own_groups),
            # else Ray takes the machine's address for a local one, and its daemons listen on all interfaces
            _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False),
        ):
            _init_patiently(
                guard,
                address="local",
                num_cpus=ray_init.num_cpus or cpu_count(),
                num_gpus=num_gpus,
                object_store_memory=object_store_bytes(ray_init.object_store_memory_mb << 20),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,  # below are remarks about the way we start it
                namespace=run_id,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(guard.folder / "ray"),
                object_spilling_directory=str(guard.temp),
            )
    except BaseException:
        stop_ray()
        raise
    _cluster.watch = NodeWatch({HEAD: head_address()}, lost_after_s=_STORE_LOST_AFTER_S).start()
    del os.environ[watcher.CLUSTER_MARK]  # what the driver starts from now on is not the cluster's


def _init_patiently(guard: Guard, **options: Any) -> None:
    """`ray.init`, again from the start where it was too slow: on a busy machine Ray gives up after 30 s, and has no
    option for that. Raises RuntimeError if it does not help."""
    for _ in range(_STARTS):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray raises it bare
            if "timed out during startup" not in str(error):
                raise
            _end_processes(guard)
    raise RuntimeError(
        f"Ray did not start within 30 s, {_STARTS} times: is this machine overloaded? load {os.getloadavg()}"
    )


def object_store_bytes(asked: int, shared_memory: Path = Path("/dev/shm")) -> int:
    """A store that leaves half of the free shared memory to NCCL and the neighbours; what does not fit is spilled to
    disk. Where there is too little for the smallest store, Ray puts it into a file in TMPDIR."""
    free = shutil.disk_usage(shared_memory).free if shared_memory.is_dir() else 0
    return min(asked, max(_SMALLEST_STORE, free // 2))


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray sets a handler of its own for SIGTERM, which knows nothing of the run."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def stop_ray() -> None:
    """End this run's cluster and what it left; leave a joined one. Calling it again does nothing."""
    global _cluster, _joined
    joined, cluster, _joined, _cluster = _joined, _cluster, None, None
    both = [one.watch for one in (joined, cluster) if one is not None]
    is_headless = any(HEAD in watch.lost() for watch in both)
    for watch in both:
        watch.close()
    if is_headless:  # Ray's own shutdown would wait for it with the interpreter's lock held
        atexit.unregister(ray.shutdown)
    elif joined is not None:
        ray.shutdown()
    if cluster is not None:
        _end_processes(cluster.guard, is_headless)
        set_environment(cluster.environment)
        if cluster.owns_guard:
            stop_guard()


def _end_processes(guard: Guard, headless: bool = False) -> None:
    shared = watcher.shared_memory_of(watcher.marked_processes(watcher.CLUSTER_MARK, guard.token))
    if not headless:
        ray.shutdown()
    sessions = [str(path) for path in (guard.folder / "ray").glob("session_*")]
    watcher.end(watcher.CLUSTER_MARK, guard.token, sessions, patience_s=2.0, shared=shared)


def worker_env(env: dict[str, str]) -> dict[str, str]:
    """`env` with a PYTHONPATH on which worker processes find what the driver finds, this project first."""
    installed = (sys.prefix, sys.base_prefix)
    own = [path for path in sys.path if path and Path(path).is_dir() and not path.startswith(installed)]
    paths = dict.fromkeys([_PROJECT_ROOT, *own, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))])
    return env | {"PYTHONPATH": os.pathsep.join(paths)}
