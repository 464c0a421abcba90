"""What is to run, and on how many processes of which machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
