"""Cores and memory that this process may use.

Batch systems and containers set limits with control groups (version 2 is read, version 1 is not). Control groups are
nested; the smallest limit between the process's group and the root applies.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def available_memory() -> int:
    """Returns the free memory of this machine within the limits of this process, in bytes."""
    free, left = psutil.virtual_memory().available, memory_left()
    return free if left is None else min(free, left)


def cpu_count() -> int:
    """Returns the cores that this process may use: the smaller of affinity mask and control group quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, cores_limit() or cores))


def cores_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Returns the quota of the control groups in cores, rounded up; None without a quota."""
    limits = [_read(folder / "cpu.max").split() for folder in _groups(root, own)]
    quotas = [math.ceil(int(words[0]) / int(words[1])) for words in limits if words and words[0] != "max"]
    return max(1, min(quotas)) if quotas else None


def memory_left(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Returns the bytes until a memory limit is reached; None without a limit. Reclaimable file cache counts as
    free."""
    left = []
    for folder in _groups(root, own):
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            left.append(max(0, int(limit) - int(used) + int(stat.get("inactive_file", 0))))
    return min(left) if left else None


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """Yields the folders of this process's control groups, from the innermost to the root."""
    for line in _read(own).splitlines():
        if line.startswith("0::"):
            relative = Path(line.removeprefix("0::").lstrip("/"))
            # in a container the path can be that of the host, and only the root folder exists
            yield from (root / part for part in (relative, *relative.parents) if (root / part).is_dir())


def _read(path: Path) -> str:
    """Returns the content of a file, or an empty text if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
