"""Whether processes have ended."""

from __future__ import annotations

import time
from pathlib import Path


def gone(pid: int, within_s: float = 5.0) -> bool:
    """Whether a process has ended, or is a zombie, or will be within that time."""
    end = time.monotonic() + within_s
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
