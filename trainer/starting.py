"""Starts Ray and the worker groups of a run, whatever these train; both end with the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from trainer.environment import worker_environment
from verl_lite.config import RunOptions
from verl_lite.device import cpu_count, device_type
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups
from verl_lite.single_controller.worker_group import WorkerGroup


def join_ray(config: RunOptions, name: str, tell: Callable[[str], None], stack: ExitStack) -> None:
    """Starts the run's own Ray, or joins the one that the options name, where trainer.backend=ray."""
    trainer = config.trainer
    if trainer.backend != "ray":
        return
    from verl_lite.single_controller.ray_cluster import ray_running

    num_gpus = (trainer.n_gpus_per_node or 0) if device_type(trainer.device) == "cuda" else 0
    stack.enter_context(ray_running(config.ray_kwargs.ray_init, name, num_gpus=num_gpus, tell=tell))


def start_workers(
    config: RunOptions,
    roles: dict[str, ClassWithInitArgs],
    modules: Sequence[str],
    log_dir: Path,
    stack: ExitStack,
) -> dict[str, WorkerGroup]:
    """The worker groups, with their models built; they end with `stack`. modules: what each process imports first."""
    trainer = config.trainer
    slots = trainer.n_gpus_per_node
    assert slots is not None
    on_cpu = device_type(trainer.device) == "cpu"
    groups = create_worker_groups(
        trainer.backend,
        ResourcePool([slots] * trainer.nnodes, use_gpu=not on_cpu),
        roles,
        modules=modules,
        env=worker_environment(on_cpu, max(1, cpu_count() // slots)),
        log_dir=log_dir,
        stall_timeout_s=trainer.stall_timeout_s,
    )
    for group in groups.values():
        stack.callback(group.shutdown)
    for group in groups.values():
        group.init_model()
    return groups
