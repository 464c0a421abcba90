"""Cleans up after a run: ends its processes and removes its temporary folders and shared memory.

Uses only the standard library. The run's processes are identified by an environment variable with the run's token,
which they all inherit, never by name. Each run starts `python watcher.py PID TOKEN FOLDER...` in a separate session; it
waits for the driver's death.
"""

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

# the guard starts it as a file, without any folder of packages
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from verl_lite.machine.process_table import (
    mapped_files,
    marked_processes,
    name_of_input,
    open_files,
    other_processes,
)
from verl_lite.machine.process_tree import RUN_MARK, end_processes

CLUSTER_MARK = "VERL_LITE_CLUSTER"
"""Environment variable of the processes of a run's Ray cluster, which end before the driver."""

LOOK_EVERY_S = 3.0
"""Interval between looks at the shared memory of processes that may end before the driver."""

_SHARED_MEMORY = "/dev/shm/"
_END_S = 10.0
_POLL_S = 0.05


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """Returns the files in /dev/shm that these processes have mapped."""
    paths = set()
    for pid in pids:
        for path in mapped_files(pid):
            is_removed = path.endswith("(deleted)")
            if path.startswith(_SHARED_MEMORY) and not is_removed:
                paths.add(path)
    return paths


def end(
    mark: str,
    token: str,
    folders: Sequence[str] = (),
    *,
    patience_s: float = 0.0,
    shared_memory: Collection[str] = (),
) -> None:
    """Kills marked processes and removes their shared memory and `folders`.

    Args:
        mark: environment variable that marks the processes.
        token: its value.
        folders: folders that only these processes use.
        patience_s: time that the processes have to end on their own, in seconds.
        shared_memory: known files in /dev/shm of these processes. Files that they still map are added.
    """
    shared_files = set(shared_memory)
    deadline = time.monotonic() + patience_s
    # several looks, because a process can fork while it is being ended
    while pids := marked_processes(mark, token, folders):
        shared_files |= shared_memory_of(pids)
        if time.monotonic() >= deadline:
            end_processes(pids)
        # blocked in the kernel, or a zombie that nobody reaps
        if time.monotonic() >= deadline + _END_S:
            break
        time.sleep(_POLL_S)

    if shared_files:
        # a file that another process has mapped, too, does not belong to the run alone
        in_use = shared_memory_of(other_processes())
        for path in shared_files - in_use:
            Path(path).unlink(missing_ok=True)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def watch(driver: int, token: str, folders: Sequence[str]) -> None:
    """Waits for the driver's death and then cleans up. Returns early if a byte arrives on standard input.

    The driver writes that byte if the run ended normally and has cleaned up after itself.
    """
    # batch systems send them to every process of a job
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    pipe = name_of_input()
    shared_files: set[str] = set()
    last_look = 0.0
    while os.getppid() == driver:
        readable, _, _ = select.select([sys.stdin], [], [], 1.0)
        if readable:
            if os.read(sys.stdin.fileno(), 1):
                return
            break
        if time.monotonic() - last_look > LOOK_EVERY_S:
            shared_files |= shared_memory_of(marked_processes(RUN_MARK, token))
            last_look = time.monotonic()

    # forks of the driver inherit its environment, which has no mark; the open pipe identifies them
    end_processes([pid for pid in other_processes() if pipe in open_files(pid)])
    end(RUN_MARK, token, folders, shared_memory=shared_files)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
