"""Process trees: starting one, finding its processes, and ending all of them.

Code of users and answers may leave its process group, ignore SIGTERM, become a daemon, and fork while it is being
killed. A tree is therefore ended in this order: every process is stopped (SIGSTOP) before its children are listed, this
is repeated until no process runs, and then all are killed (SIGKILL). Processes whose parent has ended stay in the tree
if the process at its root is a subreaper (`become_subreaper`); otherwise a variable in their environment (`MARK`)
identifies them.

Uses only the standard library, since programs that start quickly and the guard of a run import it. Linux has the files
in /proc that this module reads; elsewhere it uses `ps`, and knows neither subreapers nor marks.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MARK = "VERL_LITE_TREE"
"""Environment variable of the processes of a tree. Its value begins with that of the tree that contains it."""

RUN_MARK = "VERL_LITE_RUN"
"""Environment variable of all processes of a run. The guard of the run ends those that remain after the driver."""

_PROC = "/proc"
_PS = ("/bin/ps", "-axo", "pid=,ppid=,pgid=,stat=")
_END_S = 10.0
_STOP_S = 1.0
_POLL_S = 0.002
_WAIT_S = 0.02
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


@dataclass(frozen=True)
class Status:
    """A process in the system's table.

    group: id of its process group. state: a letter, such as R (running), T (stopped) or Z (zombie). started: time at
    which it started, which distinguishes it from a later process with the same id; empty if unknown.
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


# ------------------------------------------------------------------------------------------- settings of this process


def become_subreaper() -> None:
    """Makes this process the parent of all descendants whose parent ends, as the process with id 1 is otherwise."""
    global _is_subreaper
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _is_subreaper = True


def die_with_parent(parent_pid: int) -> None:
    """Has Linux kill this process when the thread that started it ends, whatever this process is doing then.

    Other systems have no such call. There a process notices that the other end of a pipe was closed.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the call above
        os._exit(1)


def hide_memory() -> None:
    """Forbids other processes of the same user to read the memory and the initial environment of this process.

    Debuggers such as py-spy then need the rights of root, which can read everything as before.
    """
    _prctl(_PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(option, ctypes.c_ulong(value), 0, 0, 0)


# --------------------------------------------------------------------------------------------------- one tree of a run


class ProcessTree:
    """A child process in an operating-system session of its own, and all its descendants.

    The constructor starts it with the arguments of `subprocess.Popen`. `end` must be called, also if the process has
    ended by itself. process: the child. mark: value of MARK in the environment of its processes.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> None:
        self.mark = new_mark()
        with _starting:
            self.process = subprocess.Popen(
                command, env={**environment, MARK: self.mark}, start_new_session=True, **options
            )
            _started.add(self.process.pid)

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped the process, which then watches nobody."""
        status = status_of(self.process.pid)
        return status is not None and status.is_stopped

    def wait(self, timeout_s: float) -> int | None:
        """Returns the exit code of the process, or None if it does not end in time."""
        until = time.monotonic() + timeout_s
        while True:
            status = status_of(self.process.pid)
            if self.process.returncode is not None or status is None or status.has_ended:
                self._end_group()
                return self.process.wait()
            if time.monotonic() >= until:
                return None
            time.sleep(_WAIT_S)

    def end(self) -> None:
        """Kills the process and all its descendants, and waits for the end of the process. May be called again."""
        if self.process.returncode is None:
            end_below(self.process.pid)
            self._end_group()
            self.process.kill()
            self.process.wait()
        end_marked(self.mark, reaps=True)
        with _starting:
            _started.discard(self.process.pid)

    def _end_group(self) -> None:
        """Ends what remains of the group of a process whose exit code was not read yet, so that its id is still
        reserved."""
        own = self.process.pid
        if self.process.returncode is None:
            _end(lambda table: [each for each in table.values() if each.group == own and each.pid != own])


_is_subreaper = False
_starting = threading.Lock()
_started: set[int] = set()


def new_mark() -> str:
    """Returns a value of MARK for a tree that this process starts."""
    return f"{os.environ.get(MARK, '')}/{os.urandom(16).hex()}"


def end_adopted() -> None:
    """Ends children of this process that no `ProcessTree` has started, and everything below them.

    They are what remains of trees whose root ended first, if this process is a subreaper. Such a process starts no
    children in another way. Any other process, such as the driver of a run whose programs run inline, has adopted
    nobody, and its children are left alone.
    """
    if not _is_subreaper:
        return

    def adopted(table: Table) -> list[Status]:
        with _starting:
            children = [status for status in table.values() if status.parent == os.getpid()]
            return [status for status in children if status.pid not in _started]

    _end(adopted, reaps=True)


# ------------------------------------------------------------------------------------------------------------- ending

Table = Mapping[int, Status]


def end_below(root: int) -> None:
    """Ends all descendants of a process. If `root` is not this process, it is stopped and stays so: kill it afterwards.

    Returns after ten seconds at the latest, even if the kernel blocks one of the processes.
    """
    if root != os.getpid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(root, signal.SIGSTOP)
    _end(lambda table: [status for status in table.values() if status.parent == root], reaps=root == os.getpid())


def end_marked(mark: str, reaps: bool = False) -> None:
    """Ends the processes in whose initial environment MARK begins with this value, and everything below them.

    reaps: True to remove those from the system's table that are children of this process and were started by others.
    """
    _end(lambda table: [table[pid] for pid in marked(mark) if pid in table], reaps)


def end_processes(pids: Iterable[int]) -> None:
    """Ends processes and everything below them."""
    wanted = list(pids)
    _end(lambda table: [table[pid] for pid in wanted if pid in table])


def kill_group(leader: int) -> None:
    """Kills a child of this process whose exit status was not read yet, and its process group if it leads one."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)


def _end(find: Callable[[Table], Iterable[Status]], reaps: bool = False) -> None:
    """Ends the processes that `find` returns and everything below them, until none of them is alive."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        found = _stopped(find, deadline, reaps)
        for status in found:
            _send(status, signal.SIGKILL)
        alive = found
        while alive and time.monotonic() < deadline:
            for status in found if reaps else ():
                _reap(status.pid)
            alive = [status for status in alive if _is_alive(status)]
            time.sleep(_POLL_S if alive else 0.0)
        if not found:
            return


def _stopped(find: Callable[[Table], Iterable[Status]], deadline: float, reaps: bool) -> list[Status]:
    """Stops the processes that `find` returns and everything below them. Returns those that have not ended."""
    until = min(deadline, time.monotonic() + _STOP_S)
    while True:
        table = list_processes()
        found = [status for status in _with_descendants(find(table), table) if status.pid != os.getpid()]
        for status in found:
            if status.has_ended and reaps:
                _reap(status.pid)
        alive = [status for status in found if not status.has_ended]
        running = [status for status in alive if not status.is_stopped]
        for group in _own_groups(found, table):
            _stop_group(group)
        for status in running:
            _send(status, signal.SIGSTOP)
        # a process that was running may have forked after the table was read
        if not running or time.monotonic() > until:
            return alive


def _with_descendants(roots: Iterable[Status], table: Table) -> list[Status]:
    """Returns these processes and everything below them; the newest first, because it may be the one that forks."""
    children: dict[int, list[Status]] = {}
    for status in table.values():
        children.setdefault(status.parent, []).append(status)
    found: dict[int, Status] = {}
    waiting = list(roots)
    while waiting:
        status = waiting.pop()
        if status.pid not in found:
            found[status.pid] = status
            waiting += children.get(status.pid, [])
    return sorted(found.values(), key=lambda status: -status.pid)


def _own_groups(tree: Sequence[Status], table: Table) -> set[int]:
    """Returns the process groups of which all processes belong to the tree.

    A process that leads no session shares its group with others: the fork of a driver with the shell script, `make` or
    the batch job that started the driver. Such a group must not receive a signal.
    """
    inside = {status.pid for status in tree}
    groups = {status.group for status in tree if not status.has_ended}
    shared = {status.group for status in table.values() if status.pid not in inside}
    return groups - shared


def _stop_group(group: int) -> None:
    """Stops a process group at once, so that none of its processes escapes by forking while the others are listed."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group > 1 and group != os.getpgrp():
            os.killpg(group, signal.SIGSTOP)


def _send(status: Status, number: int) -> None:
    """Sends a signal to a process, unless it has ended and its id belongs to another one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not hasattr(os, "pidfd_open"):
            os.kill(status.pid, number)
            return
        handle = os.pidfd_open(status.pid)
        try:
            now = status_of(status.pid)
            if now is not None and now.started == status.started:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _is_alive(status: Status) -> bool:
    now = status_of(status.pid)
    return now is not None and now.started == status.started and not now.has_ended


def _reap(pid: int) -> None:
    """Removes a killed process from the system's table, if it is a child that no `ProcessTree` waits for."""
    if pid not in _started:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def reap_adopted(own: int) -> None:
    """Removes the zombies among the children of this process, except its own child `own`."""
    if not hasattr(os, "waitid"):  # a system without subreapers
        return
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != own:
            os.waitpid(ended.si_pid, os.WNOHANG)


# ------------------------------------------------------------------------------------------------------------- finding


def descendants(root: int) -> list[Status]:
    """Returns the processes below a process, without zombies."""
    table = list_processes()
    children = [status for status in table.values() if status.parent == root]
    return [status for status in _with_descendants(children, table) if not status.has_ended]


def list_processes() -> dict[int, Status]:
    """Returns the processes of this machine, of all users, by their ids."""
    if not os.path.isdir(_PROC):
        return _listed_by_ps()
    table = {}
    for name in os.listdir(_PROC):
        if name.isdigit() and (status := status_of(int(name))) is not None:
            table[status.pid] = status
    return table


def status_of(pid: int) -> Status | None:
    """Returns the status of a process, or None if there is no such process."""
    if not os.path.isdir(_PROC):
        return _listed_by_ps().get(pid)
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if not fields:  # the process ended while its file was read
        return None
    return Status(pid, int(fields[1]), int(fields[2]), fields[0].decode(), fields[19].decode())


def _listed_by_ps() -> dict[int, Status]:
    listing = subprocess.run(_PS, env={}, capture_output=True, text=True, errors="replace").stdout
    table = {}
    for line in listing.splitlines():
        pid, parent, group, state = line.split()
        table[int(pid)] = Status(int(pid), int(parent), int(group), state[0])
    return table


def marked(mark: str) -> list[int]:
    """Returns the other processes in whose initial environment MARK begins with this value.

    A process of the same user that is not dumpable hides its environment. Returns nothing on systems without /proc.
    """
    wanted = b"\0" + f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir(_PROC) if os.path.isdir(_PROC) else ():
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError), open(f"{_PROC}/{entry}/environ", "rb") as file:
                if wanted in b"\0" + file.read():
                    found.append(int(entry))
    return found
