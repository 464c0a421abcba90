"""Takes the devices of a run, before anything heavy starts, and looks whom the run will have as neighbours.

On CUDA: which devices CUDA_VISIBLE_DEVICES leaves us, which of them others use or have leased, and a lease on those
that the run takes; the processes of the run see only these. On a CPU, where cores are shared by nature: a sentence if
the machine is loaded or short of memory, so that a slow run has a known reason.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_lite.errors import UserError
from verl_lite.machine.gpus import GIB, Gpu, is_busy, list_gpus, other_users, visible_gpus
from verl_lite.machine.host import cpu_count, memory_left
from verl_lite.machine.lease import Holder, take_devices

Tell = Callable[[str], None]
_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Wish:
    """What a run asks of the machine.

    count: devices. run: what others are told about who has them. memory_share: of each device, to be free for the
    rollout engine. shared: together with others, knowingly. host_bytes: memory of the machine, about, at least.
    """

    count: int
    run: str
    memory_share: float = 0.0
    shared: bool = False
    host_bytes: int = 0


@contextmanager
def claimed_gpus(
    wish: Wish, tell: Tell, *, gpus: Sequence[Gpu] | None = None, leases: Path | None = None
) -> Iterator[None]:
    """Inside, the devices are leased, and CUDA_VISIBLE_DEVICES names exactly those, in the user's own words.

    tell: takes sentences worth knowing. gpus, leases: those of this machine, unless given.
    Raises UserError if too few can be had, saying who has the others and what to do.
    """
    gpus = list_gpus() if gpus is None else gpus
    if gpus is None:
        tell("who uses the GPUs is not known, and none is leased: nvidia-ml-py is not installed")
        yield
        return
    visible = {one.gpu.uuid: one for one in visible_gpus(gpus)}
    candidates = [(uuid, refusal(one.gpu, wish)) for uuid, one in visible.items()]
    with ExitStack() as stack:
        holder = Holder.this_process(wish.run)
        taken, refused = take_devices(candidates, wish.count, holder, stack, shared=wish.shared, folder=leases)
        if len(taken) < wish.count:
            reasons = [f"{visible[uuid].gpu} {reason}" for uuid, reason in refused.items()]
            raise UserError(_too_few(wish, len(visible), len(taken), reasons))
        for uuid, reason in refused.items():
            tell(f"{visible[uuid].gpu} {reason}")
        for gpu in (visible[uuid].gpu for uuid in taken):
            for user in other_users(gpu):
                tell(f"{gpu} is also used by {user}")
        with _environment(_VARIABLE, ",".join(visible[uuid].token for uuid in taken)):
            yield


def refusal(gpu: Gpu, wish: Wish) -> str | None:
    """Why the device cannot be had, as far as others' processes go; None if it can."""
    if is_busy(gpu) and not wish.shared:
        hidden = f"{(gpu.total_bytes - gpu.free_bytes) / GIB:.1f} GiB by processes that are not visible from here"
        return "is in use:" + "".join(f"\n    {user}" for user in other_users(gpu) or [hidden])
    if gpu.free_bytes < wish.memory_share * gpu.total_bytes:
        share = math.floor(100 * gpu.free_bytes / gpu.total_bytes) / 100
        return (
            f"has {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free, "
            f"rollout.gpu_memory_utilization={wish.memory_share:g} takes more: at most {share:g} fits"
        )
    return None


def _too_few(wish: Wish, visible: int, taken: int, reasons: Sequence[str]) -> str:
    setting = os.environ.get(_VARIABLE)
    seen = f"{_VARIABLE}={setting}" if setting is not None else f"{_VARIABLE} is not set"
    return (
        f"trainer.n_gpus_per_node={wish.count}, but only {taken} of {visible} devices can be had ({seen}):"
        + "".join(f"\n  {reason}" for reason in reasons)
        + f"\nChoose other devices with {_VARIABLE}, or fewer with trainer.n_gpus_per_node; or use them together with "
        "those who have them, if they agree: trainer.share_devices=true"
    )


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@dataclass(frozen=True)
class Host:
    """The machine as it is now. available_bytes: of memory, within the limits set to this process. cores: of the
    machine, own_cores: those this process may use."""

    available_bytes: int
    load: float
    cores: int
    own_cores: int

    @classmethod
    def now(cls) -> Host:
        free, left = psutil.virtual_memory().available, memory_left()
        return cls(free if left is None else min(free, left), os.getloadavg()[0], os.cpu_count() or 1, cpu_count())


def tell_of_busy_host(wish: Wish, tell: Tell, host: Host | None = None) -> None:
    """A sentence each if memory or processor time is short."""
    host = host or Host.now()
    if host.available_bytes < wish.host_bytes:
        tell(
            f"{host.available_bytes / GIB:.1f} GiB of memory are free here, and this run takes about "
            f"{wish.host_bytes / GIB:.1f} or more: it may crawl, or be ended for want of memory"
        )
    idle = min(host.own_cores, max(0.0, host.cores - host.load))
    if idle < wish.count / 2:
        tell(
            f"this machine is busy (load {host.load:.1f} on {host.cores} cores), and the run wants {wish.count} for "
            "itself: steps will be slow"
        )
