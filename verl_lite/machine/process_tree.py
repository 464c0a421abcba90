"""Process trees: starting one, watching its root, and ending all of its processes.

Everything that runs code of users, of answers or of a sweep uses this module:

- `ProcessTree` starts a program: the processes of a pool, the commands of agents, the fork server of the sandbox, the
  renderer of chat templates, the runs of a sweep, and a run's guard and worker template.
- `ForkedProcess` forks this process: the confined programs of the sandbox.
- `become_subreaper`, `die_with_parent` and `hide_memory` are called by a process for itself.
- `end_below`, `end_marked`, `end_adopted` and `end_processes` end processes that others have started.

Code of users and answers may leave its process group, ignore SIGTERM, become a daemon, and fork while it is being
killed. A tree is therefore ended in this order: every process is stopped (SIGSTOP) before its children are listed, this
is repeated until no process runs, and then all are killed (SIGKILL). Processes whose parent has ended stay in the tree
if the process at its root is a subreaper (`become_subreaper`); otherwise a variable in their environment (`MARK`)
identifies them.

Uses only the standard library, since programs that start quickly and the guard of a run import it. Subreapers and the
death with the parent exist on Linux only; `verl_lite.machine.process_table` says what other systems show.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from verl_lite.machine.process_table import Status, Table, list_processes, newest_marked_processes, status_of

MARK = "VERL_LITE_TREE"
"""Environment variable of the processes of a tree. Its value begins with that of the tree that contains it."""

RUN_MARK = "VERL_LITE_RUN"
"""Environment variable of all processes of a run. The guard of the run ends those that remain after the driver."""

Stream = int | IO[bytes] | None
"""A stream of a new process, as `subprocess.Popen` takes it: a file, `subprocess.PIPE`, ...; None inherits it."""

_END_S = 10.0
_STOP_S = 1.0
_LOOKS = 8
"""Looks at all processes that find none with a mark before a tree counts as ended."""
_POLL_S = 0.002
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.02
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36

_is_subreaper = False
# the roots of the trees of this process
_started: set[int] = set()
# held while a root runs that is not in `_started` yet
_starting = threading.Lock()


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
    # the parent died before the call above
    if os.getppid() != parent_pid:
        os._exit(1)


def hide_memory() -> None:
    """Forbids other processes of the same user to read the memory and the initial environment of this process.

    Debuggers such as py-spy then need the rights of root, which can read everything as before.
    """
    _prctl(_PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    """Sets an attribute of this process. Does nothing on systems other than Linux, which do not have the call."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(option, ctypes.c_ulong(value), 0, 0, 0)


# ----------------------------------------------------------------------------------------------- starting and watching


class ProcessTree:
    """A program in an operating-system session of its own, and all processes that it starts.

    The constructor starts the program. `end` must be called, also if the program has ended by itself.

    Attributes:
        process: the program's process, the root of the tree.
        mark: value of MARK in the environment of the tree's processes.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        cwd: str | Path | None = None,
        pass_fds: Sequence[int] = (),
        before_exec: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            command: the program and its arguments.
            environment: all environment variables of the program, to which MARK is added.
            stdin, stdout, stderr: its streams.
            cwd: its folder; None = that of this process.
            pass_fds: further files that stay open in it, under the same numbers.
            before_exec: called in the new process before the program replaces it.
        """
        self.mark = new_mark()
        with _starting:
            self.process = subprocess.Popen(
                command,
                env={**environment, MARK: self.mark},
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=cwd,
                pass_fds=pass_fds,
                preexec_fn=before_exec,
                start_new_session=True,
            )
            _started.add(self.process.pid)

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped the process, which then watches nobody."""
        status = status_of(self.process.pid)
        return status is not None and status.is_stopped

    def wait(self, timeout_s: float) -> int | None:
        """Waits for the end of the program, and then ends the other processes of its process group.

        Returns the exit code, or minus the signal that killed the program; None if it does not end in time.
        """
        until = time.monotonic() + timeout_s
        pause_s = _SHORTEST_WAIT_S
        while self.process.returncode is None and not _has_exited(self.process.pid):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return None
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
        self._end_group()
        return self.process.wait()

    def end(self) -> None:
        """Kills all processes of the tree, and waits for the end of the program. May be called again."""
        if self.process.returncode is None:
            end_below(self.process.pid)
            self._end_group()
            self.process.kill()
            self.process.wait()
        end_marked(self.mark, reaps=True)
        with _starting:
            _started.discard(self.process.pid)

    def _end_group(self) -> None:
        """Ends the other processes of the program's group."""
        # once the exit code is read, the id may belong to another group
        if self.process.returncode is not None:
            return
        root = self.process.pid

        def others(table: Table) -> list[Status]:
            return [status for status in table.values() if status.group == root and status.pid != root]

        _end(others)


class ForkedProcess:
    """A fork of this process that runs one function and exits.

    Only for a process with one thread that has used neither torch nor Ray: a fork removes what the other threads hold,
    and the destructors of native libraries can then wait for threads that the fork does not have.

    The function may call `os.setsid`; then the processes of its process group belong to it. `kill` and `wait` must be
    called. Unlike a `ProcessTree`, it does not find descendants in other groups: the function must prevent them.

    Args:
        run: called in the fork. It returns the exit status, which is 1 if the function raises an exception.

    Attributes:
        pid: its id.
    """

    def __init__(self, run: Callable[[], int]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            exit_status = 1
            try:
                exit_status = run()
            finally:
                # the fork must not return into the code of this process
                os._exit(exit_status)

    def has_exited(self) -> bool:
        """Returns True when the process has ended. Its id stays reserved until `wait`."""
        return _has_exited(self.pid)

    def kill(self) -> None:
        """Kills the process and the group that it leads. Must not be called after `wait`, which frees the id."""
        # the process itself, too: it may not have become the leader of a group yet
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Waits for the end of the process. Returns its exit status, or minus the signal that killed it."""
        _, wait_status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(wait_status)


def _has_exited(pid: int) -> bool:
    """Returns True if a child of this process has ended. Leaves its exit status to be read."""
    if hasattr(os, "waitid"):
        try:
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # its exit status was read already
            return True
    status = status_of(pid)
    return status is None or status.has_ended


def new_mark() -> str:
    """Returns a value of MARK for a tree that this process starts."""
    outer_mark = os.environ.get(MARK, "")
    own_mark = os.urandom(16).hex()
    return f"{outer_mark}/{own_mark}"


def descendants(root: int) -> list[Status]:
    """Returns the processes below a process, without zombies."""
    table = list_processes()
    children = [status for status in table.values() if status.parent == root]
    tree = _with_descendants(children, table)
    return [status for status in tree if not status.has_ended]


# ------------------------------------------------------------------------------------------------------------- ending


def end_below(root: int) -> None:
    """Ends all descendants of a process. If `root` is not this process, it is stopped and stays so: kill it afterwards.

    Returns after ten seconds at the latest, even if the kernel blocks one of the processes.
    """
    is_own = root == os.getpid()
    if not is_own:
        # otherwise it could start further processes meanwhile
        with contextlib.suppress(ProcessLookupError):
            os.kill(root, signal.SIGSTOP)

    def children(table: Table) -> list[Status]:
        return [status for status in table.values() if status.parent == root]

    _end(children, reaps=is_own)


def end_marked(mark: str, reaps: bool = False) -> None:
    """Ends the processes of the tree with this mark and of the trees that it contains, and everything below them.

    Args:
        mark: value of MARK.
        reaps: True to remove those from the system's table that are children of this process and were started by
            others.
    """

    def marked(table: Table) -> list[Status]:
        # A process that continues in ever new children can end before a look reads it, and its child starts after the
        # list was read. Therefore one look that finds nothing does not say that nothing is left. Only the last look
        # waits for processes that start a program and show no mark yet, because waiting gives the others time.
        for look in range(_LOOKS):
            statuses = []
            for pid in newest_marked_processes(MARK, mark, waits=look == _LOOKS - 1):
                # it may have started after the table was read
                status = table.get(pid) or status_of(pid)
                if status is not None:
                    # at once, before it continues in a child
                    _send(status, signal.SIGSTOP)
                    statuses.append(status)
            if statuses:
                return statuses
        return []

    _end(marked, reaps)


def end_adopted() -> None:
    """Ends children of this process that no `ProcessTree` has started, and everything below them.

    They are what remains of trees whose root ended first, if this process is a subreaper. Such a process starts no
    children in another way. Any other process, such as the driver of a run whose programs run inline, has adopted
    nobody, and its children are left alone.
    """
    if not _is_subreaper:
        return

    own = os.getpid()

    def adopted(table: Table) -> list[Status]:
        with _starting:
            return [status for status in table.values() if status.parent == own and status.pid not in _started]

    _end(adopted, reaps=True)


def end_processes(pids: Iterable[int]) -> None:
    """Ends processes and everything below them."""
    root_pids = list(pids)

    def roots(table: Table) -> list[Status]:
        return [table[pid] for pid in root_pids if pid in table]

    _end(roots)


def _end(find_roots: Callable[[Table], Iterable[Status]], reaps: bool = False) -> None:
    """Ends the processes that `find_roots` returns and everything below them, until none of them is alive."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        stopped = _stop(find_roots, deadline, reaps)
        if not stopped:
            return
        for status in stopped:
            _send(status, signal.SIGKILL)
        _wait_for_end(stopped, deadline, reaps)


def _stop(find_roots: Callable[[Table], Iterable[Status]], deadline: float, reaps: bool) -> list[Status]:
    """Stops the processes that `find_roots` returns and everything below them. Returns those that have not ended."""
    own = os.getpid()
    # a process that the kernel blocks does not stop; then the others are killed all the same
    until = min(deadline, time.monotonic() + _STOP_S)
    while True:
        table = list_processes()
        tree = _with_descendants(find_roots(table), table)
        # this process may itself be below one of the roots
        tree = [status for status in tree if status.pid != own]
        if reaps:
            _reap(tree)
        alive = [status for status in tree if not status.has_ended]
        running = [status for status in alive if not status.is_stopped]
        for group in _own_groups(tree, table):
            _stop_group(group)
        for status in running:
            _send(status, signal.SIGSTOP)
        # a process that was running may have forked after the table was read
        if not running or time.monotonic() > until:
            return alive


def _wait_for_end(killed: Sequence[Status], deadline: float, reaps: bool) -> None:
    """Waits until the processes are gone from the system's table, or have become zombies that others must reap."""
    alive = list(killed)
    while alive and time.monotonic() < deadline:
        if reaps:
            _reap(killed)
        alive = [status for status in alive if _is_alive(status)]
        if alive:
            time.sleep(_POLL_S)


def _with_descendants(roots: Iterable[Status], table: Table) -> list[Status]:
    """Returns these processes and everything below them; the newest first, because it may be the one that forks."""
    children: dict[int, list[Status]] = {}
    for status in table.values():
        children.setdefault(status.parent, []).append(status)

    tree: dict[int, Status] = {}
    waiting = list(roots)
    while waiting:
        status = waiting.pop()
        if status.pid not in tree:
            tree[status.pid] = status
            waiting += children.get(status.pid, [])
    return sorted(tree.values(), key=lambda status: -status.pid)


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
    """Returns False once a process has ended, also if its id belongs to another one by then."""
    now = status_of(status.pid)
    return now is not None and now.started == status.started and not now.has_ended


def _reap(processes: Iterable[Status]) -> None:
    """Removes ended processes from the system's table if they are children for which no `ProcessTree` waits."""
    for status in processes:
        if status.pid not in _started:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(status.pid, os.WNOHANG)


def reap_adopted(own: int) -> None:
    """Removes the zombies among the children of this process, except its own child `own`."""
    if not hasattr(os, "waitid"):  # a system without subreapers
        return
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == own:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
