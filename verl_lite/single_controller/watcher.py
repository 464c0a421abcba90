"""Ends what a run leaves behind: its processes, temporary folder and shared memory. Standard library only.

Its processes are known by an environment variable with the run's token, which all inherit, and never by name. `python
watcher.py PID TOKEN FOLDER...`, started with each run in a session of its own, waits for the driver's death.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

RUN_MARK = "VERL_LITE_RUN"  # everything started while the run's cluster is up, the driver's own children included
CLUSTER_MARK = "VERL_LITE_CLUSTER"  # the cluster's processes only
_PROC = "/proc"
_PS = ("/bin/ps", "-axwwE", "-o", "pid=,command=")  # macOS, which has no /proc: each command with its environment
_SHARED_MEMORY = "/dev/shm/"
LOOK_EVERY_S = 3.0  # for shared memory of processes that may be gone when the driver dies


def marked_processes(mark: str, token: str, folders: Sequence[str] = ()) -> list[int]:
    """Living processes of this user whose initial environment has mark=token; this process is not among them.

    Some of Ray's processes overwrite theirs with a title: these are known by a file in one of `folders` that they have
    open. On macOS they are not found; they end by themselves, because their raylet, which is found, has ended.
    """
    if not os.path.isdir(_PROC):
        # without an environment of its own, `ps` does not list itself
        listing = subprocess.run(_PS, env={}, capture_output=True, text=True, errors="replace").stdout
        lines = [line.split(maxsplit=1) for line in listing.splitlines() if f"{mark}={token}" in line]
        return [int(pid) for pid, _ in lines if int(pid) != os.getpid()]
    wanted = f"{mark}={token}".encode()
    places = tuple(os.path.realpath(folder) + "/" for folder in folders)
    found = []
    for pid in _other_processes():
        try:
            environment = Path(_PROC, pid, "environ").read_bytes()
        except OSError:  # gone, or somebody else's
            continue
        overwritten = environment.startswith(b"\0")
        if wanted in environment.split(b"\0") or (overwritten and any(f.startswith(places) for f in _open_files(pid))):
            found.append(int(pid))
    return found


def _other_processes() -> list[str]:
    names = os.listdir(_PROC) if os.path.isdir(_PROC) else []
    return [name for name in names if name.isdigit() and int(name) != os.getpid()]


def _open_files(pid: str) -> list[str]:
    try:
        return [os.readlink(descriptor.path) for descriptor in os.scandir(f"{_PROC}/{pid}/fd")]
    except OSError:  # gone, or somebody else's
        return []


def shared_memory_of(pids: list[int]) -> set[str]:
    """Files in /dev/shm that these processes have mapped."""
    files = set()
    for pid in pids:
        try:
            maps = Path(_PROC, str(pid), "maps").read_text(errors="replace")
        except OSError:
            continue
        files |= {line.split(maxsplit=5)[5] for line in maps.splitlines() if _SHARED_MEMORY in line}
    return {name for name in files if name.startswith(_SHARED_MEMORY) and not name.endswith("(deleted)")}


def end(mark: str, token: str, folders: list[str], *, patience_s: float = 0.0, shared: set[str] | None = None) -> None:
    """Kill the marked processes, after giving them `patience_s` to end by themselves, and remove what they leave.

    shared: files in /dev/shm known to be theirs; those that they still have mapped are found here.
    """
    files = set(shared or ())
    deadline = time.monotonic() + patience_s
    while pids := marked_processes(mark, token, folders):
        files |= shared_memory_of(pids)
        if time.monotonic() >= deadline:
            kill(pids)
        if time.monotonic() >= deadline + 10:  # unkillable: in the kernel, or a zombie that nobody reaps
            break
        time.sleep(0.05)
    if files:
        others = shared_memory_of([int(pid) for pid in _other_processes()])
        for name in files - others:
            Path(name).unlink(missing_ok=True)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def kill(pids: list[int]) -> None:
    """SIGKILL to each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def watch(driver: int, token: str, folders: list[str]) -> None:
    """Wait for a byte on standard input (the run ended and cleaned up itself) or for the driver's death."""
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
    # Forks of the driver have its environment, which has no mark. They are found by the pipe, which they have open.
    kill([int(pid) for pid in _other_processes() if pipe in _open_files(pid)])
    end(RUN_MARK, token, folders, shared=shared)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
