"""Cleans up after a run: ends its processes and removes its temporary folders and shared memory.

Uses only the standard library. The run's processes are identified by an environment variable with the run's token,
which they all inherit, never by name. Each run starts `python watcher.py PID TOKEN FOLDER...` in a separate session; it
waits for the driver's death.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # the guard starts it as a file, without any folder of packages
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from verl_lite.machine import process_tree

RUN_MARK = process_tree.RUN_MARK  # marks all processes that start while the run's cluster is up
CLUSTER_MARK = "VERL_LITE_CLUSTER"  # marks only the processes of the cluster
_PROC = "/proc"
_PS = ("/bin/ps", "-axwwE", "-o", "pid=,command=")  # lists commands with their environment on macOS, without /proc
_SHARED_MEMORY = "/dev/shm/"
LOOK_EVERY_S = 3.0  # interval between looks at the shared memory of processes that may end before the driver


def marked_processes(mark: str, token: str, folders: Sequence[str] = ()) -> list[int]:
    """Returns the ids of this user's other live processes whose initial environment contains mark=token.

    Some Ray processes overwrite their environment with a title; an open file in one of `folders` identifies them. On
    macOS this function does not find them, but they end on their own once their raylet, which it finds, has ended.
    """
    if not os.path.isdir(_PROC):
        # `ps` runs with an empty environment, so it does not list itself
        listing = subprocess.run(_PS, env={}, capture_output=True, text=True, errors="replace").stdout
        lines = [line.split(maxsplit=1) for line in listing.splitlines() if f"{mark}={token}" in line]
        return [int(pid) for pid, _ in lines if int(pid) != os.getpid()]
    wanted = f"{mark}={token}".encode()
    places = tuple(os.path.realpath(folder) + "/" for folder in folders)
    found = []
    for pid in _other_processes():
        environment = _environment(pid)
        overwritten = environment.startswith(b"\0")
        if wanted in environment.split(b"\0") or (overwritten and any(f.startswith(places) for f in _open_files(pid))):
            found.append(int(pid))
    return found


def _environment(pid: str) -> bytes:
    """Returns the initial environment of a process; empty if it has ended or belongs to another user."""
    process, times_empty = Path(_PROC, pid), 0
    try:
        for _ in range(1000):
            if environment := (process / "environ").read_bytes():
                return environment
            os.readlink(process / "exe")  # fails for kernel threads and ended processes
            # The kernel shows no environment and env_end=0 while a process starts a program, which takes long for a
            # process of low priority. The program may start between the two reads, so an empty one must be seen twice.
            env_end = (process / "stat").read_bytes().rpartition(b")")[2].split()[48]
            times_empty += env_end != b"0"
            if times_empty == 2:
                break
            time.sleep(0.001)
    except OSError:
        return b""
    return b""


def _other_processes() -> list[str]:
    names = os.listdir(_PROC) if os.path.isdir(_PROC) else []
    return [name for name in names if name.isdigit() and int(name) != os.getpid()]


def _open_files(pid: str) -> list[str]:
    try:
        return [os.readlink(descriptor.path) for descriptor in os.scandir(f"{_PROC}/{pid}/fd")]
    except OSError:  # the process has ended or belongs to another user
        return []


def shared_memory_of(pids: list[int]) -> set[str]:
    """Returns the files in /dev/shm that these processes have mapped."""
    files = set()
    for pid in pids:
        try:
            maps = Path(_PROC, str(pid), "maps").read_text(errors="replace")
        except OSError:
            continue
        files |= {line.split(maxsplit=5)[5] for line in maps.splitlines() if _SHARED_MEMORY in line}
    return {name for name in files if name.startswith(_SHARED_MEMORY) and not name.endswith("(deleted)")}


def end(mark: str, token: str, folders: list[str], *, patience_s: float = 0.0, shared: set[str] | None = None) -> None:
    """Kills the marked processes and removes `folders` and their shared memory.

    Args:
        patience_s: time that the processes have to end on their own, in seconds.
        shared: known files in /dev/shm of these processes; files that they still map are added.
    """
    files = set(shared or ())
    deadline = time.monotonic() + patience_s
    while pids := marked_processes(mark, token, folders):
        files |= shared_memory_of(pids)
        if time.monotonic() >= deadline:
            process_tree.end_processes(pids)
        if time.monotonic() >= deadline + 10:  # unkillable: blocked in the kernel, or a zombie that nobody reaps
            break
        time.sleep(0.05)
    if files:
        others = shared_memory_of([int(pid) for pid in _other_processes()])
        for name in files - others:
            Path(name).unlink(missing_ok=True)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def watch(driver: int, token: str, folders: list[str]) -> None:
    """Waits for the driver's death and then cleans up. Returns early if a byte arrives on standard input.

    The driver writes that byte if the run ended normally and has cleaned up after itself.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # batch systems send them to every process of a job
        signal.signal(number, signal.SIG_IGN)
    pipe = os.readlink(f"{_PROC}/self/fd/0") if os.path.isdir(_PROC) else ""
    shared: set[str] = set()
    looked = 0.0
    while os.getppid() == driver:
        readable, _, _ = select.select([sys.stdin], [], [], 1.0)
        if readable:
            if os.read(sys.stdin.fileno(), 1):
                return
            break
        if time.monotonic() - looked > LOOK_EVERY_S:
            shared |= shared_memory_of(marked_processes(RUN_MARK, token))
            looked = time.monotonic()
    # Forks of the driver inherit its environment, which has no mark; the open pipe identifies them.
    process_tree.end_processes([int(pid) for pid in _other_processes() if pipe in _open_files(pid)])
    end(RUN_MARK, token, folders, shared=shared)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
