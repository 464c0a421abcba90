"""Acquires the resources of a run: devices (see `verl_lite.machine.gpus`), Ray and worker groups. All are released at
the end of the run."""

import sys
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

_groups: list[WorkerGroup] = []


def resolve_slots(config: RunOptions) -> int:
    """Sets trainer.n_gpus_per_node if it is null, and returns the number of slots of the run over all machines."""
    trainer = config.trainer
    if trainer.n_gpus_per_node is None:
        kind = device_type(trainer.device)
        most = MOST_DEFAULT_CPU_SLOTS if kind == "cpu" else sys.maxsize
        here = min(most, visible_devices(kind)) - engine_devices(config, 0)
        trainer.n_gpus_per_node = 1 if trainer.backend == "inline" else max(1, here)
    return trainer.n_gpus_per_node * trainer.nnodes


def engine_devices(config: RunOptions, slots: int) -> int:
    """Returns the number of devices of this machine with rollout engines of a separate pool. Such devices are in
    addition to those of the trainer. slots: devices of the trainer, as many as the engines have by default."""
    is_here = isinstance(config, PPOConfig) and not config.hybrid_engine and config.ray_kwargs.ray_init.address is None
    return rollout_devices(config, slots) if is_here and isinstance(config, PPOConfig) else 0


@contextmanager
def reserved_devices(config: RunOptions, request: ResourceRequest, log: Callable[[str], None]) -> Iterator[None]:
    """In this context the run's devices are reserved for it, or shared as the options allow. If the run joins an
    existing Ray cluster, Ray assigns the devices and the workers reserve them.

    request: the devices of one machine. log: function that shows notes to the user. Raises UserError if the devices
    are not available.
    """
    if device_type(config.trainer.device) == "cuda" and config.ray_kwargs.ray_init.address is None:
        with reserve_gpus(request, log):
            yield
    else:
        yield


def join_ray(config: RunOptions, name: str, tell: Callable[[str], None], stack: ExitStack) -> None:
    """With trainer.backend=ray, starts Ray for this run or joins the cluster in ray_kwargs.ray_init.address."""
    trainer = config.trainer
    if trainer.backend != "ray":
        return
    from verl_lite.single_controller.ray_cluster import ray_running

    slots = trainer.n_gpus_per_node or 0
    num_gpus = slots + engine_devices(config, slots) if device_type(trainer.device) == "cuda" else 0
    stack.enter_context(ray_running(config.ray_kwargs.ray_init, name, num_gpus=num_gpus, tell=tell))


def start_workers(
    config: RunOptions,
    roles: dict[str, ClassWithInitArgs],
    modules: Sequence[str],
    log_dir: Path,
    stack: ExitStack,
) -> dict[str, WorkerGroup]:
    """Starts the worker groups and builds their models. `stack` shuts them down. modules: modules that each process
    imports first."""
    trainer = config.trainer
    slots = trainer.n_gpus_per_node
    assert slots is not None
    groups = create_groups(config, [slots] * trainer.nnodes, roles, modules, log_dir)
    for group in groups.values():
        stack.callback(group.shutdown)
    if config.ray_kwargs.ray_init.address is not None:
        require_shared_folder(next(iter(groups.values())), log_dir.parent)
    for group in groups.values():
        group.init_model()
    _groups.extend(groups.values())
    stack.callback(_groups.clear)
    return groups


def create_groups(
    config: RunOptions, processes: list[int], roles: dict[str, ClassWithInitArgs], modules: Sequence[str], log_dir: Path
) -> dict[str, WorkerGroup]:
    """Creates worker groups. processes: number of processes on each machine. See `create_worker_groups`."""
    trainer, rollout = config.trainer, getattr(config, "rollout", None)
    on_cpu = device_type(trainer.device) == "cpu"
    sleeps = (
        isinstance(rollout, RolloutConfig) and resolve_engine_name(rollout.name) == "vllm" and rollout.free_cache_engine
    ) and getattr(config, "hybrid_engine", True)
    slots = trainer.n_gpus_per_node or 1
    slots += engine_devices(config, slots)
    preload(*{recipe.cls.__module__: None for recipe in roles.values()})
    return create_worker_groups(
        trainer.backend,
        ResourcePool(processes, use_gpu=not on_cpu),
        roles,
        modules=modules,
        env=worker_environment(on_cpu, max(1, cpu_count() // slots), sleeps=sleeps),
        log_dir=log_dir,
        stall_timeout_s=trainer.stall_timeout_s,
    )


def require_shared_folder(group: WorkerGroup, run_dir: Path) -> None:
    """Raises UserError if a machine of the group cannot access the run folder, where each rank writes its part of a
    checkpoint."""
    with tempfile.NamedTemporaryFile(prefix=".seen_by_all_", dir=run_dir) as file:
        blind = sorted({name for name in group.execute_all_sync("host_missing_path", file.name) if name is not None})
    if blind:
        raise UserError(
            f"trainer.default_local_dir={run_dir} is not the same folder on {', '.join(blind)} as on the driver's "
            "machine. All machines must share it, because each rank writes its part of a checkpoint there: use a "
            "folder on a file system that all machines mount under this path (NFS, Lustre)"
        )
