"""The processes of this machine: their states, their marks in the environment, and their open files.

A mark is an environment variable that a process inherits and cannot remove from the environment that it started with.
Linux shows all of this in /proc. Elsewhere this module uses `ps`, which shows neither open nor mapped files.

Uses only the standard library, since programs that start quickly and the guard of a run import it.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = "/proc"
_PS_STATUS = ("/bin/ps", "-axo", "pid=,ppid=,pgid=,stat=")
_PS_ENVIRONMENT = ("/bin/ps", "-axwwE", "-o", "pid=,command=")
# together a second, which is the longest wait for one process
_STARTING_LOOKS = 1000
_STARTING_PAUSE_S = 0.001
# places of starttime and env_end among the fields of /proc/PID/stat that follow the name of the command
_START_TIME = 19
_ENV_END = 48


@dataclass(frozen=True)
class Status:
    """A process in the system's table.

    Attributes:
        pid: its id.
        parent: id of its parent.
        group: id of its process group.
        state: a letter, such as R (running), T (stopped) or Z (zombie).
        started: time at which it started, which distinguishes it from a later process with the same id; empty if
            unknown.
    """

    pid: int
    parent: int
    group: int
    state: str
    started: str = ""

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def has_ended(self) -> bool:
        """True for a zombie, which waits to be reaped by its parent."""
        return self.state in ("Z", "X")


Table = Mapping[int, Status]


def list_processes() -> dict[int, Status]:
    """Returns the processes of this machine, of all users, by their ids."""
    if not _has_proc():
        return _listed_by_ps()
    table = {}
    for pid in _listed_pids():
        status = status_of(pid)
        if status is not None:
            table[pid] = status
    return table


def status_of(pid: int) -> Status | None:
    """Returns the status of a process, or None if there is no such process."""
    if not _has_proc():
        return _listed_by_ps().get(pid)
    try:
        fields = _stat_fields(pid)
    except OSError:
        return None
    # the process ended while its file was read
    if not fields:
        return None
    return Status(
        pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        state=fields[0].decode(),
        started=fields[_START_TIME].decode(),
    )


def marked_processes(variable: str, value: str, folders: Sequence[str] = ()) -> list[int]:
    """Returns the ids of the other live processes of this user whose initial environment has a mark.

    A process that is not dumpable hides its environment and is not found.

    Args:
        variable: name of the environment variable.
        value: its value. A longer value that continues after a slash marks the process, too.
        folders: folders of temporary files that only marked processes use. They identify processes that have
            overwritten their environment with a title, as some of Ray's do. Without /proc these are not found; Ray's
            end on their own when their raylet, which is found, has ended.
    """
    return sorted(newest_marked_processes(variable, value, folders))


def newest_marked_processes(
    variable: str, value: str, folders: Sequence[str] = (), waits: bool = True
) -> Iterator[int]:
    """Yields the ids of `marked_processes` as soon as each is read, the newest first.

    A process that continues in ever new children lives for a moment only, and has ended before all processes are read.

    Args:
        variable: see `marked_processes`.
        value: see `marked_processes`.
        folders: see `marked_processes`.
        waits: whether to wait for processes that start a program at this moment and show no environment yet. They are
            left out otherwise.
    """
    if not _has_proc():
        yield from sorted(_marked_by_ps(f"{variable}={value}"), reverse=True)
        return
    entry = b"\0" + f"{variable}={value}".encode()
    resolved_folders = tuple(os.path.realpath(folder) + "/" for folder in folders)
    for pid in sorted(other_processes(), reverse=True):
        environment = _initial_environment(pid, waits)
        # overwritten with the title of the process
        if environment.startswith(b"\0"):
            is_marked = any(path.startswith(resolved_folders) for path in open_files(pid))
        else:
            framed = b"\0" + environment + b"\0"
            is_marked = entry + b"\0" in framed or entry + b"/" in framed
        if is_marked:
            yield pid


def other_processes() -> list[int]:
    """Returns the ids of all processes except this one. Returns nothing without /proc."""
    if not _has_proc():
        return []
    own = os.getpid()
    return [pid for pid in _listed_pids() if pid != own]


def open_files(pid: int) -> list[str]:
    """Returns the paths of a process's open files, and names such as pipe:[17] of its pipes.

    Returns nothing for a process that has ended or belongs to another user, and without /proc.
    """
    try:
        with os.scandir(f"{_PROC}/{pid}/fd") as descriptors:
            return [os.readlink(descriptor.path) for descriptor in descriptors]
    except OSError:
        return []


def mapped_files(pid: int) -> list[str]:
    """Returns the paths of the files in a process's memory. Returns nothing where `open_files` returns nothing."""
    try:
        maps = Path(_PROC, str(pid), "maps").read_text(errors="replace")
    except OSError:
        return []
    paths = []
    for line in maps.splitlines():
        columns = line.split(maxsplit=5)
        # anonymous memory has no sixth column
        if len(columns) == 6:
            paths.append(columns[5])
    return paths


def name_of_input() -> str:
    """Returns the name of this process's standard input, as `open_files` shows it; empty without /proc."""
    if not _has_proc():
        return ""
    return os.readlink(f"{_PROC}/self/fd/0")


def _has_proc() -> bool:
    return os.path.isdir(_PROC)


def _listed_pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def _stat_fields(pid: int) -> list[bytes]:
    """Returns the fields of /proc/PID/stat that follow the name of the command, which can contain anything."""
    with open(f"{_PROC}/{pid}/stat", "rb") as file:
        content = file.read()
    # the name is in brackets, and may contain brackets and blanks itself
    _, _, after_name = content.rpartition(b")")
    return after_name.split()


def _initial_environment(pid: int, waits: bool) -> bytes:
    """Returns the environment with which a process started; empty if it has ended or belongs to another user.

    Args:
        pid: id of the process.
        waits: whether to wait for a process that starts a program at this moment.
    """
    times_empty = 0
    with contextlib.suppress(OSError):
        for _ in range(_STARTING_LOOKS):
            with open(f"{_PROC}/{pid}/environ", "rb", buffering=0) as file:
                environment = file.read()
            if environment or not waits:
                return environment
            # fails for kernel threads and ended processes
            os.readlink(f"{_PROC}/{pid}/exe")
            # The kernel shows no environment and env_end=0 while a process starts a program, which takes long for a
            # process of low priority. The program may start between the two reads, so an empty one must be seen twice.
            if _stat_fields(pid)[_ENV_END] != b"0":
                times_empty += 1
            if times_empty == 2:
                break
            time.sleep(_STARTING_PAUSE_S)
    return b""


def _listed_by_ps() -> dict[int, Status]:
    table = {}
    for line in _output_of_ps(_PS_STATUS):
        pid, parent, group, state = line.split()
        table[int(pid)] = Status(int(pid), int(parent), int(group), state[0])
    return table


def _marked_by_ps(mark: str) -> list[int]:
    """Returns the other processes that `ps` of macOS lists with a mark in their environment."""
    pids = []
    for line in _output_of_ps(_PS_ENVIRONMENT):
        first_column, *_ = line.split(maxsplit=1)
        pid = int(first_column)
        if mark in line and pid != os.getpid():
            pids.append(pid)
    return pids


def _output_of_ps(command: Sequence[str]) -> list[str]:
    # `ps` runs with an empty environment, so that it does not list itself as marked
    listing = subprocess.run(command, env={}, capture_output=True, text=True, errors="replace")
    return listing.stdout.splitlines()
