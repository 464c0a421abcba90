"""Detects processes that no longer respond: stopped by a signal, or on a machine that is frozen or without power.

Ray's control store, raylets and workers are gRPC servers. Their threads answer the start of an HTTP/2 connection within
a millisecond, even while Python computes or holds its lock. The kernel accepts connections for a stopped process too,
so an accepted connection alone proves nothing.
"""

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import psutil

LOOK_EVERY_S = 2.0
# Consecutive looks without an answer after which a server is lost. With several looks, a driver that was itself
# suspended does not report others as lost.
LOST_AFTER_LOOKS = 8
_ANSWER_S = 2.0
_THREADS = 64
_PATIENCE_S = LOST_AFTER_LOOKS * LOOK_EVERY_S
# and an empty SETTINGS frame
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))

Address = tuple[str, int]


def silence_of(address: Address) -> str | None:
    """Returns the reason why the gRPC server at an address does not answer, or None if it answers."""
    try:
        with socket.create_connection(address, timeout=_ANSWER_S) as connection:
            connection.sendall(_GREETING)
            connection.recv(1)
    except ConnectionResetError:
        # A server that expects TLS closes the connection. Only a running process does that.
        return None
    except OSError as error:
        host, port = address
        return f"{host}:{port} does not answer ({error.strerror or error})"
    return None


def _refuses(address: Address) -> bool:
    """Returns True if a connection is refused, so that no process listens at the address."""
    try:
        socket.create_connection(address, timeout=_ANSWER_S).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


class Lookout:
    """Checks servers every LOOK_EVERY_S seconds and counts the consecutive looks without an answer of each server.

    Args:
        never_return: servers of this machine that nobody restarts. One refused connection means that such a server is
            lost.
    """

    def __init__(self, never_return: Collection[Address] = ()) -> None:
        self._never_return = never_return
        self._last_look = float("-inf")
        self._silent_looks: Counter[Address] = Counter()

    def lost(self, addresses: Collection[Address]) -> list[Address]:
        """Returns the lost servers among `addresses`. Looks again if the last look is at least LOOK_EVERY_S ago."""
        gone = [address for address in self._never_return if _refuses(address)]
        if gone:
            return gone
        now = time.monotonic()
        if addresses and now - self._last_look >= LOOK_EVERY_S:
            self._last_look = now
            self._look(addresses)
        return [address for address in addresses if self._silent_looks[address] >= LOST_AFTER_LOOKS]

    def _look(self, addresses: Collection[Address]) -> None:
        """Asks all servers at the same time, because each that does not answer takes _ANSWER_S seconds."""
        num_threads = min(_THREADS, len(addresses))
        with ThreadPoolExecutor(num_threads) as pool:
            silences = list(pool.map(silence_of, addresses))
        for address, silence in zip(addresses, silences, strict=True):
            if silence is None:
                self._silent_looks[address] = 0
            else:
                self._silent_looks[address] += 1


def silent_process(address: Address, pid: int | None = None) -> str:
    """Returns a sentence about the process of a lost server. On this machine it states whether the process is stopped.

    Args:
        address: address of the server.
        pid: its process id; None = the process of this machine that listens at the port.
    """
    host, port = address
    with contextlib.suppress(OSError, psutil.Error):
        # raises if the address belongs to another machine
        socket.create_server((host, 0)).close()
        if pid is None:
            pid = _listening_process(port)
        if pid is None:
            return f"nobody listens at {host}:{port} any more (killed, or the machine ran out of memory)"
        process = psutil.Process(pid)
        message = f"{process.name()} (pid {pid}) has not answered for {_PATIENCE_S:g} s"
        if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            message += ": it is stopped (SIGSTOP, Ctrl-Z or a debugger)"
        return message

    process_id = "" if pid is None else f" (pid {pid} on its machine)"
    return f"{host}:{port}{process_id} has not answered for {_PATIENCE_S:g} s"


def _listening_process(port: int) -> int | None:
    """Returns the process of this machine that listens at a port, or None."""
    for entry in psutil.net_connections("tcp"):
        if entry.status == psutil.CONN_LISTEN and entry.laddr.port == port:
            return entry.pid
    return None
