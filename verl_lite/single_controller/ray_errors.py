"""What went wrong in a worker's process, in one sentence: what it raised, why it died, what it held, where it stands.

Ray's own messages are long, full of guesses and of its internal names; what is known goes into the error, the rest into
its notes.
"""

from __future__ import annotations

import faulthandler
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayError, RayTaskError

from verl_lite.errors import WorkerDiedError, add_circumstances

_LAST_LOG_LINES = 40  # room for the stack of a crash in native code
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|^ *\^+ *\n", re.MULTILINE)  # colours, marks under lines that Ray left out
# What a rank says when another one has gone: a consequence, not the cause.
_CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Gloo", "gloo")
_MEMORY_USED = re.compile(r"was (\S+) used / (\S+) limit")
_MEMORY_LIMIT = re.compile(r"\((\S+%) of \d+B limit\)")
_EXIT_CODE = re.compile(r"exits with an exit code (\d+)")
DRIVER_LOG = "driver.log"
_STACKS_AFTER = 0.9  # of the stall timeout: before the driver ends the process
GIB = 1 << 30
_CALLS_SHOWN = 3
_LEAST_GROWTH_SHOWN = 64 << 20  # below are fluctuations
_LARGEST_USERS = re.compile(r"^\d+\t\S+\t.*$", re.MULTILINE)


def original_error(error: RayTaskError) -> Exception:
    """What the worker raised, with its traceback as a note."""
    cause: Exception = error.cause
    text = _DECORATION.sub("", str(error)).strip()
    cause.add_note(f"remote traceback:\n{text}")
    add_circumstances(cause, traceback=text)
    return cause


def death(
    error: RayError,
    role: str,
    rank: int | None,
    method: str,
    log: str | None,
    memory: str,
    node: str | None = None,
) -> WorkerDiedError:
    """A worker's process that ended, or whose answer is lost, as an error that says what is known of the cause.

    rank: None for a service. log: file with what the process printed; memory: a sentence on what it held. node: the
    machine, where there are several.
    """
    died = WorkerDiedError(f"{_who(role, rank, node)} died in {method}: {cause_of_death(error)}")
    add_circumstances(died, role=role, rank=rank, node=node, method=method, log=log)
    if memory:
        died.add_note(memory)
    users = _LARGEST_USERS.findall(str(error)) if isinstance(error, OutOfMemoryError) else []
    if users:
        died.add_note("the largest processes of the machine then (pid, GB, command):\n" + "\n".join(users[:5]))
    if log is not None and Path(log).is_file():
        tail = "\n".join(Path(log).read_text(errors="replace").splitlines()[-_LAST_LOG_LINES:])
        died.add_note(f"the end of {log}:\n{tail}")
    return died


def machine_lost(reason: str, node: str, role: str, rank: int | None, method: str, log: str | None) -> WorkerDiedError:
    """A worker whose machine does not answer any more. reason: what was seen of that."""
    died = WorkerDiedError(f"{_who(role, rank, node)} is lost in {method}: its machine has left the cluster: {reason}")
    add_circumstances(died, role=role, rank=rank, node=node, method=method, log=log)
    return died


def _who(role: str, rank: int | None, node: str | None) -> str:
    who = role if rank is None else f"{role} rank {rank}"
    return who if node is None else f"{who} on node {node}"


def cause_of_death(error: RayError) -> str:
    """Why a process ended, in one sentence, without Ray's list of guesses."""
    text = str(error)
    if isinstance(error, OutOfMemoryError):
        used, limit = _MEMORY_USED.search(text), _MEMORY_LIMIT.search(text)
        numbers = f" ({used[1]} of {used[2]} in use)" if used else ""
        share = f" above {limit[1]}" if limit else ""
        return (
            f"the machine's memory ran out{numbers}; Ray ends workers{share}. Take less of it (smaller micro-batches, "
            "rollout.kv_cache_memory_mb, trainer.n_gpus_per_node), or wait for the neighbours"
        )
    if "connection error code 2" in text:  # all that Ray knows: the process was there, then its socket closed
        return (
            "its process ended without an exception: kill -9, the kernel's out-of-memory killer (`dmesg` knows), or a "
            "crash in native code (its log ends with a stack)"
        )
    if isinstance(error, ActorUnavailableError):
        return "the connection to its process was closed: the process has ended, or its machine has left the cluster"
    if code := _EXIT_CODE.search(text):
        return f"its process ended itself by a call of exit, with code {code[1]}"
    return " ".join(text.split()).split("The actor is dead because ")[-1].split(" Some common causes")[0]


def is_consequence(error: Exception) -> bool:
    """Whether an error says no more than that another rank has gone."""
    return not isinstance(error, WorkerDiedError) and any(sign in str(error) for sign in _CONSEQUENCES)


@contextmanager
def stacks_if_it_stalls(timeout_s: float | None) -> Iterator[None]:
    """Writes the stacks of all threads to standard error when the block takes nearly that long; it goes on then."""
    if timeout_s is None:
        yield
        return
    faulthandler.dump_traceback_later(_STACKS_AFTER * timeout_s)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def save_driver_stacks(log: str | None, why: str) -> str:
    """Appends the stacks of this process's threads to `driver.log` beside a worker's log. Gives a sentence on it."""
    if log is None:
        return ""
    path = Path(log).parent / DRIVER_LOG
    with path.open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    return f"the driver's own stacks are in {path}"


class SlotMemory:
    """Resident memory of the processes on this machine by rank, and in whose calls it grew. Read from /proc while the
    driver waits, so that a process that was killed has been seen shortly before."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._start: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._growth: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def watch(self, rank: int, pid: int) -> None:
        """From now on `rank` is this process of this machine."""
        self._pids[rank] = pid
        size = resident_bytes(pid)
        if size is not None:
            self._start[rank] = self._last[rank] = size

    def look(self, rank: int, call: str) -> None:
        """What the process has grown since the last look, it has grown in `call`."""
        size = resident_bytes(self._pids[rank]) if rank in self._pids else None
        if size is not None:
            self._growth[rank][call] += size - self._last.get(rank, size)
            self._last[rank] = size

    def describe(self, rank: int) -> str:
        """One sentence: how large it was at its start and when last seen, and the calls in which it grew most."""
        if rank not in self._last:
            return ""
        start, last = (f"{sizes[rank] / GIB:.2f} GiB" for sizes in (self._start, self._last))
        grown = sorted(self._growth[rank].items(), key=lambda item: -item[1])[:_CALLS_SHOWN]
        most = ", ".join(f"{size / GIB:+.2f} in {call}" for call, size in grown if size >= _LEAST_GROWTH_SHOWN)
        growth = f"; it grew most by {most}" if most else ""
        return f"memory of rank {rank}: {start} at its start, {last} when last seen{growth}"


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process; None if it is gone, or where there is no /proc."""
    try:
        pages = int(Path("/proc", str(pid), "statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") or None  # a zombie has none
