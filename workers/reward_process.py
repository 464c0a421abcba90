"""The inside of a reward process: reads batches of samples from the pool, scores them one by one, sends results back.

Started by `workers.reward_pool` as a bare interpreter, so that it imports neither torch nor the caller's main module.
It tells through a page of shared memory which sample it works on and since when: that is how the pool knows, when it
has to kill this process or finds it dead, which sample was the culprit.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import io
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

from verl_lite.config import RewardConfig
from verl_lite.rewards import RewardFunction, RewardItem, RewardResult, load_reward, score_item

PROGRESS = struct.Struct("dq")
"""The shared page: when the current sample was begun (`time.monotonic`, one clock for all processes), and its index."""

_FLUSH_S = 0.05
_PRINTED_BYTES_MAX = 10 << 20
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ProcessOptions:
    """What a reward process has to know. modules: to import, for the rewards that they register. log_path: where prints
    of the reward function go; None = nowhere."""

    config: RewardConfig
    modules: tuple[str, ...]
    log_path: str | None


def main(connection_fd: int, progress_fd: int, parent_pid: int) -> None:
    """Serves until the pool closes its end. First message: `ProcessOptions`; answered with None, or with the traceback
    of what went wrong in loading the reward function."""
    _die_with_parent(parent_pid)
    faulthandler.enable()  # a segmentation fault leaves its stack in stderr, which the pool keeps
    connection = Connection(connection_fd)
    progress = mmap.mmap(progress_fd, PROGRESS.size)
    options: ProcessOptions = connection.recv()
    sys.stdout = sys.stderr = CappedLog(options.log_path, _PRINTED_BYTES_MAX)
    try:
        function = load_function(options.config, options.modules)
    except Exception:  # the user's module may raise anything; the pool reports it
        connection.send(traceback.format_exc())
        return
    connection.send(None)
    _serve(connection, progress, function)


def load_function(config: RewardConfig, modules: tuple[str, ...]) -> RewardFunction:
    """Imports `modules`, for the rewards that they register, and gives the reward function of the run."""
    for module in modules:
        importlib.import_module(module)
    return load_reward(config)


def _serve(connection: Connection, progress: mmap.mmap, function: RewardFunction) -> None:
    pid = os.getpid()
    while True:
        try:
            batch: list[RewardItem] = connection.recv()
        except EOFError:
            return
        results: list[RewardResult] = []
        flushed = time.monotonic()
        for index, item in enumerate(batch):
            write_progress(progress, index)
            results.append(score_item(function, item))
            if os.getpid() != pid:  # a fork inside the reward function came back here: only the original may go on
                os._exit(1)
            if time.monotonic() - flushed > _FLUSH_S and index + 1 < len(batch):
                connection.send(results)
                results, flushed = [], time.monotonic()
        write_progress(progress, len(batch))
        connection.send(results)


def write_progress(page: mmap.mmap, index: int) -> None:
    """Notes that sample `index` begins now. In one piece: `pack_into` would first fill the page with zeros, and a pool
    that looks at that instant would see a sample that began at time 0, long overdue."""
    page[: PROGRESS.size] = PROGRESS.pack(time.monotonic(), index)


def _die_with_parent(parent_pid: int) -> None:
    """On Linux the kernel kills this process when the pool's thread ends, whatever this process is doing then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


class CappedLog(io.TextIOBase):
    """Takes what a reward function prints, up to a number of bytes; then one line says so and the rest is dropped."""

    def __init__(self, path: str | None, limit: int) -> None:
        self._file = open(path, "a", encoding="utf-8", errors="replace", buffering=1) if path else None
        self._left = limit

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._file is not None and self._left > 0:
            self._left -= len(text)
            self._file.write(text if self._left > 0 else "\n[more output of this reward process is dropped]\n")
        return len(text)
