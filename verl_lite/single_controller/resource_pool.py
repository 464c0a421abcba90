"""What is to run, and where: slots for workers, and services: one object that the driver and its workers call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class ClassWithInitArgs:
    """A class and the arguments of its constructor, which runs elsewhere. (verl: RayClassWithInitArgs)"""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


@dataclass
class ResourcePool:
    """Slots for workers.

    process_on_nodes: processes on each machine. use_gpu: one device each. cpus_per_process: cores each, a fraction
    lets several share one.
    """

    process_on_nodes: list[int]
    use_gpu: bool = False
    cpus_per_process: float = 1.0

    def __post_init__(self) -> None:
        if not self.process_on_nodes or min(self.process_on_nodes) < 1:
            raise ValueError(f"process_on_nodes must have at least one process per machine: {self.process_on_nodes}")

    @property
    def world_size(self) -> int:
        """Number of slots."""
        return sum(self.process_on_nodes)

    @property
    def nodes(self) -> list[int]:
        """The machine of each rank."""
        return [node for node, count in enumerate(self.process_on_nodes) for _ in range(count)]


class ServiceHandle(Protocol):
    """One object in a process of its own. Can be given to workers as an argument."""

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Start a method and go on. What it raises is raised by the next `call`, whoever makes it.

        Sends of one sender arrive in their order; nothing is promised about those of different senders.
        """

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method and wait for its answer."""

    def stop(self) -> None:
        """End the service."""


class LocalService:
    """A service in this process. `send` runs the method at once."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._object = make()
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
