"""Whether processes have ended."""

from __future__ import annotations

import time
from pathlib import Path


def gone(pid: int, within_s: float = 5.0) -> bool:
    """Whether a process ends, or is a zombie, within that time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False
