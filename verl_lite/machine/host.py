"""The machine without its GPUs: cores and memory that this process may use, and whether others leave it enough.

Batch systems and containers set limits by control groups. A process is in a group, which lies in others; the smallest
limit on the way to the root holds. Version 2 is read first, then version 1; without either nothing is limited.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 1 << 30
ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class HostLoad:
    """The machine as it is now. available_bytes: of memory, within this process's limits; own_cores: those it may use.
    """

    available_bytes: int
    load: float
    cores: int
    own_cores: int

    @classmethod
    def now(cls) -> HostLoad:
        free, left = psutil.virtual_memory().available, memory_left()
        return cls(free if left is None else min(free, left), os.getloadavg()[0], os.cpu_count() or 1, cpu_count())


def warn_if_busy(slots: int, host_bytes: int, log: Callable[[str], None], host: HostLoad | None = None) -> None:
    """Logs a sentence each if the memory or the processor time for a run of so many slots and bytes is short."""
    host = host or HostLoad.now()
    if host.available_bytes < host_bytes:
        log(
            f"{host.available_bytes / GIB:.1f} GiB of memory are free here, and this run takes about "
            f"{host_bytes / GIB:.1f} or more: it may be very slow, or be ended for want of memory"
        )
    if min(host.own_cores, max(0.0, host.cores - host.load)) < slots / 2:
        log(
            f"this machine is busy (load {host.load:.1f} on {host.cores} cores), and the run wants {slots} for "
            "itself: steps will be slow"
        )


def cpu_count() -> int:
    """Cores this process may use: the smaller of its affinity mask and its control group's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, cores_limit() or cores))


def cores_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Cores of the quota, rounded up; None without one."""
    quotas = []
    for folder in _groups("cpu", root, own):
        words = _read(folder, "cpu.max").split() or [_read(folder, f"cpu.cfs_{x}_us") for x in ("quota", "period")]
        if all(word.isdigit() for word in words):  # no limit is "max" or -1
            quotas.append(math.ceil(int(words[0]) / int(words[1])))
    return max(1, min(quotas)) if quotas else None


def memory_left(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Bytes until a limit is reached, not counting file cache that the kernel would give up; None without a limit."""
    left = []
    for folder in _groups("memory", root, own):
        limit = _read(folder, "memory.max", "memory.limit_in_bytes")
        used = _read(folder, "memory.current", "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:  # version 1 writes no limit as a huge one
            stat = dict(line.split() for line in _read(folder, "memory.stat").splitlines())
            cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            left.append(max(0, int(limit) - int(used) + cache))
    return min(left) if left else None


def _groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Folders of this process's groups in which `controller` has its files, from its own one to the root's."""
    for line in _read(own).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base = root
        elif controller in controllers.split(","):
            base = root / controller if (root / controller).is_dir() else root / controllers
        else:
            continue
        relative = Path(path.lstrip("/"))
        # in a container the path may be the host's, and only the root is there
        yield from (base / part for part in (relative, *relative.parents) if (base / part).is_dir())


def _read(path: Path, *names: str) -> str:
    """The first of these files of a folder that can be read, or the file itself; else nothing."""
    for file in [path / name for name in names] or [path]:
        try:
            return file.read_text().strip()
        except OSError:
            pass
    return ""
