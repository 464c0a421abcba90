"""Whose process sent a request: an API key is valid only for the processes of the episode that received it.

A command of another episode runs as the same user and can read the key in the environment of its neighbours. On Linux
the port of a request leads to a socket in /proc/net, this to a process, and its ancestor that enforces the limits
(`workers.agents.endpoint.limited`) names the digest of the key that its command received. Requests whose process is not
found
are accepted and counted: they come from a container, another machine, another user, or a service outside the episode.
"""

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


def key_digest(key: str) -> str:
    """Returns a text that identifies an API key and does not reveal it."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


class Callers:
    """Finds the processes that send requests.

    pools: returns the processes that start the commands. counts: numbers of connections by verdict.
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
        sockets = {f"socket:[{number}]" for number in socket_numbers(client_port, server_port)}
        if not sockets:
            return "unknown"

        table = list_processes()
        pools = set(self._pools())
        digests = {}
        for status in table.values():
            limiter = _child_of(pools, status, table)
            if limiter is not None and not sockets.isdisjoint(_open_files(status.pid)):
                digests[status.pid] = _digest_of(limiter.pid)
        if not digests:
            return "unknown"
        # processes that were forked share the socket
        return "own" if key_digest(key) in digests.values() else "foreign"


def socket_numbers(local_port: int, remote_port: int, tables: Iterable[str] = _TABLES) -> list[str]:
    """Returns the numbers (inodes) of this machine's TCP sockets with these two ports."""
    ports = (f"{local_port:04X}", f"{remote_port:04X}")
    numbers = []
    for path in tables:
        try:
            lines = Path(path).read_text().splitlines()[1:]
        except OSError:  # a system without /proc, or a kernel without IPv6
            continue
        for line in lines:
            fields = line.split()
            found = (fields[1].rpartition(":")[2], fields[2].rpartition(":")[2])
            if found == ports and fields[9] != "0":
                numbers.append(fields[9])
    return numbers


def _child_of(pools: set[int], status: Status, table: Table) -> Status | None:
    """Returns the ancestor of a process that a pool's process started, or the process itself; None if there is none."""
    current: Status | None = status
    for _ in range(len(table)):  # the table is not of one moment, so parents may form a circle
        if current is None or current.parent in pools:
            return current
        current = table.get(current.parent)
    return None


def _digest_of(limiter: int) -> str:
    """Returns the digest in the arguments of a process that enforces limits; empty for other processes."""
    try:
        words = Path(f"/proc/{limiter}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return str(json.loads(words[words.index(_LIMITED) + 1]).get("key", ""))
    except (OSError, ValueError, IndexError, AttributeError):
        return ""


def _open_files(pid: int) -> set[str]:
    files: set[str] = set()
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # the process has ended, or is not dumpable
        return files
    for name in names:
        try:
            files.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:  # it was closed meanwhile
            continue
    return files
