"""What the control groups leave to this process: cores, and memory. Batch systems and containers set such limits.

A process is in a group, which lies in others; the smallest limit on the way to the root holds. Version 2 of control
groups is read first, then version 1; where there are none, nothing is limited.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cores_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Cores of the quota, rounded up; None without one."""
    quotas = []
    for folder in _groups("cpu", root, own):
        modern, quota, period = (_read(folder / name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
        if modern and not modern.startswith("max"):
            quota, period = modern.split()[:2]
        if quota and period and int(quota) > 0:
            quotas.append(math.ceil(int(quota) / int(period)))
    return max(1, min(quotas)) if quotas else None


def memory_left(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Bytes until a limit is reached, not counting file cache that the kernel would give up; None without a limit."""
    left = []
    for folder in _groups("memory", root, own):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:  # version 1 writes no limit as a huge one
            left.append(max(0, int(limit) - int(used) + _file_cache(folder)))
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


def _file_cache(folder: Path) -> int:
    names = ("inactive_file", "total_inactive_file")
    lines = (line.split() for line in _read(folder / "memory.stat").splitlines())
    return max((int(words[1]) for words in lines if words[0] in names), default=0)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
