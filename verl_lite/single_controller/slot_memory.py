"""How much memory each worker process holds, and in whose calls it grew: what to say when one of them is gone.

Read from /proc by the driver while it waits for answers, so a process that was killed has been seen shortly before.
Processes on other machines are not seen.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

GIB = 1 << 30
_CALLS_SHOWN = 3
_LEAST_GROWTH_SHOWN = 64 << 20  # below are fluctuations


class SlotMemory:
    """Resident memory of processes by rank, and its growth by call."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._start: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._growth: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def watch(self, rank: int, pid: int) -> None:
        """From now on `rank` is this process of this machine."""
        self._pids[rank] = pid
        size = resident_bytes(pid)
        if size is not None:
            self._start[rank] = self._last[rank] = size

    def look(self, rank: int, call: str) -> None:
        """What the process has grown since the last look, it has grown in `call`."""
        size = resident_bytes(self._pids[rank]) if rank in self._pids else None
        if size is not None:
            self._growth[rank][call] += size - self._last.get(rank, size)
            self._last[rank] = size

    def describe(self, rank: int) -> str:
        """One sentence: how large it was at its start and when last seen, and the calls in which it grew most."""
        if rank not in self._last:
            return ""
        start, last = (f"{sizes[rank] / GIB:.2f} GiB" for sizes in (self._start, self._last))
        grown = sorted(self._growth[rank].items(), key=lambda item: -item[1])[:_CALLS_SHOWN]
        most = ", ".join(f"{size / GIB:+.2f} in {call}" for call, size in grown if size >= _LEAST_GROWTH_SHOWN)
        growth = f"; it grew most by {most}" if most else ""
        return f"memory of rank {rank}: {start} at its start, {last} when last seen{growth}"


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process; None if it is gone, or where there is no /proc."""
    try:
        pages = int(Path("/proc", str(pid), "statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") or None  # a zombie has none
