"""Profiles of training steps, and the bytes that a process has moved.

`trainer.profile_steps` starts one torch profiler per process, which colocated roles share. It records CPU operations of
all threads, CUDA kernels if the process uses CUDA, and the ranges of `span`. If no profile is running, `span` does
nothing.
"""

import atexit
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

TABLE_ROWS = 10

_profile: tuple[Path, profile] | None = None
_moved_bytes = 0


def start_profile(path: Path) -> None:
    """Starts the profile of this process. Does nothing if one for the same folder is running.

    path: path of the files without suffix. A running profile of another folder, left by a run that failed in this
    process, is discarded.
    """
    global _profile
    if _profile is not None:
        if _profile[0].parent == path.parent:
            return
        _profile[1].stop()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_initialized()
    # a rollout engine with devices of its own generates in a thread
    profiler = profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))
    profiler.start()
    _profile = path, profiler
    # a process that exits with a running profiler crashes
    atexit.register(stop_profile)


def stop_profile() -> str:
    """Ends the profile of this process, if there is one. Writes the trace in Chrome's format to PATH.json.gz, and the
    table of the most expensive operations to PATH.txt. Returns the table; empty without a profile."""
    global _profile
    if _profile is None:
        return ""
    (path, profiler), _profile = _profile, None
    profiler.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(f"{path}.json.gz")
    table = most_expensive(profiler)
    path.with_suffix(".txt").write_text(table + "\n", encoding="utf-8")
    return table


def most_expensive(profiler: profile) -> str:
    """Returns a table of the operations with the most time of their own, without that of operations they call: time on
    the GPU if any was recorded, else on the CPU."""
    operations = [each for each in profiler.key_averages() if not each.is_user_annotation]
    on_gpu = any(each.self_device_time_total for each in operations)
    times = {each: each.self_device_time_total if on_gpu else each.self_cpu_time_total for each in operations}
    total = sum(times.values()) or 1.0
    rows = [f"{'operation':<60} {'calls':>8} {'GPU' if on_gpu else 'CPU'} ms    share"]
    for each in sorted(operations, key=times.__getitem__, reverse=True)[:TABLE_ROWS]:
        rows.append(f"{each.key[:60]:<60} {each.count:>8} {times[each] / 1000:>8.1f} {times[each] / total:>6.1%}")
    return "\n".join(rows)


def span(name: str) -> AbstractContextManager[object]:
    """Context manager that marks the block as a range of the running profile, and on CUDA as an NVTX range."""
    return nullcontext() if _profile is None else _range(name)


@contextmanager
def _range(name: str) -> Iterator[None]:
    with record_function(name), torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else nullcontext():
        yield


def count_moved(size: int) -> None:
    """Counts bytes that this process moves: batches, weights for a rollout engine, and parameters and optimizer state
    between host and device."""
    global _moved_bytes
    _moved_bytes += size


def usage() -> np.ndarray:
    """Returns (2,): a clock in seconds and the bytes counted so far. Differences are the usage by a call."""
    return np.array([time.perf_counter(), _moved_bytes])
