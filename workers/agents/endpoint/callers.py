"""Whose process sent a request: an API key is valid only for the processes of the episode that received it.

A command of another episode runs as the same user and can read the key in the environment of its neighbours. On Linux
the port of a request leads to a socket in /proc/net, this to a process, and its ancestor that enforces the limits
(`workers.agents.endpoint.limited`) names the digest of the key that its command received. Requests whose process is not
found are accepted and counted: they come from a container, another machine, another user, or a service outside the
episode.
"""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from verl_lite.machine.process_table import Status, Table, list_processes

Verdict = Literal["own", "foreign", "unknown"]

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LIMITED = str(Path(__file__).with_name("limited.py"))
"""The program that enforces limits, as it stands in the command line of its processes."""
_LOCAL_ADDRESS, _REMOTE_ADDRESS, _INODE = 1, 2, 9
"""Columns of the kernel's tables of TCP sockets."""


def key_digest(key: str) -> str:
    """Returns a text that identifies an API key and does not reveal it."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


class Callers:
    """Finds the processes that send requests.

    Args:
        pools: Returns the processes that start the commands.

    Attributes:
        counts: Numbers of connections by verdict.
    """

    def __init__(self, pools: Callable[[], Sequence[int]]) -> None:
        self._pools = pools
        self.counts: Counter[Verdict] = Counter()

    def verdict(self, key: str, client_port: int, server_port: int) -> Verdict:
        """Returns "own" if a process of the key's episode holds the client's end of a connection, and "foreign" if
        only processes of other episodes do."""
        verdict = self._verdict(key, client_port, server_port)
        self.counts[verdict] += 1
        return verdict

    def _verdict(self, key: str, client_port: int, server_port: int) -> Verdict:
        """Returns the verdict on a connection; see `verdict`."""
        # as the system names them among the open files of a process
        sockets = {f"socket:[{number}]" for number in socket_numbers(client_port, server_port)}
        if not sockets:
            return "unknown"

        table = list_processes()
        pools = set(self._pools())
        # several processes may share the socket, such as forks
        digests = set()
        for status in table.values():
            # only processes below a pool: their keys can be found, and the files of others are not looked at
            limiter = _child_of(pools, status, table)
            if limiter is not None and not sockets.isdisjoint(_open_files(status.pid)):
                digests.add(_digest_of(limiter.pid))
        if not digests:
            return "unknown"
        return "own" if key_digest(key) in digests else "foreign"


def socket_numbers(local_port: int, remote_port: int, tables: Iterable[str] = _TABLES) -> list[str]:
    """Returns the numbers (inodes) of this machine's TCP sockets with these two ports."""
    numbers = []
    for path in tables:
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            # a system without /proc, or a kernel without IPv6
            continue
        # after the heading
        for line in lines[1:]:
            fields = line.split()
            ports = (_port(fields[_LOCAL_ADDRESS]), _port(fields[_REMOTE_ADDRESS]))
            # a socket that no process holds any more has the number 0
            if ports == (local_port, remote_port) and fields[_INODE] != "0":
                numbers.append(fields[_INODE])
    return numbers


def _port(address: str) -> int:
    """Returns the port of an address in the kernel's tables, which write both in hexadecimal digits."""
    _, _, port = address.rpartition(":")
    return int(port, 16)


def _child_of(pools: set[int], status: Status, table: Table) -> Status | None:
    """Returns the process that a pool has started: this one or its ancestor; None for a process outside of the pools.

    Args:
        pools: Process ids of the pools' processes.
        status: The process.
        table: All processes.
    """
    current: Status | None = status
    # the table is not of one moment, so parents may form a circle
    for _ in range(len(table)):
        if current is None or current.parent in pools:
            return current
        current = table.get(current.parent)
    return None


def _digest_of(limiter: int) -> str:
    """Returns the digest in the arguments of a process that enforces limits; empty for other processes."""
    try:
        command_line = Path(f"/proc/{limiter}/cmdline").read_bytes().decode(errors="replace")
        words = command_line.split("\0")
        limits = json.loads(words[words.index(_LIMITED) + 1])
        return str(limits.get("key", ""))
    except (OSError, ValueError, IndexError, AttributeError):
        return ""


def _open_files(pid: int) -> set[str]:
    """Returns the names of the open files and sockets of a process; empty if they cannot be read."""
    files: set[str] = set()
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        # the process has ended, or is not dumpable
        return files
    for descriptor in descriptors:
        # it may have been closed meanwhile
        with contextlib.suppress(OSError):
            files.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return files
