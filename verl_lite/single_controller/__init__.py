"""The single controller: one driver calls groups of workers as if they were local objects.

`@register` (`decorator.py`) marks a worker's methods and declares how their arguments are dispatched;
`create_worker_groups` creates the workers in Ray actors or in this process. Importing this package imports neither
torch nor Ray.
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
    """Creates one worker group per role. All roles share the slots of `pool`.

    Args:
        backend: "ray" (inside `ray_running`) or "inline".
        roles: name -> class and constructor arguments. Each slot constructs them in this order.
        modules: modules to import in each process first, because they register classes or functions.
        env: environment variables of the worker processes, set before they import anything (ray only).
        log_dir: folder of the workers' output, one file {role}-{rank}.log per process (ray only).
        stall_timeout_s: time limit of a call, in seconds; None = no limit. Shortly before the limit, each process
            writes the stacks of its threads to its log. Then the workers are ended and StalledError is raised (ray
            only).

    Raises:
        Exception: the first exception of a constructor.
        WorkerDiedError: a process ended.
        ValueError: the backend is unknown.
    """
    # here, because importing this package imports neither torch nor Ray
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
    """Constructs one object in a separate process (ray) or in this process (inline) and returns its handle.

    Waits for the constructor and raises its exception.

    Args:
        backend: "ray" (inside `ray_running`) or "inline".
        recipe: class and constructor arguments.
        env: environment variables of the process, set before it imports anything (ray only).
        log_dir: folder of its output, in the file {class}.log (ray only).
        max_concurrency: number of methods that can run at the same time, in threads (ray only).
        stall_timeout_s: time limit of a call in seconds; a longer call raises StalledError (ray only).
    """
    if not _is_ray(backend):
        return LocalService(recipe)
    from verl_lite.single_controller.ray_service import RayService

    return RayService(recipe, env or {}, log_dir, max_concurrency, stall_timeout_s)


def _is_ray(backend: str) -> bool:
    if backend not in ("ray", "inline"):
        raise ValueError(f"trainer.backend={backend!r} is unknown; choose ray or inline")
    return backend == "ray"
