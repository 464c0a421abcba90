"""The inline backend: all ranks in the driver's process, one call after the other, where a debugger can stop.

Batches take the same way through the wire format as with Ray, so a worker cannot change the caller's object here
either. torch.distributed has room for one rank only.
"""

from __future__ import annotations

from typing import Any

from verl_lite.single_controller.worker import Slot, close_process_group, construct, invoke
from verl_lite.single_controller.worker_group import ClassWithInitArgs, ResourcePool


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
