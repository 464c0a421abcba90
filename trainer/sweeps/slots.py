"""Where the runs of a sweep run: cores of this machine, or GPUs that others use too.

A pool gives a `Slot` to each run, or none for now. A GPU is given only if nobody holds its lease, no other sweep has
it, and nobody else uses it in earnest, by memory or by utilisation; it is looked at anew each time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verl_lite.errors import UserError
from verl_lite.machine.claim import Wish, refusal
from verl_lite.machine.gpus import Gpu, VisibleGpu, list_gpus, visible_gpus, without_processes
from verl_lite.machine.lease import Holder, LeaseTaken, leased, leases_folder

_BUSY_PERCENT = 10
_MOST_LOSSES = 2
"""Runs that lost a device before it is left alone."""

UTILIZATION = "rollout.gpu_memory_utilization"


@dataclass(frozen=True)
class Slot:
    """A place for a run. name: shown. devices: names of what it takes. environment, settings: what the run gets."""

    name: str
    devices: tuple[str, ...]
    environment: Mapping[str, str]
    settings: tuple[str, ...] = ()


class Pool(Protocol):
    """Where runs find a place."""

    @property
    def size(self) -> int:
        """Runs at a time, at most."""

    def take(self, avoid: Collection[str] = ()) -> Slot | None:
        """A free place, none of whose devices is in `avoid` if others are there; None if there is none now."""

    def give_back(self, slot: Slot, lost: bool = False) -> None:
        """The run has ended. lost: by the fault of the device, as it seems."""

    def why_not(self) -> list[str]:
        """Why the last `take` found nothing, a sentence for each device that others have."""


class CpuPool:
    """So many runs at a time on this machine's cores."""

    def __init__(self, slots: int, threads: int = 1) -> None:
        self.size = slots
        self._environment = {"OMP_NUM_THREADS": str(threads)}
        self._free = list(range(slots))

    def take(self, avoid: Collection[str] = ()) -> Slot | None:
        if not self._free:
            return None
        number = self._free.pop(0)
        return Slot(f"cpu {number}", (f"cpu {number}",), self._environment)

    def give_back(self, slot: Slot, lost: bool = False) -> None:
        self._free = sorted([*self._free, int(slot.name.split()[1])])

    def why_not(self) -> list[str]:
        return []


class GpuPool:
    """GPUs of this machine. own: processes of this sweep's runs. look: tells what the devices are like now."""

    def __init__(
        self,
        devices: Sequence[VisibleGpu],
        *,
        per_trial: int = 1,
        share: float = 1.0,
        threads: int = 1,
        run: str = "a sweep",
        own: Callable[[], Collection[int]] = tuple,
        look: Callable[[], list[Gpu] | None] = list_gpus,
        leases: Path | None = None,
    ) -> None:
        if per_trial > len(devices):
            raise UserError(f"--per-trial {per_trial}: there are {len(devices)} devices for the sweep")
        self._tokens = {one.gpu.uuid: one.token for one in devices}
        self._per_trial, self._share, self._threads = per_trial, share, threads
        self._own, self._look, self._leases = own, look, leases
        self._holder = Holder.this_process(run)
        self._per_device = math.floor(1 / share + 1e-9)
        self._held: dict[str, ExitStack] = {}  # our lease of a device, while runs of ours are on it
        self._runs: dict[str, int] = dict.fromkeys(self._tokens, 0)
        self._losses: dict[str, int] = dict.fromkeys(self._tokens, 0)
        self._why: list[str] = []

    @property
    def size(self) -> int:
        working = [uuid for uuid in self._tokens if self._losses[uuid] < _MOST_LOSSES]
        return len(working) * self._per_device // self._per_trial

    def take(self, avoid: Collection[str] = ()) -> Slot | None:
        gpus = {gpu.uuid: gpu for gpu in self._look() or []}
        own = self._own() if any(self._runs.values()) else ()
        self._why = []
        taken: list[str] = []
        # devices that the run has lost before come last, those with runs of ours first: others find whole ones free
        order = sorted(self._tokens, key=lambda uuid: (uuid in avoid, -self._runs[uuid]))
        for uuid in order:
            if len(taken) < self._per_trial and self._runs[uuid] < self._per_device and self._hold(uuid, gpus, own):
                taken.append(uuid)
        if len(taken) < self._per_trial:
            for uuid in taken:
                self._release(uuid)
            return None
        tokens = [self._tokens[uuid] for uuid in taken]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(tokens), "OMP_NUM_THREADS": str(self._threads)}
        settings = ("trainer.share_devices=true",) if self._share < 1 else ()
        return Slot(f"gpu {','.join(tokens)}", tuple(taken), environment, settings)

    def give_back(self, slot: Slot, lost: bool = False) -> None:
        for uuid in slot.devices:
            self._losses[uuid] += lost
            self._release(uuid)

    def why_not(self) -> list[str]:
        lost = [uuid for uuid, losses in self._losses.items() if losses >= _MOST_LOSSES]
        return self._why or [f"{uuid} was lost by {self._losses[uuid]} runs, and is left alone" for uuid in lost]

    def _hold(self, uuid: str, gpus: Mapping[str, Gpu], own: Collection[int]) -> bool:
        """Counts a run on the device, and leases it for this sweep if it is the first."""
        reason = self._reason(uuid, gpus, own)
        if reason is None and uuid not in self._held:
            with ExitStack() as stack:
                try:
                    stack.enter_context(leased(f"sweep-{uuid}", self._holder, folder=self._leases))
                    self._held[uuid] = stack.pop_all()
                except LeaseTaken as error:
                    reason = f"is held by {error}"
        if reason is not None:
            self._why.append(f"{gpus.get(uuid, uuid)} {reason}")
            return False
        self._runs[uuid] += 1
        return True

    def _release(self, uuid: str) -> None:
        self._runs[uuid] -= 1
        if not self._runs[uuid]:
            self._held.pop(uuid).close()

    def _reason(self, uuid: str, gpus: Mapping[str, Gpu], own: Collection[int]) -> str | None:
        """Why the device cannot be had now."""
        if self._losses[uuid] >= _MOST_LOSSES:
            return f"was lost by {self._losses[uuid]} runs, and is left alone"
        if uuid not in gpus:
            return "is not there any more"
        ours = self._runs[uuid] > 0
        gpu = without_processes(gpus[uuid], own) if ours else gpus[uuid]
        needed = self._share * (self._runs[uuid] + 1 if ours else 1)
        found = refusal(gpu, Wish(self._per_trial, "", memory_share=needed if self._share < 1 else 0.0))
        if found is not None:
            return found.replace(
                f"{UTILIZATION}={needed:g}", f"--share {self._share:g} for {self._runs[uuid] + 1} runs"
            )
        if not ours and (gpu.utilisation or 0) >= _BUSY_PERCENT:
            return f"is in use: {gpu.utilisation}% of its time, by processes that are not visible from here"
        return None if ours else self._lease_of_others(uuid)

    def _lease_of_others(self, uuid: str) -> str | None:
        """Who has leased the device for a run, if anybody has. Where there is no file nobody has, and none is made."""
        if not ((self._leases or leases_folder()) / uuid).exists():
            return None
        try:
            with leased(uuid, self._holder, shared=True, folder=self._leases):
                return None
        except LeaseTaken as error:
            return f"is held by {error}"


def choose_devices(
    words: Sequence[str] | None, gpus: Sequence[Gpu], environment: Mapping[str, str] = os.environ
) -> list[VisibleGpu]:
    """The devices of `--devices`, or all that are visible. Raises UserError for one that is not there."""
    visible = visible_gpus(gpus, environment)
    if words is None:
        return visible
    known = ", ".join(f"{one.gpu.index} ({one.gpu.uuid})" for one in visible) or "none"
    chosen: list[VisibleGpu] = []
    for word in words:
        try:
            found = visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": word})
        except UserError:
            found = []
        if not word or not found:
            raise UserError(f"--devices {','.join(words)}: {word!r} is no device of this machine; there are {known}")
        one = next((one for one in visible if one.gpu is found[0].gpu), None)
        if one is None:
            raise UserError(
                f"--devices {','.join(words)}: {word!r} is not among CUDA_VISIBLE_DEVICES="
                f"{environment.get('CUDA_VISIBLE_DEVICES')}, which leaves {known}"
            )
        if any(one.gpu is other.gpu for other in chosen):
            raise UserError(f"--devices {','.join(words)}: {word!r} is named twice")
        chosen.append(one)
    return chosen


def shared_memory(config: Mapping[str, Any], share: float) -> tuple[str, ...]:
    """The setting by which runs of a shared device take only their part for the rollout engine."""
    usual = config.get(UTILIZATION)
    if share == 1 or not isinstance(usual, int | float):
        return ()
    return (f"{UTILIZATION}={usual * share:.4g}",)
