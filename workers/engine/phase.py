"""Ownership of the device: the only code that moves engines onto the device and off it.

The engines of one process share a device. Each engine is a tenant that can move in (weights, optimizer state or KV
cache on the device) and move out. Before a tenant enters, every other tenant moves out. Two tenants therefore hold
device memory at the same time only if their settings keep them resident. On a CPU moving does nothing.
"""

from functools import cache
from typing import Protocol
from weakref import ref

from verl_lite.machine.device import empty_cache


class Tenant(Protocol):
    """The interface of an engine that can be moved. Repeated calls of either method have no effect."""

    def move_in(self) -> None: ...

    def move_out(self) -> None: ...


class PhaseManager:
    """The tenants of one process, and the owner, the tenant that currently uses the device.

    Its references are weak: the manager of a process outlives the runs in it, whose networks it must not keep.
    """

    def __init__(self) -> None:
        self._owner: ref[Tenant] | None = None
        self._tenants: list[ref[Tenant]] = []

    def add(self, tenant: Tenant) -> None:
        """Registers a tenant that is already on the device, where engines are built."""
        self._tenants.append(ref(tenant))

    def enter(self, owner: Tenant) -> None:
        """Moves all other tenants out and `owner` in. Does nothing if `owner` already has the device."""
        if self._owner is not None and self._owner() is owner:
            return

        # nobody has the device if one of these calls fails
        self._owner = None
        # out before in: together they may not fit
        for reference in self._tenants:
            tenant = reference()
            if tenant is not None and tenant is not owner:
                tenant.move_out()
        # when vLLM wakes up, it maps new memory and cannot use memory that torch has cached
        empty_cache()
        owner.move_in()
        self._owner = ref(owner)


@cache
def process_phases() -> PhaseManager:
    """Returns the phase manager of this process, which colocated roles share because they share the device."""
    return PhaseManager()
