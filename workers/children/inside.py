"""What a supervised process does about itself, whatever it is for: it ends with its owner, prints within bounds, and
tells where it is when asked. The owner's side is `workers.children.process`. Imports the standard library only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import signal
import sys
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR1
"""On this signal the process writes the stacks of its threads to stderr, whatever it is doing."""

_PRINTED_BYTES_MAX = 10 << 20
_PR_SET_PDEATHSIG = 1


def settle_in(parent_pid: int) -> None:
    """The first thing that a supervised process calls: it ends with its owner, and a segmentation fault leaves its
    stack in stderr, which the owner keeps."""
    die_with_parent(parent_pid)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL)


def redirect_prints(path: str | None, of_whom: str) -> None:
    """What Python code prints goes to a `CappedLog` from now on."""
    sys.stdout = sys.stderr = CappedLog(path, _PRINTED_BYTES_MAX, of_whom)


def end_if_forked(pid: int) -> None:
    """Ends this process if it is not `pid`: a fork inside untrusted code came back, and only one may go on."""
    if os.getpid() != pid:
        os._exit(1)


def die_with_parent(parent_pid: int) -> None:
    """On Linux the kernel kills this process when the thread that started it ends, whatever this one is doing then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


class CappedLog(io.TextIOBase):
    """Takes what untrusted code prints, up to a number of bytes; then one line says so and the rest is dropped.

    The processes that replace one another write into one file, which is begun anew when it is longer than that.
    """

    def __init__(self, path: str | None, limit: int, of_whom: str = "reward") -> None:
        self._left = limit
        self._last_line = f"\n[more output of this {of_whom} process is dropped]\n"
        self._file = None
        if path is not None:
            is_long = Path(path).exists() and Path(path).stat().st_size > limit
            self._file = open(path, "w" if is_long else "a", encoding="utf-8", errors="replace", buffering=1)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._file is not None and self._left > 0:
            self._left -= len(text)
            self._file.write(text if self._left > 0 else self._last_line)
        return len(text)
