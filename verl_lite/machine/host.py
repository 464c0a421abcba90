"""Cores and memory that this process may use.

Batch systems and containers set limits with control groups, of version 2 or 1, which have different files. Control
groups are nested; the smallest limit between the process's group and the root applies.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 62


def available_memory() -> int:
    """Returns the free memory of this machine within the limits of this process, in bytes."""
    free_bytes = psutil.virtual_memory().available
    bytes_left = memory_left()
    if bytes_left is not None:
        free_bytes = min(free_bytes, bytes_left)
    return free_bytes


def cpu_count() -> int:
    """Returns the cores that this process may use: the smaller of affinity mask and control group quota, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cores_limit()
    if quota is not None:
        cores = min(cores, quota)
    return max(1, cores)


def cores_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Returns the quota of the control groups in cores, rounded up; None without a quota."""
    quotas = []
    for folder in _groups("cpu", root, own):
        # "QUOTA PERIOD" in microseconds, or "max PERIOD" without a quota; the root group has no such file
        words = _read(folder / "cpu.max").split()
        if not words:
            # version 1; -1 without a quota
            words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if all(word.isdigit() for word in words[:2]):
            quota_us, period_us = map(int, words[:2])
            quotas.append(math.ceil(quota_us / period_us))
    if not quotas:
        return None
    return max(1, min(quotas))


def memory_left(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Returns the bytes until a memory limit is reached; None without a limit."""
    bytes_left = []
    for folder in _groups("memory", root, own):
        limit = _read(folder / "memory.max")
        used = _read(folder / "memory.current")
        cache = "inactive_file"
        if not used:
            # version 1, whose limit is about 2^63 without one
            limit = _read(folder / "memory.limit_in_bytes")
            used = _read(folder / "memory.usage_in_bytes")
            # also that of the groups inside
            cache = "total_inactive_file"
        if not limit.isdigit() or not used.isdigit() or int(limit) >= _NO_LIMIT:
            continue
        statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
        # the kernel counts file cache as used, but takes it back before a process meets the limit
        reclaimable = int(statistics.get(cache, 0))
        bytes_left.append(max(0, int(limit) - int(used) + reclaimable))
    return min(bytes_left, default=None)


def _groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Yields the folders of this process's control groups for `controller`, from the innermost to the root."""
    for line in _read(own).splitlines():
        # NUMBER:CONTROLLERS:PATH, in version 2 0::PATH
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root
        elif controller in controllers.split(","):
            # version 1 has a tree for each controller
            top = root / controller
        else:
            continue
        relative = Path(path.lstrip("/"))
        for group in (relative, *relative.parents):
            folder = top / group
            # in a container the path can be that of the host, and only the root exists
            if folder.is_dir():
                yield folder


def _read(path: Path) -> str:
    """Returns the content of a file, or an empty text if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
