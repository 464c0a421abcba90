"""Who has the device now: the only code that puts engines to sleep, wakes them and offloads.

The engines of one process share a device. Each is a tenant that can move in (weights, optimizer state or KV cache on
the device) and move out. Before one enters, every other tenant moves out, so that two of them never hold the device's
memory together unless their settings say that they stay resident. On a CPU moving is free and does nothing.
"""

from functools import cache
from typing import Protocol

from verl_lite.device import empty_cache


class Tenant(Protocol):
    """What an engine offers to be moved. Both calls do nothing when there is nothing to do."""

    def move_in(self) -> None: ...

    def move_out(self) -> None: ...


class PhaseManager:
    """Keeps the tenants of one process apart. `owner` has the device."""

    def __init__(self) -> None:
        self.owner: Tenant | None = None
        self._tenants: list[Tenant] = []

    def add(self, tenant: Tenant) -> None:
        """Makes `tenant` known. It is expected to be moved in already (engines are built on the device)."""
        self._tenants.append(tenant)

    def enter(self, owner: Tenant) -> None:
        """Gives the device to `owner`: the others move out, then it moves in. Entering twice costs nothing."""
        if self.owner is owner:
            return
        for tenant in self._tenants:
            if tenant is not owner:
                tenant.move_out()
        empty_cache()  # vLLM maps its memory anew when it wakes, and cannot use what torch holds back
        owner.move_in()
        self.owner = owner


@cache
def process_phases() -> PhaseManager:
    """The phase manager of this process: colocated roles share it, because they share the device."""
    return PhaseManager()
