"""Where workers and services start: one process per slot with all roles (ray), or all of it in this process (inline).

Both return when every constructor has run; the first error in any of them is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_lite.registry import import_modules
from verl_lite.single_controller.local_worker_group import LocalService, LocalTransport
from verl_lite.single_controller.resource_pool import ResourcePool
from verl_lite.single_controller.worker_group import ClassWithInitArgs, ServiceHandle, Transport, WorkerGroup

BACKENDS = ("ray", "inline")


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
    if not roles:
        raise ValueError("create_worker_groups needs at least one role")
    if backend == "inline":
        import_modules(modules)
        transport: Transport = LocalTransport(pool, roles)
    elif backend == "ray":
        from verl_lite.single_controller.ray_worker_group import RayTransport

        transport = RayTransport(
            pool, roles, modules=modules, env=env or {}, log_dir=log_dir, stall_timeout_s=stall_timeout_s
        )
    else:
        raise ValueError(f"trainer.backend={backend!r} is unknown; choose one of {BACKENDS}")
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
    if backend == "inline":
        return LocalService(recipe)
    if backend == "ray":
        from verl_lite.single_controller.ray_service import start_ray_service

        return start_ray_service(
            recipe,
            env=env or {},
            log_dir=log_dir,
            max_concurrency=max_concurrency,
            stall_timeout_s=stall_timeout_s,
        )
    raise ValueError(f"trainer.backend={backend!r} is unknown; choose one of {BACKENDS}")
