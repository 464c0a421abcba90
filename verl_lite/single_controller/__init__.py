"""The single controller: one driver calls groups of workers as if they were local objects.

`@register` (`decorator.py`) marks a worker's methods and says how their arguments are dispatched;
`create_worker_groups` makes the workers, in Ray actors or in this process. Importing it takes neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl_lite.registry import import_modules
from verl_lite.single_controller.resource_pool import ClassWithInitArgs, LocalService, ResourcePool, ServiceHandle

if TYPE_CHECKING:
    from verl_lite.single_controller.worker_group import WorkerGroup


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
        backend: "ray" (inside `ray_running`) or "inline".
        roles: name -> class and constructor arguments; made in this order in each slot.
        modules: imported in each process before that, for what they register.
        env: environment variables of the worker processes, set before they import anything (ray only).
        log_dir: folder for what workers print, one file {role}-{rank}.log for each process (ray only).
        stall_timeout_s: a call that takes longer is a StalledError, and the workers are ended; None = no limit. Shortly
            before, each process writes the stacks of its threads to its log (ray only).

    Raises:
        What a constructor raised, first; WorkerDiedError if a process ended; ValueError for an unknown backend.
    """
    from verl_lite.single_controller.worker_group import LocalTransport, Transport, WorkerGroup

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
    from verl_lite.single_controller.ray_service import RayService

    return RayService(recipe, env or {}, log_dir, max_concurrency, stall_timeout_s)


def _is_ray(backend: str) -> bool:
    if backend not in ("ray", "inline"):
        raise ValueError(f"trainer.backend={backend!r} is unknown; choose ray or inline")
    return backend == "ray"
