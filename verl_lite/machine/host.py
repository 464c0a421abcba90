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
    free = psutil.virtual_memory().available
    left = memory_left()
    return free if left is None else min(free, left)


def cpu_count() -> int:
    """Returns the cores that this process may use: the smaller of affinity mask and control group quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, cores_limit() or cores))


def cores_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Returns the quota of the control groups in cores, rounded up; None without a quota."""
    quotas = []
    for folder in _groups(root, own):
        words = _read(folder / "cpu.max").split()
        if words and words[0] != "max":
            quota_us, period_us = int(words[0]), int(words[1])
            quotas.append(math.ceil(quota_us / period_us))
    return max(1, min(quotas)) if quotas else None


def memory_left(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Returns the bytes until a memory limit is reached; None without a limit. Reclaimable file cache counts as
    free."""
    bytes_left = []
    for folder in _groups(root, own):
        limit = _read(folder / "memory.max")
        used = _read(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            reclaimable = int(statistics.get("inactive_file", 0))
            bytes_left.append(max(0, int(limit) - int(used) + reclaimable))
    return min(bytes_left) if bytes_left else None


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """Yields the folders of this process's control groups, from the innermost to the root."""
    for line in _read(own).splitlines():
        if line.startswith("0::"):
            relative = Path(line.removeprefix("0::").lstrip("/"))
            for group in (relative, *relative.parents):
                folder = root / group
                # in a container the path can be that of the host, and only the root exists
                if folder.is_dir():
                    yield folder


def _read(path: Path) -> str:
    """Returns the content of a file, or an empty text if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
