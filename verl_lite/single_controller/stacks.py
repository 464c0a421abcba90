"""Stacks of the threads of a process that does not get on, written by the interpreter itself: also while native code
holds its lock."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DRIVER_LOG = "driver.log"
_BEFORE_THE_END = 0.9  # of the stall timeout: before the driver ends the process


@contextmanager
def stacks_if_it_stalls(timeout_s: float | None) -> Iterator[None]:
    """Writes the stacks of all threads to standard error when the block takes nearly that long; it goes on then."""
    if timeout_s is None:
        yield
        return
    faulthandler.dump_traceback_later(_BEFORE_THE_END * timeout_s)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def save_driver_stacks(log: str | None, why: str) -> str:
    """Appends the stacks of this process's threads to `driver.log` beside a worker's log. Gives a sentence on it."""
    if log is None:
        return ""
    path = Path(log).parent / DRIVER_LOG
    with path.open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    return f"the driver's own stacks are in {path}"
