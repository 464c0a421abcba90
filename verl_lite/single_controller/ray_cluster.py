"""Ray as a guest: a private cluster for one run, of which nothing is left when the run ends (`guard.py`).

Its own folder, ports chosen by the system, no dashboard, no usage statistics, access by a random token. A cluster of
somebody else is joined only when its address is given, RAY_ADDRESS notwithstanding, and stays.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private.node import Node

from verl_lite.errors import ClusterLostError, NoRoomError, UserError
from verl_lite.machine.host import cpu_count
from verl_lite.single_controller import watcher
from verl_lite.single_controller.guard import Guard, current_guard, set_environment, start_guard, stop_guard
from verl_lite.single_controller.liveness import Address, Lookout, silence_of, silent_process

if TYPE_CHECKING:
    from verl_lite.config import RayInitConfig

# One for the life of the process, since Ray remembers the first; from the environment, so no file is written for it.
_AUTH_TOKEN = secrets.token_hex(32)
_PROJECT_ROOT = str(Path(__file__).resolve().parents[2])
_SMALLEST_STORE = 80 << 20  # Ray refuses less than 75 MiB
_STARTS = 3
_KEY = "ray_kwargs.ray_init.address="
_LOOK_S = 0.5

OF_BATCH_SYSTEMS = (signal.SIGTERM, signal.SIGHUP)

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Machine:
    """A node of the cluster. name: its address, and its host name where that tells more."""

    node_id: str
    name: str
    address: Address
    resources: dict[str, float]

    def has(self, bundle: dict[str, float]) -> bool:
        """True if it could hold this, were nothing else on it."""
        return all(self.resources.get(name, 0.0) + 1e-6 >= amount for name, amount in bundle.items())


def machines() -> list[Machine]:
    """The machines of the cluster that are alive: by what Ray knows, which may be late, and that answer."""
    known = []
    for entry in filter(lambda node: node["Alive"], ray.nodes()):
        ip, host = entry["NodeManagerAddress"], entry["NodeManagerHostname"]
        name = ip if host in ("", ip) else f"{ip} ({host})"
        known.append(Machine(entry["NodeID"], name, (ip, int(entry["NodeManagerPort"])), dict(entry["Resources"])))
    return [machine for machine in known if silence_of(machine.address) is None]


@dataclass
class Cluster:
    """The cluster that this process works in: its own, or one of somebody else that it has joined.

    address: None for its own. wait_s: how long to wait for machines. log: takes sentences. parts: the servers that this
    process depends on, by address.
    """

    address: str | None
    wait_s: float
    log: Callable[[str], None]
    parts: dict[Address, str] = field(default_factory=dict)
    lookout: Lookout = field(default_factory=Lookout)
    guard: Guard | None = None
    owns_guard: bool = False  # it was started for the cluster alone, and ends with it
    environment: dict[str, str | None] = field(default_factory=dict)  # what the variables we set were before

    @property
    def answers(self) -> bool:
        """True if Ray can be asked to do something: its calls wait for ever for a part that is gone or stopped."""
        return bool(self.parts) and all(silence_of(address) is None for address in self.parts)

    def look_at_parts(self) -> None:
        """Notes which servers this process depends on: the control store, and the raylet of this machine."""
        context = ray.get_runtime_context()
        host, port = context.gcs_address.rsplit(":", 1)
        store, here = (host, int(port)), context.get_node_id()
        [raylet] = [(x["NodeManagerAddress"], int(x["NodeManagerPort"])) for x in ray.nodes() if x["NodeID"] == here]
        self.parts = {store: "control store", raylet: "raylet on this machine"}
        self.lookout = Lookout(never_return=[raylet] if self.address else [store, raylet])


_cluster: Cluster | None = None


def joined_cluster() -> Cluster | None:
    """The cluster of somebody else that this process works in; None with one of its own, or none."""
    return None if _cluster is None or _cluster.address is None else _cluster


def cluster_answers() -> bool:
    """See `Cluster.answers`."""
    return ray.is_initialized() and (_cluster is None or _cluster.answers)


def ray_loss() -> str | None:
    """A sentence about the control store, or the raylet of this machine, if it is lost; to be called while waiting."""
    if (cluster := _cluster) is None:
        return None
    lost = cluster.lookout.lost(cluster.parts)
    if not lost or cluster is not _cluster:  # another thread has ended it meanwhile
        return None
    whose = "the run's own Ray" if cluster.address is None else f"the Ray cluster at {cluster.address}"
    return f"{whose} has lost its {cluster.parts[lost[0]]}: {silent_process(lost[0])}"


def require_ray() -> None:
    """Raises ClusterLostError if `ray_loss`. Ray itself would wait for ever, or end this process without a word."""
    if loss := ray_loss():
        again = "" if joined_cluster() is None else ", once the cluster is up"
        told = f"To go on from the last checkpoint: the same command with trainer.resume_mode=auto{again}"
        raise ClusterLostError(f"{loss}. {told}")


def call_ray(call: Callable[[], Answer]) -> Answer:
    """The answer of one of Ray's calls, made in a thread: with a stopped raylet it would wait for ever, deaf to
    signals. Raises ClusterLostError as `require_ray`."""
    require_ray()
    future = Future[Answer]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        while not wait([future], timeout=_LOOK_S).done:
            require_ray()
    except BaseException:
        wait([future], timeout=_LOOK_S)  # Ray must not be shut down within a call that still can end
        raise
    return future.result()


def process_of(actor: Any) -> tuple[Address, int]:
    """Where the process of a started actor listens, and its number on its machine."""
    found = call_ray(lambda: ray._private.state.actors(actor._actor_id.hex()))
    return (found["Address"]["IPAddress"], found["Address"]["Port"]), found["Pid"]


@contextmanager
def ray_running(
    ray_init: RayInitConfig, run_id: str, *, num_gpus: int | None = None, tell: Callable[[str], None] = print
) -> Iterator[None]:
    """Inside, Ray is up: the run's private cluster, or the one at `ray_init.address`. Where it was up before, it stays.

    run_id: namespace of the run. num_gpus: devices of a private cluster, the first of those that CUDA_VISIBLE_DEVICES
    names; None = those that Ray finds. tell: takes what is waited for in a joined cluster. Raises NoRoomError if nobody
    answers there within `ray_init.wait_for_nodes_s`, UserError if Ray refuses.
    """
    global _cluster
    if ray.is_initialized():
        yield
        return
    cluster = Cluster(ray_init.address, ray_init.wait_for_nodes_s, tell)
    try:
        with _signal_handlers_kept():
            if cluster.address is not None:
                require_answer(cluster.address, cluster.wait_s, cluster.log)
                try:  # below CRITICAL are Ray's own words about machines that leave, with the end of their logs
                    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
                    ray.init(address=cluster.address, namespace=run_id, **quiet)
                except (ConnectionError, RuntimeError, ValueError) as error:
                    raise UserError(
                        f"{_KEY}{cluster.address}: {error}\nThis machine must be one of the cluster's: `ray start "
                        f"--address={cluster.address} --num-cpus=0` makes it one without giving it work"
                    ) from error
            _cluster = cluster
            if cluster.address is None:
                _start_private(cluster, ray_init, run_id, num_gpus)
        cluster.look_at_parts()
        yield
    finally:
        stop_ray()


def _start_private(cluster: Cluster, ray_init: RayInitConfig, run_id: str, num_gpus: int | None) -> None:
    cluster.owns_guard = current_guard() is None
    cluster.guard = guard = current_guard() or start_guard()
    cluster.environment = set_environment(
        {
            watcher.CLUSTER_MARK: guard.token,
            "RAY_AUTH_MODE": None,  # Ray then turns it on itself; set from outside it would be read too early
            "RAY_AUTH_TOKEN": _AUTH_TOKEN,
            "RAY_AUTH_TOKEN_PATH": None,
            "RAY_ADDRESS": None,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_prestart_worker_first_driver": "0",  # a process per CPU; ours have variables of their own
            "RAY_task_events_report_interval_ms": "0",  # a history of calls for the dashboard: 3 MiB in 100 small steps
        }
    )
    with (
        _replaced(services, "ConsolePopen", _Daemon),
        _blocked_signals(),
        # else Ray takes the machine's address for a local one, and its daemons listen on all interfaces
        _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False),
        # daemons that nobody would ask: the autoscaler, the reader of logs, the dashboard, its agent's web server
        _replaced(Node, "start_monitor", _not_started),
        _replaced(Node, "start_log_monitor", _not_started),
        _replaced(Node, "start_api_server", _not_started),
        _replaced(ray_utils, "get_dashboard_dependency_error", lambda: ImportError("not wanted")),
    ):
        _init_patiently(
            guard,
            address="local",
            num_cpus=ray_init.num_cpus or cpu_count(),
            num_gpus=num_gpus,
            object_store_memory=object_store_bytes(ray_init.object_store_memory_mb << 20),
            log_to_driver=False,
            logging_level=logging.ERROR,  # below are remarks about the way we start it
            namespace=run_id,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(guard.folder / "ray"),
            object_spilling_directory=str(guard.temp),
        )
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
def _replaced(holder: ModuleType | type, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _not_started(node: Node, **options: Any) -> None:
    """In the place of a method that starts one of Ray's daemons."""


class _Daemon(services.ConsolePopen):
    """One of Ray's daemons, in a process group of its own: what a terminal that closes or `timeout` sends to the
    driver's group does not end it, nor the workers, before the driver has saved."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, process_group=0, **kwargs)

    def terminate(self) -> None:
        """Killed, since it does not hear SIGTERM; what it leaves `watcher.end` removes."""
        self.kill()


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Processes that are started inside do not hear the signals that batch systems (Slurm, LSF, PBS) send to every
    process of a job, nor do theirs: the driver ends them when it has saved."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_BATCH_SYSTEMS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    global _cluster
    cluster, _cluster = _cluster, None
    if cluster is None:
        return
    gone = bool(cluster.parts) and not cluster.answers
    if gone:  # Ray's own shutdown would wait for it with the interpreter's lock held
        atexit.unregister(ray.shutdown)
    if cluster.guard is not None:
        _end_processes(cluster.guard, gone)
        set_environment(cluster.environment)
        if cluster.owns_guard:
            stop_guard()
    elif not gone:
        ray.shutdown()


def _end_processes(guard: Guard, gone: bool = False) -> None:
    shared = watcher.shared_memory_of(watcher.marked_processes(watcher.CLUSTER_MARK, guard.token))
    if not gone:
        ray.shutdown()
    sessions = [str(path) for path in (guard.folder / "ray").glob("session_*")]
    watcher.end(watcher.CLUSTER_MARK, guard.token, sessions, shared=shared)


def worker_env(env: dict[str, str]) -> dict[str, str]:
    """`env` with a PYTHONPATH on which worker processes find what the driver finds, this project first."""
    installed = (sys.prefix, sys.base_prefix)
    own = [path for path in sys.path if path and Path(path).is_dir() and not path.startswith(installed)]
    paths = dict.fromkeys([_PROJECT_ROOT, *own, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))])
    return env | {"PYTHONPATH": os.pathsep.join(paths)}


def current_umask() -> int:
    """The umask of this process, for those that it starts."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def begin_process(umask: int, log_file: str | None) -> None:
    """At the start of a worker process: its files are made as the driver's, also where a joined cluster started it with
    another umask; all that it prints, C libraries included, is appended to `log_file`, if one is given."""
    os.umask(umask)
    if log_file is None:
        return
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def restore_log(log_file: str | None) -> None:
    """Opens the log of this process again if somebody has deleted the file."""
    if log_file is not None and not os.path.exists(log_file):
        with suppress(OSError):  # what is printed is not worth the run
            begin_process(current_umask(), log_file)


def require_answer(address: str, wait_s: float, log: Callable[[str], None]) -> None:
    """Raises NoRoomError if nobody answers at HOST:PORT within `wait_s`: Ray would try for many minutes."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not port.isdigit() or "//" in address:
        raise UserError(f"{_KEY}{address}: expected HOST:PORT, as `ray start --head` prints it")
    is_local = host in ("localhost", "127.0.0.1", "::1")
    asked = (ray.util.get_node_ip_address() if is_local else host, int(port))  # as Ray reads it
    begun, said = time.monotonic(), False
    while silence_of(asked) is not None:
        if time.monotonic() - begun >= wait_s:
            raise NoRoomError(
                f"{_KEY}{address}: nobody has answered at {asked[0]}:{port} for {wait_s:g} s. Start a cluster with "
                "`ray start --head`, and give the address that it prints"
            )
        if not said:
            log(f"nobody answers at {asked[0]}:{port}; waiting up to {wait_s:g} s (ray_init.wait_for_nodes_s)")
        said = True
        time.sleep(min(1.0, wait_s))
