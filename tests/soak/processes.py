"""What a run holds now: memory, open files and threads of each of its processes by role, and what it has on disks.

Memory is the proportional set size without the pages of files: a page that n processes share counts a nth in each, so
that the numbers add up. Pages of files are left out because they are the kernel's to drop, and because a neighbour that
maps the same library halves our share of it. Where the kernel does not tell it so finely: the whole proportional set
size, then the resident size.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

import psutil

from tests.tiny_run import TinyRun

MIB = 1 << 20
_RANK_LOG = re.compile(r"actor_rollout-(\d+)\.log")
Measured = dict[tuple[str, str], float]
"""(role, kind) -> value; kinds are those of `growth.BOUNDS`."""


def measure(run: TinyRun) -> Measured:
    """All that the run holds at this moment. Processes that end meanwhile are left out."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    pids = {run.process.pid, *run.processes()}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                role = role_of(process, run.process.pid)
                found[role, "memory MiB"] += memory_of(process) / MIB
                found[role, "open files"] += process.num_fds()
                found[role, "threads"] += process.num_threads()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        found["all", "processes"] += 1
    found["run folder", "disk MiB"] = disk_use(run.run_dir) / MIB
    found["temporary files", "disk MiB"] = disk_use(run.temp) / MIB
    found["shared memory", "disk MiB"] = sum(_size(Path(name)) for name in run.shared) / MIB
    return dict(found)


def memory_of(process: psutil.Process) -> int:
    """Bytes of a process that no file stands for, shared ones in proportion."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {name: 1024 * int(size.split()[0]) for name, size in (line.split(":") for line in lines)}
        return sizes["Pss_Anon"] + sizes["Pss_Shmem"] + sizes["SwapPss"]
    except (OSError, KeyError):
        memory = process.memory_full_info()
        return int(getattr(memory, "pss", memory.rss))


def role_of(process: psutil.Process, driver: int) -> str:
    """What a process of a run is: driver, guard, rank N, reward service, reward processes, or one of Ray's by name."""
    words = process.cmdline()
    line, name = " ".join(words), process.name()
    if process.pid == driver:
        return "driver"
    if "single_controller/watcher.py" in line:
        return "guard"
    if line.startswith("ray::SlotProcess"):
        log = _RANK_LOG.search(_output_of(process.pid))
        return f"rank {log[1]}" if log else "rank"
    if line.startswith("ray::ServiceProcess"):
        return "reward service"
    if "workers.pool.child" in line:
        return "reward processes"
    if line.startswith("ray::"):
        return "ray idle workers"
    if "/ray/" in line:
        script = next((word for word in words if word.endswith(".py")), name)
        return f"ray {Path(script).stem}"
    return "helpers of Python"  # resource trackers


def _output_of(pid: int) -> str:
    """The file that the process prints to."""
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""


def disk_use(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk."""
    return sum(_size(Path(where, name)) for where, _, names in os.walk(folder) for name in names)


def _size(file: Path) -> int:
    try:
        return 512 * file.lstat().st_blocks
    except OSError:  # gone meanwhile
        return 0
