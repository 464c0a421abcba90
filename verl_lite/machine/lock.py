"""A lock file: one process holds it, and others learn which. The kernel frees it when that process ends, in any way."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


class FileLocked(Exception):
    """Another process holds the file; the message says which, as far as the file tells."""


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Holds the lock of a file, made if need be, inside the block.

    Raises:
        FileLocked: another process holds it. OSError: the file cannot be made, or its disk knows no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 500, 0).decode(errors="replace")
            shown = "".join(c for c in holder if c.isprintable())
            raise FileLocked(shown or "a process that does not tell its name") from None
        holder = f"pid {os.getpid()} of user {psutil.Process().username()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        yield
    finally:
        os.close(descriptor)
