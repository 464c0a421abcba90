"""Starts a private Ray cluster for one run, or joins an existing cluster, and watches that it stays alive.

The private cluster has a separate folder, ports chosen by the system, no dashboard, no usage statistics and access by a
random token; nothing of it remains when the run ends (`guard.py`). An existing cluster is joined only if the
configuration has its address (RAY_ADDRESS is ignored), and it keeps running.
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
from typing import TYPE_CHECKING, TypeVar

import ray
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private.node import Node

from verl_lite.errors import ClusterLostError, NoRoomError, UserError
from verl_lite.machine.host import cpu_count
from verl_lite.machine.process_table import marked_processes
from verl_lite.single_controller import watcher
from verl_lite.single_controller.guard import Guard, current_guard, set_environment, start_guard, stop_guard
from verl_lite.single_controller.liveness import Address, Lookout, silence_of, silent_process

if TYPE_CHECKING:
    from verl_lite.config import RayInitConfig

# One token for the life of the process, because Ray remembers the first. Ray reads it from the environment, so no file
# is written for it.
_AUTH_TOKEN = secrets.token_hex(32)
_PROJECT_ROOT = str(Path(__file__).resolve().parents[2])
_SMALLEST_STORE = 80 << 20  # Ray rejects less than 75 MiB
_STARTS = 3
_KEY = "ray_kwargs.ray_init.address="
_POLL_S = 0.5

BATCH_SYSTEM_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Machine:
    """A node of the cluster.

    Attributes:
        node_id: Ray's id.
        name: its IP address, and its host name if that is different.
        address: address of its raylet.
        resources: its total resources, used ones included.
    """

    node_id: str
    name: str
    address: Address
    resources: dict[str, float]

    def has(self, bundle: dict[str, float]) -> bool:
        """Returns True if the machine's total resources (used ones included) suffice for `bundle`."""
        for name, amount in bundle.items():
            total = self.resources.get(name, 0.0)
            # fractions of cores add up with rounding errors
            if total + 1e-6 < amount:
                return False
        return True


def machines() -> list[Machine]:
    """Returns the machines of the cluster that answer. Ray itself may notice the loss of a machine late."""
    answering = []
    for node in ray.nodes():
        ip = node["NodeManagerAddress"]
        address = (ip, int(node["NodeManagerPort"]))
        if not node["Alive"] or silence_of(address) is not None:
            continue
        host = node["NodeManagerHostname"]
        name = ip if host in ("", ip) else f"{ip} ({host})"
        answering.append(Machine(node["NodeID"], name, address, dict(node["Resources"])))
    return answering


@dataclass
class Cluster:
    """The cluster of this process: a private one, or an existing one that it has joined.

    Attributes:
        address: address of the joined cluster; None for a private one.
        wait_s: time to wait for machines, in seconds.
        log: function that prints a sentence.
        parts: names of the servers that this process depends on, by address.
        lookout: detects whether `parts` still answer.
        guard: the run's guard (private clusters only).
        owns_guard: True if the guard was started for the cluster and ends with it.
        environment: previous values of the environment variables that were set for the cluster.
    """

    address: str | None
    wait_s: float
    log: Callable[[str], None]
    parts: dict[Address, str] = field(default_factory=dict)
    lookout: Lookout = field(default_factory=Lookout)
    guard: Guard | None = None
    owns_guard: bool = False
    environment: dict[str, str | None] = field(default_factory=dict)

    @property
    def answers(self) -> bool:
        """True if all parts answer. Otherwise calls of Ray would wait forever for the lost or stopped part."""
        return bool(self.parts) and all(silence_of(address) is None for address in self.parts)

    def look_at_parts(self) -> None:
        """Records the servers that this process depends on: the control store and the raylet of this machine."""
        context = ray.get_runtime_context()
        host, _, port = context.gcs_address.rpartition(":")
        store = (host, int(port))
        own_id = context.get_node_id()
        [own_node] = [node for node in ray.nodes() if node["NodeID"] == own_id]
        raylet = (own_node["NodeManagerAddress"], int(own_node["NodeManagerPort"]))
        self.parts = {
            store: "control store",
            raylet: "raylet on this machine",
        }
        # the control store of a joined cluster may be restarted; nobody restarts the servers of a private one
        never_return = [raylet] if self.address else [store, raylet]
        self.lookout = Lookout(never_return)


_cluster: Cluster | None = None


def joined_cluster() -> Cluster | None:
    """Returns the existing cluster that this process has joined; None with a private cluster or without any."""
    if _cluster is None or _cluster.address is None:
        return None
    return _cluster


def cluster_answers() -> bool:
    """Returns True if Ray runs and all servers that this process depends on answer, see `Cluster.answers`."""
    return ray.is_initialized() and (_cluster is None or _cluster.answers)


def ray_loss() -> str | None:
    """Returns a sentence if the control store or this machine's raylet is lost, else None. Call this while waiting."""
    cluster = _cluster
    if cluster is None:
        return None
    # the look can take seconds
    lost = cluster.lookout.lost(cluster.parts)
    # another thread may have ended the cluster in the meantime
    if not lost or cluster is not _cluster:
        return None
    whose = "the run's own Ray" if cluster.address is None else f"the Ray cluster at {cluster.address}"
    part = lost[0]
    return f"{whose} has lost its {cluster.parts[part]}: {silent_process(part)}"


def require_ray() -> None:
    """Raises ClusterLostError if a part of Ray is lost. Ray itself would wait forever or silently end this process."""
    loss = ray_loss()
    if loss is None:
        return
    condition = "" if joined_cluster() is None else " once the cluster is up"
    raise ClusterLostError(
        f"{loss}. To continue from the last checkpoint, run the same command with trainer.resume_mode=auto{condition}"
    )


def call_ray(call: Callable[[], Answer]) -> Answer:
    """Runs a call of Ray in a thread and returns its result. Raises ClusterLostError as `require_ray` does."""
    # in this thread, the call would wait forever for a stopped raylet and block signal handlers
    require_ray()
    future = Future[Answer]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        while not wait([future], timeout=_POLL_S).done:
            require_ray()
    except BaseException:
        # a shutdown of Ray must not interrupt a call that can still finish
        wait([future], timeout=_POLL_S)
        raise
    return future.result()


def process_of(actor: ray.actor.ActorHandle) -> tuple[Address, int]:
    """Returns the address at which the process of a started actor listens, and its process id."""
    actor_id = actor._actor_id.hex()
    # the public calls of `ray.util.state` need the dashboard, which a private cluster does not have
    state = call_ray(lambda: ray._private.state.actors(actor_id))
    host = state["Address"]["IPAddress"]
    port = state["Address"]["Port"]
    return (host, port), state["Pid"]


@contextmanager
def ray_running(
    ray_init: RayInitConfig, run_id: str, *, num_gpus: int | None = None, tell: Callable[[str], None] = print
) -> Iterator[None]:
    """Starts a private cluster, or joins the one at `ray_init.address`, and leaves it at the end of the context.

    Does nothing if Ray is already initialised in this process.

    Args:
        ray_init: section ray_kwargs.ray_init of the configuration.
        run_id: Ray namespace of the run.
        num_gpus: number of GPUs of a private cluster, the first in CUDA_VISIBLE_DEVICES; None = all that Ray finds.
        tell: prints a sentence about the machines that the run waits for in a joined cluster.

    Raises:
        NoRoomError: no server answers at the address within `ray_init.wait_for_nodes_s`.
        UserError: Ray rejects the connection.
    """
    global _cluster
    if ray.is_initialized():
        yield
        return
    cluster = Cluster(ray_init.address, ray_init.wait_for_nodes_s, tell)
    try:
        with _sigterm_handler_restored():
            if cluster.address is not None:
                _join(cluster, cluster.address, run_id)
                _cluster = cluster
            else:
                # set first, so that `stop_ray` removes the processes of a start that fails
                _cluster = cluster
                _start_private(cluster, ray_init, run_id, num_gpus)
        cluster.look_at_parts()
        yield
    finally:
        stop_ray()


def _join(cluster: Cluster, address: str, run_id: str) -> None:
    """Connects this process to an existing cluster; see `ray_running`."""
    require_answer(address, cluster.wait_s, cluster.log)
    try:
        ray.init(
            address=address,
            namespace=run_id,
            log_to_driver=False,
            # at lower levels, Ray logs machines that leave, with the end of their logs
            logging_level=logging.CRITICAL,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{_KEY}{address}: {error}\nThis machine must belong to the cluster. `ray start "
            f"--address={address} --num-cpus=0` adds it without giving it work"
        ) from error


def _start_private(cluster: Cluster, ray_init: RayInitConfig, run_id: str, num_gpus: int | None) -> None:
    """Starts the private cluster of this process, whose daemons and workers carry the mark of the run's guard."""
    guard = current_guard()
    cluster.owns_guard = guard is None
    if guard is None:
        guard = start_guard()
    cluster.guard = guard
    cluster.environment = set_environment(
        {
            watcher.CLUSTER_MARK: guard.token,
            # without a mode, `ray.init` turns authentication on and reads its settings again; with one, it keeps them
            "RAY_AUTH_MODE": None,
            "RAY_AUTH_TOKEN": _AUTH_TOKEN,
            "RAY_AUTH_TOKEN_PATH": None,
            "RAY_ADDRESS": None,
            "RAY_USAGE_STATS_ENABLED": "0",
            # with 1, which the environment may have, Ray empties CUDA_VISIBLE_DEVICES of workers that request no GPU
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # would start one process per CPU, without our variables
            "RAY_prestart_worker_first_driver": "0",
            # no call history for the dashboard: 3 MiB in 100 small steps
            "RAY_task_events_report_interval_ms": "0",
        }
    )
    with (
        # signals to the driver's process group or job must not end the daemons before a checkpoint is saved
        _replaced(services, "ConsolePopen", _Daemon),
        _blocked_signals(),
        # otherwise Ray replaces a local address by that of the machine, and its daemons listen on all interfaces
        _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False),
        # unused daemons: the autoscaler, the log monitor, the dashboard and the web server of its agent
        _replaced(Node, "start_monitor", _not_started),
        _replaced(Node, "start_log_monitor", _not_started),
        _replaced(Node, "start_api_server", _not_started),
        _replaced(ray_utils, "get_dashboard_dependency_error", lambda: ImportError("not wanted")),
    ):
        _init_with_retries(
            guard,
            address="local",
            num_cpus=ray_init.num_cpus or cpu_count(),
            num_gpus=num_gpus,
            object_store_memory=object_store_bytes(ray_init.object_store_memory_mb << 20),
            log_to_driver=False,
            # at lower levels, Ray comments on the options of this call
            logging_level=logging.ERROR,
            namespace=run_id,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(guard.folder / "ray"),
            object_spilling_directory=str(guard.temp),
        )
    # later processes of the driver do not belong to the cluster
    del os.environ[watcher.CLUSTER_MARK]


def _init_with_retries(guard: Guard, **options: object) -> None:
    """Calls `ray.init` until it succeeds, at most _STARTS times; then raises RuntimeError."""
    # on a busy machine, Ray gives up after 30 s, and no option changes that limit
    for _ in range(_STARTS):
        try:
            ray.init(**options)
            return
        except Exception as error:
            # Ray raises the timeout as a plain Exception
            if "timed out during startup" not in str(error):
                raise
            _end_processes(guard)
    raise RuntimeError(
        f"Ray did not start within 30 s in {_STARTS} attempts; this machine may be overloaded (load {os.getloadavg()})"
    )


def object_store_bytes(requested: int, shared_memory: Path = Path("/dev/shm")) -> int:
    """Returns the size of the object store: `requested` bytes, or fewer to leave half of the free shared memory unused.

    NCCL and other jobs on the machine need the other half. Ray writes objects that do not fit to disk. If the shared
    memory is too small even for the smallest store, Ray places the store in a file in TMPDIR.
    """
    free = 0
    if shared_memory.is_dir():
        free = shutil.disk_usage(shared_memory).free
    return min(requested, max(_SMALLEST_STORE, free // 2))


@contextmanager
def _replaced(holder: ModuleType | type, name: str, value: object) -> Iterator[None]:
    """Replaces an attribute of a module or a class inside the context."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _not_started(node: Node, **options: object) -> None:
    """Replaces a method that starts a daemon of Ray, and does nothing."""


class _Daemon(services.ConsolePopen):
    """A daemon of Ray in a separate process group.

    Signals that a closing terminal or `timeout` sends to the driver's group therefore do not end the daemon or its
    workers before the driver has saved a checkpoint.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, process_group=0, **kwargs)

    def terminate(self) -> None:
        """Kills the daemon, because it blocks SIGTERM. `watcher.end` removes its files."""
        self.kill()


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Blocks the signals of batch systems in all processes that start inside the context, and in their children.

    Batch systems (Slurm, LSF, PBS) send these signals to all processes of a job. The driver ends its processes itself
    after it has saved a checkpoint.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BATCH_SYSTEM_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _sigterm_handler_restored() -> Iterator[None]:
    """Restores the SIGTERM handler at the end of the context. Ray replaces it with a handler of its own."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def stop_ray() -> None:
    """Ends the run's private cluster and removes its files; leaves a joined cluster. A second call does nothing."""
    global _cluster
    cluster = _cluster
    if cluster is None:
        return
    _cluster = None
    is_lost = bool(cluster.parts) and not cluster.answers
    # Ray's own shutdown would wait for the lost part and hold the interpreter's lock
    if is_lost:
        atexit.unregister(ray.shutdown)
    if cluster.guard is not None:
        _end_processes(cluster.guard, is_lost)
        set_environment(cluster.environment)
        if cluster.owns_guard:
            stop_guard()
    elif not is_lost:
        ray.shutdown()


def _end_processes(guard: Guard, is_lost: bool = False) -> None:
    """Ends all processes of a private cluster and removes their files.

    Args:
        guard: the run's guard.
        is_lost: True if a part of Ray no longer answers; Ray's own shutdown would then not return.
    """
    # before the shutdown, because the mappings of an ended process cannot be read
    pids = marked_processes(watcher.CLUSTER_MARK, guard.token)
    shared_memory = watcher.shared_memory_of(pids)
    if not is_lost:
        ray.shutdown()
    ray_folder = guard.folder / "ray"
    sessions = [str(session) for session in ray_folder.glob("session_*")]
    watcher.end(watcher.CLUSTER_MARK, guard.token, sessions, shared_memory=shared_memory)


def worker_env(env: dict[str, str]) -> dict[str, str]:
    """Returns `env` with a PYTHONPATH that makes workers import the driver's modules, this project's first."""
    prefixes_of_python = (sys.prefix, sys.base_prefix)
    folders = [_PROJECT_ROOT]
    for folder in sys.path:
        # the workers' own interpreter adds the folders of Python
        if folder and Path(folder).is_dir() and not folder.startswith(prefixes_of_python):
            folders.append(folder)
    for folder in env.get("PYTHONPATH", "").split(os.pathsep):
        if folder:
            folders.append(folder)
    unique_folders = dict.fromkeys(folders)
    return env | {"PYTHONPATH": os.pathsep.join(unique_folders)}


def worker_runtime(env: dict[str, str]) -> dict[str, object]:
    """Returns Ray's `runtime_env` of a worker that is forked from the run's template if it has one for `env`."""
    runtime: dict[str, object] = {"env_vars": worker_env(env)}
    guard = current_guard()
    if guard is not None and joined_cluster() is None:
        interpreter = guard.interpreter(env)
        if interpreter is not None:
            runtime["py_executable"] = interpreter
    return runtime


def current_umask() -> int:
    """Returns the umask of this process."""
    # only a call that sets it returns it; a strict one, in case another thread creates a file meanwhile
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def begin_process(umask: int, log_file: str | None) -> None:
    """Sets up a starting worker process: umask as in the driver, and output appended to `log_file` if it is not None.

    A joined cluster may start workers with another umask. The redirection includes the output of C libraries.
    """
    os.umask(umask)
    if log_file is None:
        return
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # appended, because a run that continues has the same log files
    target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
    # line by line, so that the log is complete if the process is killed
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def restore_log(log_file: str | None) -> None:
    """Opens the log file of this process again if it was deleted."""
    if log_file is not None and not os.path.exists(log_file):
        # a missing log is no reason to fail the run
        with suppress(OSError):
            begin_process(current_umask(), log_file)


def require_answer(address: str, wait_s: float, log: Callable[[str], None]) -> None:
    """Raises NoRoomError if no server answers at HOST:PORT within `wait_s` seconds. Ray would try for many minutes."""
    # Ray then looks for the cluster of this machine itself
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "//" in address:
        raise UserError(f"{_KEY}{address}: expected HOST:PORT, as `ray start --head` prints it")
    if host in ("localhost", "127.0.0.1", "::1"):
        # Ray resolves local addresses like this
        host = ray.util.get_node_ip_address()

    start_time = time.monotonic()
    is_logged = False
    while silence_of((host, int(port))) is not None:
        if time.monotonic() - start_time >= wait_s:
            raise NoRoomError(
                f"{_KEY}{address}: nobody has answered at {host}:{port} for {wait_s:g} s. Start a cluster with "
                "`ray start --head` and set the key to the address that it prints"
            )
        if not is_logged:
            log(f"nobody answers at {host}:{port}; waiting up to {wait_s:g} s (ray_init.wait_for_nodes_s)")
            is_logged = True
        time.sleep(min(1.0, wait_s))
