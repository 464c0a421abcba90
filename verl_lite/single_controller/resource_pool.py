"""Resource pools (slots for workers), constructor recipes, and services: objects that driver and workers call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, cast

P = ParamSpec("P")


class ClassWithInitArgs:
    """A class and its constructor arguments, to construct it in another process. (verl: RayClassWithInitArgs)"""

    def __init__(self, cls: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        # a Callable in the signature, so that a type checker compares the arguments with the constructor's parameters
        self.cls = cast(type, cls)
        self.args: tuple[object, ...] = args
        self.kwargs: dict[str, object] = kwargs

    def __call__(self) -> object:
        return self.cls(*self.args, **self.kwargs)


@dataclass
class ResourcePool:
    """Slots for workers.

    Attributes:
        process_on_nodes: number of processes on each machine.
        use_gpu: True if each process has one GPU.
        cpus_per_process: cores per process; with a fraction, several processes share a core.
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
        """Index of the machine of each rank."""
        nodes: list[int] = []
        for node, count in enumerate(self.process_on_nodes):
            nodes += [node] * count
        return nodes


class ServiceHandle(Protocol):
    """Handle of an object in a separate process. Can be passed to workers as an argument."""

    def send(self, method: str, *args: object, **kwargs: object) -> None:
        """Starts a method and returns without waiting. The next `call` of any caller raises the method's exception.

        The sends of one sender run in order; sends of different senders run in any order.
        """

    # Any: the method, and with it the type of its result, is chosen by name
    def call(self, method: str, *args: object, **kwargs: object) -> Any:
        """Runs a method and returns its result."""

    def stop(self) -> None:
        """Ends the service."""


class LocalService:
    """A service in this process. `send` runs the method immediately."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._object = make()
        self._failed: Exception | None = None

    def send(self, method: str, *args: object, **kwargs: object) -> None:
        try:
            getattr(self._object, method)(*args, **kwargs)
        except Exception as error:
            # the next call raises it, as in a service whose sender does not wait
            self._failed = self._failed or error

    def call(self, method: str, *args: object, **kwargs: object) -> object:
        if self._failed is not None:
            failed = self._failed
            self._failed = None
            raise failed
        function = getattr(self._object, method)
        return function(*args, **kwargs)

    def stop(self) -> None:
        self._object = None
