"""The inline backend: all ranks in the driver's process, one call after the other, where a debugger can stop.

Batches take the same way through the wire format as with Ray, so a worker cannot change the caller's object here
either. torch.distributed has room for one rank only.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from verl_lite.single_controller.resource_pool import ResourcePool
from verl_lite.single_controller.worker import Slot, close_process_group, construct, invoke
from verl_lite.single_controller.worker_group import ClassWithInitArgs


class _Answer:
    """The handle of a call that has run: its value, or the exception, raised when the answer is asked for."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: Exception | None = None

    def __enter__(self) -> _Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class LocalTransport:
    """Slots that are objects of this process."""

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

    def submit(self, rank: int, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Answer:
        answer = _Answer()
        with answer:
            args = tuple(value.get() if isinstance(value, _Answer) else value for value in args)
            kwargs = {name: value.get() if isinstance(value, _Answer) else value for name, value in kwargs.items()}
            answer.value = invoke(self._slots[rank], role, method, args, kwargs)
        return answer

    def wait(self, handles: list[Any]) -> list[Any]:
        return [handle.get() for handle in handles]

    def close(self) -> None:
        self._slots = []
        close_process_group()


class LocalService:
    """A service in this process. `send` runs the method at once."""

    def __init__(self, recipe: ClassWithInitArgs) -> None:
        self._object: Any = recipe.cls(*recipe.args, **recipe.kwargs)
        self._failed: _Answer | None = None

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        answer = _Answer()
        with answer:
            getattr(self._object, method)(*args, **kwargs)
        if answer.error is not None and self._failed is None:
            self._failed = answer

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            failed.get()
        return getattr(self._object, method)(*args, **kwargs)

    def stop(self) -> None:
        self._object = None
