"""Ray as a guest: a private cluster for one run, of which nothing is left when the run ends.

By default a cluster of this run's own on this machine: its own folder, ports chosen by the system, no dashboard, no
usage statistics, access by a random token. A cluster that somebody else started is joined only when its address is
given. The end (normal, by an exception, or kill -9 of the driver) takes processes, folder and shared memory with it;
see `watcher.py`.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ray

from verl_lite.single_controller import watcher

# Unix sockets have room for 107 bytes: folder + "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store".
_LONGEST_TEMP_DIR = 30
# One for the life of the process, since Ray remembers the first; from the environment, so no file is written for it.
_AUTH_TOKEN = secrets.token_hex(32)
_PROJECT_ROOT = str(Path(__file__).resolve().parents[2])


class RayInit(Protocol):
    """What `start_ray` reads of `ray_kwargs.ray_init`."""

    address: str | None
    num_cpus: int | None
    object_store_memory_mb: int


@dataclass
class _Cluster:
    """The private cluster of this process."""

    token: str
    folder: str
    watcher: subprocess.Popen[bytes]
    environment: dict[str, str | None]  # what the variables we set were before


_cluster: _Cluster | None = None
_joined = False


def start_ray(ray_init: RayInit, run_id: str) -> None:
    """Start the run's private cluster, or join the one at `ray_init.address`. Does nothing where Ray is up already.

    run_id: namespace of the run in a joined cluster.
    """
    global _joined
    if ray.is_initialized():
        return
    if ray_init.address is not None:
        ray.init(address=ray_init.address, namespace=run_id, log_to_driver=False, logging_level=logging.ERROR)
        _joined = True
    else:
        _start_private(ray_init, run_id)
    atexit.register(stop_ray)


def _start_private(ray_init: RayInit, run_id: str) -> None:
    global _cluster
    token = secrets.token_hex(16)
    base = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="vl-", dir=base if len(base) <= _LONGEST_TEMP_DIR else "/tmp")
    previous = _set_environment(
        {
            watcher.RUN_MARK: token,
            watcher.CLUSTER_MARK: token,
            "RAY_AUTH_MODE": None,  # Ray then turns it on itself; set from outside it would be read too early
            "RAY_AUTH_TOKEN": _AUTH_TOKEN,
            "RAY_AUTH_TOKEN_PATH": None,
            "RAY_ADDRESS": None,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
    )
    _cluster = _Cluster(token, folder, _start_watcher(token, folder), previous)
    with ExitStack() as undo:
        undo.callback(stop_ray)
        ray.init(
            address="local",
            num_cpus=ray_init.num_cpus or len(os.sched_getaffinity(0)),
            object_store_memory=ray_init.object_store_memory_mb << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,  # below are remarks about the way we start it
            namespace=run_id,
            _temp_dir=folder,
        )
        undo.pop_all()
    del os.environ[watcher.CLUSTER_MARK]  # what the driver starts from now on is not the cluster's


def _start_watcher(token: str, folder: str) -> subprocess.Popen[bytes]:
    unmarked = {k: v for k, v in os.environ.items() if k not in (watcher.RUN_MARK, watcher.CLUSTER_MARK)}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", watcher.__file__, str(os.getpid()), token, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=unmarked,
        start_new_session=True,
    )


def stop_ray() -> None:
    """End this run's cluster and what it left; leave a joined one. Calling it again does nothing."""
    global _cluster, _joined
    if _joined:
        _joined = False
        ray.shutdown()
    if _cluster is None:
        return
    cluster, _cluster = _cluster, None
    shared = watcher.shared_memory_of(watcher.marked_processes(watcher.CLUSTER_MARK, cluster.token))
    ray.shutdown()
    watcher.end(watcher.CLUSTER_MARK, cluster.token, cluster.folder, patience_s=2.0, shared=shared)
    cluster.watcher.communicate(b"q")
    _set_environment(cluster.environment)


def _set_environment(values: dict[str, str | None]) -> dict[str, str | None]:
    """Set (None: remove) variables; gives what they were."""
    previous = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return previous


def worker_env(env: dict[str, str]) -> dict[str, str]:
    """`env` with a PYTHONPATH on which worker processes find what the driver finds, this project first."""
    installed = (sys.prefix, sys.base_prefix)
    own = [path for path in sys.path if path and Path(path).is_dir() and not path.startswith(installed)]
    paths = dict.fromkeys([_PROJECT_ROOT, *own, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))])
    return env | {"PYTHONPATH": os.pathsep.join(paths)}
