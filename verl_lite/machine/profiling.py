"""Profiles of training steps, and the bytes that a process has moved.

`trainer.profile_steps` starts one torch profiler per process, which colocated roles share. It records CPU operations of
all threads, CUDA kernels if the process uses CUDA, and the ranges of `span`. If no profile is running, `span` does
nothing.
"""

import atexit
import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, record_function

TABLE_ROWS = 10

_profile: tuple[Path, profile] | None = None
_moved_bytes = 0


def start_profile(path: Path) -> None:
    """Starts the profile of this process. Does nothing if one for the same folder is running.

    A running profile of another folder, left by a run that failed in this process, is discarded.

    Args:
        path: path of the files without suffix.
    """
    global _profile
    if _profile is not None:
        running_path, running_profiler = _profile
        if running_path.parent == path.parent:
            return
        running_profiler.stop()

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    # all threads, because a rollout engine with devices of its own generates in a thread
    profiler = profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))
    profiler.start()
    _profile = path, profiler
    # a process that exits with a running profiler crashes
    atexit.register(stop_profile)


def stop_profile() -> str:
    """Ends the profile of this process, if there is one, and writes it.

    Writes the trace in Chrome's format to PATH.json.gz, and the table of the most expensive operations to PATH.txt.
    Returns the table; empty without a profile.
    """
    global _profile
    if _profile is None:
        return ""
    path, profiler = _profile
    _profile = None
    profiler.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(f"{path}.json.gz")
    table = most_expensive(profiler)
    path.with_suffix(".txt").write_text(table + "\n", encoding="utf-8")
    return table


def most_expensive(profiler: profile) -> str:
    """Returns a table of the operations with the most time of their own, without that of operations they call.

    The time is that on the GPU if any was recorded, else on the CPU.
    """
    # without the ranges of `span`, which contain the operations
    operations = [operation for operation in profiler.key_averages() if not operation.is_user_annotation]
    on_gpu = any(operation.self_device_time_total for operation in operations)
    device = "CPU"
    if on_gpu:
        device = "GPU"

    def own_time_us(operation: FunctionEventAvg) -> float:
        if on_gpu:
            return operation.self_device_time_total
        return operation.self_cpu_time_total

    total_us = sum(map(own_time_us, operations)) or 1.0
    rows = [f"{'operation':<60} {'calls':>8} {device} ms    share"]
    for operation in sorted(operations, key=own_time_us, reverse=True)[:TABLE_ROWS]:
        time_us = own_time_us(operation)
        share = time_us / total_us
        rows.append(f"{operation.key[:60]:<60} {operation.count:>8} {time_us / 1000:>8.1f} {share:>6.1%}")
    return "\n".join(rows)


def span(name: str) -> AbstractContextManager[object]:
    """Context manager that marks the block as a range of the running profile, and on CUDA as an NVTX range."""
    if _profile is None:
        return nullcontext()
    return _range(name)


@contextmanager
def _range(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as ranges:
        ranges.enter_context(record_function(name))
        if torch.cuda.is_initialized():
            ranges.enter_context(torch.cuda.nvtx.range(name))
        yield


def count_moved(size: int) -> None:
    """Counts bytes that this process moves.

    These are batches, weights for a rollout engine, and parameters and optimizer state between host and device.
    """
    global _moved_bytes
    _moved_bytes += size


def usage() -> np.ndarray:
    """Returns (2,): a clock in seconds and the bytes counted so far. The usage of a call is the difference of two."""
    return np.array([time.perf_counter(), _moved_bytes])
