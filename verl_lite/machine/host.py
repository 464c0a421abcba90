"""The machine without its GPUs: cores and memory that this process may use.

Batch systems and containers set limits by control groups (version 2; of version 1 nothing is read). A process is in a
group, which lies in others; the smallest limit on the way to the root holds.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def available_memory() -> int:
    """Bytes that are free on this machine, within this process's limits."""
    free, left = psutil.virtual_memory().available, memory_left()
    return free if left is None else min(free, left)


def cpu_count() -> int:
    """Cores this process may use: the smaller of its affinity mask and its control group's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, cores_limit() or cores))


def cores_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Cores of the quota, rounded up; None without one."""
    limits = [_read(folder / "cpu.max").split() for folder in _groups(root, own)]
    quotas = [math.ceil(int(words[0]) / int(words[1])) for words in limits if words and words[0] != "max"]
    return max(1, min(quotas)) if quotas else None


def memory_left(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Bytes until a limit is reached, not counting file cache that the kernel would give up; None without a limit."""
    left = []
    for folder in _groups(root, own):
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            left.append(max(0, int(limit) - int(used) + int(stat.get("inactive_file", 0))))
    return min(left) if left else None


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """Folders of this process's groups, from its own one to the root's."""
    for line in _read(own).splitlines():
        if line.startswith("0::"):
            relative = Path(line.removeprefix("0::").lstrip("/"))
            # in a container the path may be the host's, and only the root is there
            yield from (root / part for part in (relative, *relative.parents) if (root / part).is_dir())


def _read(path: Path) -> str:
    """What a file holds; nothing if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
