"""Where workers and services start: one process per slot with all roles (ray), or all of it in this process (inline).

Inline, calls run one after the other, where a debugger can stop. Batches take the same way through the wire format as
with Ray, so a worker cannot change the caller's object here either. torch.distributed has room for one rank only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_lite.registry import import_modules
from verl_lite.single_controller.worker import Slot, close_process_group, construct, invoke
from verl_lite.single_controller.worker_group import (
    ClassWithInitArgs,
    ResourcePool,
    ServiceHandle,
    Transport,
    WorkerGroup,
)


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
    from verl_lite.single_controller.ray_service import start_ray_service

    return start_ray_service(recipe, env or {}, log_dir, max_concurrency, stall_timeout_s)


def _is_ray(backend: str) -> bool:
    if backend not in ("ray", "inline"):
        raise ValueError(f"trainer.backend={backend!r} is unknown; choose ray or inline")
    return backend == "ray"


class LocalTransport:
    """Slots that are objects of this process. A handle is the answer, or the exception."""

    def __init__(self, pool: ResourcePool, roles: dict[str, ClassWithInitArgs]) -> None:
        self.world_size = pool.world_size
        self._slots = [
            Slot(rank, pool.world_size, pool.process_on_nodes[node], backend="inline")
            for rank, node in enumerate(pool.nodes)
        ]
        for slot in self._slots:
            for role, recipe in roles.items():
                construct(slot, role, recipe.cls, recipe.args, recipe.kwargs)

    def share(self, value: Any) -> Any:
        return value

    def submit(
        self, rank: int, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Exception | None]:
        try:
            return invoke(self._slots[rank], role, method, args, kwargs), None
        except Exception as error:  # raised when the answer is asked for
            return None, error

    def wait(self, handles: list[Any]) -> list[Any]:
        for _, error in handles:
            if error is not None:
                raise error
        return [value for value, _ in handles]

    def close(self) -> None:
        self._slots = []
        close_process_group()


class LocalService:
    """A service in this process. `send` runs the method at once."""

    def __init__(self, recipe: ClassWithInitArgs) -> None:
        self._object: Any = recipe.cls(*recipe.args, **recipe.kwargs)
        self._failed: Exception | None = None

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(self._object, method)(*args, **kwargs)
        except Exception as error:  # raised by the next call
            self._failed = self._failed or error

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        return getattr(self._object, method)(*args, **kwargs)

    def stop(self) -> None:
        self._object = None
