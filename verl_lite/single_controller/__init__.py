"""The single controller: one driver calls groups of workers as if they were local objects.

`register` marks a worker's methods and says how their arguments are dispatched; `create_worker_groups` makes the
workers, in Ray actors or in this process. Importing it needs no Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_lite.errors import WorkerDiedError
from verl_lite.registry import import_modules
from verl_lite.single_controller.decorator import (
    Dispatch,
    Execute,
    Mesh,
    PerRank,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)
from verl_lite.single_controller.local_worker_group import LocalService, LocalTransport
from verl_lite.single_controller.worker import Worker
from verl_lite.single_controller.worker_group import (
    ClassWithInitArgs,
    ResourcePool,
    ServiceHandle,
    Transport,
    WorkerGroup,
)

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "Mesh",
    "PerRank",
    "ResourcePool",
    "ServiceHandle",
    "Worker",
    "WorkerDiedError",
    "WorkerGroup",
    "create_worker_groups",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "start_service",
]


def create_worker_groups(
    backend: str,
    pool: ResourcePool,
    roles: dict[str, ClassWithInitArgs],
    *,
    modules: Sequence[str] = (),
    env: dict[str, str] | None = None,
    log_dir: str | Path | None = None,
    stall_timeout_s: float | None = None,
) -> dict[str, WorkerGroup]:
    """Worker groups whose roles share the slots of `pool`.

    Args:
        backend: "ray" (after `start_ray`) or "inline".
        roles: name -> class and constructor arguments; made in this order in each slot.
        modules: imported in each process before that, for what they register.
        env: environment variables of the worker processes, set before they import anything (ray only).
        log_dir: folder for what workers print, one file {role}-{rank}.log for each process (ray only).
        stall_timeout_s: a call that takes longer is a StalledError, and the workers are ended; None = no limit. Shortly
            before, each process writes the stacks of its threads to its log (ray only).

    Raises:
        What a constructor raised, first; WorkerDiedError if a process ended; ValueError for an unknown backend.
    """
    if _is_ray(backend):
        from verl_lite.single_controller.ray_worker_group import RayTransport

        transport: Transport = RayTransport(pool, roles, modules, env or {}, log_dir, stall_timeout_s)
    else:
        import_modules(modules)
        transport = LocalTransport(pool, roles)
    return {role: WorkerGroup(role, recipe.cls, transport) for role, recipe in roles.items()}


def start_service(
    backend: str,
    recipe: ClassWithInitArgs,
    *,
    env: dict[str, str] | None = None,
    log_dir: str | Path | None = None,
    max_concurrency: int = 1,
    stall_timeout_s: float | None = None,
) -> ServiceHandle:
    """One object in a process of its own (ray), or in this process (inline).

    Returns when its constructor has run, and raises what it raised. max_concurrency > 1 runs methods in threads (ray).
    stall_timeout_s: a call that takes longer is a StalledError (ray).
    """
    if not _is_ray(backend):
        return LocalService(recipe)
    from verl_lite.single_controller.ray_worker_group import start_ray_service

    return start_ray_service(recipe, env or {}, log_dir, max_concurrency, stall_timeout_s)


def _is_ray(backend: str) -> bool:
    if backend not in ("ray", "inline"):
        raise ValueError(f"trainer.backend={backend!r} is unknown; choose ray or inline")
    return backend == "ray"
