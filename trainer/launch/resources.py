"""Acquires the resources of a run: devices (see `verl_lite.machine.gpus`), Ray and worker groups. All are released at
the end of the run."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trainer.cli import MOST_DEFAULT_CPU_SLOTS, worker_environment
from verl_lite.config import PPOConfig, RolloutConfig, RunOptions
from verl_lite.config.pools import rollout_devices
from verl_lite.errors import UserError
from verl_lite.machine.device import cpu_count, device_type, visible_devices
from verl_lite.machine.gpus import ResourceRequest, reserve_gpus
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups
from verl_lite.single_controller.guard import preload
from verl_lite.single_controller.worker_group import WorkerGroup
from workers.engines.base import resolve_engine_name


def resolve_slots(config: RunOptions) -> int:
    """Sets trainer.n_gpus_per_node if it is null, and returns the number of slots of the run over all machines."""
    trainer = config.trainer
    if trainer.n_gpus_per_node is None:
        trainer.n_gpus_per_node = _default_slots(config)
    return trainer.n_gpus_per_node * trainer.nnodes


def _default_slots(config: RunOptions) -> int:
    """Returns the number of devices of this machine that the trainer uses if the options do not say it."""
    # raises for a device that does not exist, with every backend
    kind = device_type(config.trainer.device)
    # the inline backend runs all ranks in this process
    if config.trainer.backend == "inline":
        return 1
    num_devices = visible_devices(kind)
    if kind == "cpu":
        num_devices = min(MOST_DEFAULT_CPU_SLOTS, num_devices)
    # engines of a separate pool take theirs first
    return max(1, num_devices - engine_devices(config, 0))


def engine_devices(config: RunOptions, slots: int) -> int:
    """Returns the number of devices of this machine with rollout engines of a separate pool.

    The trainer's devices are not among them.

    Args:
        config: the options of the run.
        slots: devices of the trainer, as many as the engines have by default.
    """
    if not isinstance(config, PPOConfig) or config.hybrid_engine:
        return 0
    # in a joined cluster, Ray places the engines on devices of any machine
    if config.ray_kwargs.ray_init.address is not None:
        return 0
    return rollout_devices(config, slots)


@contextmanager
def reserved_devices(config: RunOptions, request: ResourceRequest, log: Callable[[str], None]) -> Iterator[None]:
    """In this context the run's devices are reserved for it, or shared as the options allow.

    Args:
        config: the options of the run.
        request: the devices of one machine.
        log: shows notes to the user.

    Raises:
        UserError: the devices are not available.
    """
    uses_gpus = device_type(config.trainer.device) == "cuda"
    # in an existing Ray cluster, Ray assigns the devices and the workers reserve them
    if not uses_gpus or config.ray_kwargs.ray_init.address is not None:
        yield
        return
    with reserve_gpus(request, log):
        yield


def join_ray(config: RunOptions, name: str, tell: Callable[[str], None], stack: ExitStack) -> None:
    """With trainer.backend=ray, starts Ray for this run or joins the cluster in ray_kwargs.ray_init.address."""
    trainer = config.trainer
    if trainer.backend != "ray":
        return
    from verl_lite.single_controller.ray_cluster import ray_running

    num_gpus = 0
    if device_type(trainer.device) == "cuda":
        slots = trainer.n_gpus_per_node or 0
        num_gpus = slots + engine_devices(config, slots)
    cluster = ray_running(config.ray_kwargs.ray_init, name, num_gpus=num_gpus, tell=tell)
    stack.enter_context(cluster)


def start_workers(
    config: RunOptions,
    roles: dict[str, ClassWithInitArgs],
    modules: Sequence[str],
    log_dir: Path,
    stack: ExitStack,
) -> dict[str, WorkerGroup]:
    """Starts the worker groups and builds their models.

    Args:
        config: the options of the run.
        roles: the worker of each role, in the order in which they build their models.
        modules: modules that each process imports first.
        log_dir: folder of the workers' logs.
        stack: shuts the worker groups down.
    """
    trainer = config.trainer
    slots = trainer.n_gpus_per_node
    assert slots is not None
    groups = create_groups(config, [slots] * trainer.nnodes, roles, modules, log_dir)
    for group in groups.values():
        stack.callback(group.shutdown)
    if config.ray_kwargs.ray_init.address is not None:
        # all groups share the processes of the first one
        first_group = next(iter(groups.values()))
        require_shared_folder(first_group, log_dir.parent)
    for group in groups.values():
        group.init_model()
    return groups


def create_groups(
    config: RunOptions, processes: list[int], roles: dict[str, ClassWithInitArgs], modules: Sequence[str], log_dir: Path
) -> dict[str, WorkerGroup]:
    """Creates worker groups; see `create_worker_groups`. processes: number of processes on each machine."""
    trainer = config.trainer
    on_cpu = device_type(trainer.device) == "cpu"
    slots = trainer.n_gpus_per_node or 1
    slots += engine_devices(config, slots)
    # the processes share the cores of the machine
    threads = max(1, cpu_count() // slots)
    env = worker_environment(on_cpu, threads, sleeps=_has_sleeping_engine(config))
    # before the processes start: each is then forked with the modules of its classes
    modules_of_roles = [recipe.cls.__module__ for recipe in roles.values()]
    preload(*dict.fromkeys(modules_of_roles))
    return create_worker_groups(
        trainer.backend,
        ResourcePool(processes, use_gpu=not on_cpu),
        roles,
        modules=modules,
        env=env,
        log_dir=log_dir,
        stall_timeout_s=trainer.stall_timeout_s,
    )


def _has_sleeping_engine(config: RunOptions) -> bool:
    """Returns True if vLLM releases its memory while the trainer uses the same device."""
    rollout = getattr(config, "rollout", None)
    if not isinstance(rollout, RolloutConfig) or resolve_engine_name(rollout.name) != "vllm":
        return False
    return rollout.free_cache_engine and bool(getattr(config, "hybrid_engine", True))


def require_shared_folder(group: WorkerGroup, run_dir: Path) -> None:
    """Raises UserError if a machine of the group cannot access the run folder.

    Each rank writes its part of a checkpoint there.
    """
    with tempfile.NamedTemporaryFile(prefix=".seen_by_all_", dir=run_dir) as file:
        hosts_of_ranks = group.execute_all_sync("host_missing_path", file.name)
    hosts = sorted({name for name in hosts_of_ranks if name is not None})
    if hosts:
        raise UserError(
            f"trainer.default_local_dir={run_dir} is not the same folder on {', '.join(hosts)} as on the driver's "
            "machine. All machines must share it, because each rank writes its part of a checkpoint there: use a "
            "folder on a file system that all machines mount under this path (NFS, Lustre)"
        )
