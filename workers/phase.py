"""Who owns the device now: training, rollout, or nobody. The only code that puts engines to sleep, wakes them and
offloads.

The engines of one process share a device. Each is a tenant that can move in (weights, optimizer state or KV cache on
the device) and move out. Entering a phase moves out every other tenant first, so that two of them never hold the
device's memory together unless their settings say that they stay resident. On a CPU moving is free and does nothing.
"""

from __future__ import annotations

import enum
from typing import Protocol

from verl_lite.device import empty_cache


class Phase(enum.StrEnum):
    TRAIN = "train"
    ROLLOUT = "rollout"
    IDLE = "idle"


class Tenant(Protocol):
    """What an engine offers to be moved. Both calls do nothing when there is nothing to do."""

    def move_in(self) -> None: ...

    def move_out(self) -> None: ...


class PhaseManager:
    """Keeps the tenants of one process apart. `phase` and `owner` tell who holds the device."""

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.owner: Tenant | None = None
        self._tenants: list[Tenant] = []

    def add(self, tenant: Tenant) -> None:
        """Makes `tenant` known. It is expected to be moved in already (engines are built on the device)."""
        self._tenants.append(tenant)

    def enter(self, phase: Phase, owner: Tenant) -> None:
        """Gives the device to `owner`: the others move out, then it moves in. Entering twice costs nothing."""
        if self.owner is owner:
            self.phase = phase
            return
        for tenant in self._tenants:
            if tenant is not owner:
                tenant.move_out()
        empty_cache()  # vLLM maps its memory anew when it wakes, and cannot use what torch holds back
        owner.move_in()
        self.phase, self.owner = phase, owner

    def leave(self) -> None:
        """Frees the device: every tenant moves out."""
        for tenant in self._tenants:
            tenant.move_out()
        self.phase, self.owner = Phase.IDLE, None


_process_phases: PhaseManager | None = None


def process_phases() -> PhaseManager:
    """The phase manager of this process: colocated roles share it, because they share the device."""
    global _process_phases
    if _process_phases is None:
        _process_phases = PhaseManager()
    return _process_phases
