"""What a run holds now: memory, open files and threads of each of its processes by role, and what it has on disks.

Memory is the proportional set size without the pages of files: a page that n processes share counts a nth in each, so
that the numbers add up. Pages of files are left out because they are the kernel's to drop, and because a neighbour that
maps the same library halves our share of it.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil

from tests.tiny_run import TinyRun

MIB = 1 << 20
ROLES = {
    "single_controller/watcher.py": "guard",
    "ray::SlotProcess": "rank",
    "ray::ServiceProcess": "reward service",
    "workers.pool.child_main": "reward processes",
    "ray::": "ray idle workers",
}
"""What stands on the command line of each; the first that fits."""
Measured = dict[tuple[str, str], float]
"""(role, kind) -> value; kinds are those of `growth.BOUNDS`."""


def measure(run: TinyRun) -> Measured:
    """All that the run holds at this moment. Processes that end meanwhile are left out."""
    found: Measured = defaultdict(float)
    for pid in {run.process.pid, *run.processes()}:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            with process.oneshot():
                role = "driver" if pid == run.process.pid else role_of(process)
                found[role, "memory MiB"] += memory_of(process) / MIB
                found[role, "open files"] += process.num_fds()
                found[role, "threads"] += process.num_threads()
            found["all", "processes"] += 1
    found["run folder", "disk MiB"] = disk_use(run.run_dir) / MIB
    found["temporary files", "disk MiB"] = disk_use(run.temp) / MIB
    found["shared memory", "disk MiB"] = sum(size_of(Path(name)) for name in run.shared) / MIB
    return dict(found)


def memory_of(process: psutil.Process) -> int:
    """Bytes of a process that no file stands for, shared ones in proportion."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {name: 1024 * int(size.split()[0]) for name, size in (line.split(":") for line in lines)}
        return sizes["Pss_Anon"] + sizes["Pss_Shmem"] + sizes["SwapPss"]
    except (OSError, KeyError):  # where the kernel does not tell it so finely
        return int(process.memory_full_info().pss)


def role_of(process: psutil.Process) -> str:
    """What a process of a run is: guard, rank N, reward service, reward processes, or one of Ray's by name."""
    words = process.cmdline()
    line = " ".join(words)
    role = next((name for start, name in ROLES.items() if start in line), None)
    if role == "rank":
        with suppress(OSError):  # the file that it prints to
            log = re.search(r"actor_rollout-(\d+)\.log", os.readlink(f"/proc/{process.pid}/fd/1"))
            return f"rank {log[1]}" if log else role
    if role is None and "/ray/" in line:
        return f"ray {Path(next((word for word in words if word.endswith('.py')), process.name())).stem}"
    return role or "helpers of Python"  # resource trackers


def disk_use(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk."""
    return sum(size_of(Path(where, name)) for where, _, names in os.walk(folder) for name in names)


def size_of(file: Path) -> int:
    with suppress(OSError):  # gone meanwhile
        return 512 * file.lstat().st_blocks
    return 0
