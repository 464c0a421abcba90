"""Finds processes that exist and do nothing: stopped by a signal, or on a machine that is frozen or without power.

Ray's control store, raylets and workers are gRPC servers. Their own threads answer the beginning of an HTTP/2
connection within a millisecond, also while Python computes or holds its lock. The kernel accepts connections for a
stopped process too, so an accepted connection alone proves nothing.
"""

import contextlib
import socket
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import psutil

LOOK_EVERY_S = 2.0
LOST_AFTER_LOOKS = 8  # without an answer, in a row: a driver that was suspended looks again before it blames others
_ANSWER_S = 2.0
_PATIENCE_S = LOST_AFTER_LOOKS * LOOK_EVERY_S
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # with an empty SETTINGS frame

Address = tuple[str, int]


def silence_of(address: Address) -> str | None:
    """Why the gRPC server at an address does not answer; None if it does."""
    try:
        with socket.create_connection(address, timeout=_ANSWER_S) as connection:
            connection.sendall(_GREETING)
            connection.recv(1)
    except ConnectionResetError:  # a server that expects TLS hangs up, which only a running process does
        return None
    except OSError as error:
        return f"{address[0]}:{address[1]} does not answer ({error.strerror or error})"
    return None


def _refuses(address: Address) -> bool:
    try:
        socket.create_connection(address, timeout=_ANSWER_S).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


class Lookout:
    """Looks at servers every LOOK_EVERY_S seconds and counts, for each, the looks in a row without an answer.

    never_return: servers of this machine that nobody starts again, so that the first refused connection tells.
    """

    def __init__(self, never_return: Collection[Address] = ()) -> None:
        self._never_return, self._looked, self._silent = never_return, float("-inf"), dict[Address, int]()

    def lost(self, addresses: Collection[Address]) -> list[Address]:
        """The addresses that are lost, after a look if the last one is some time ago."""
        if gone := [address for address in self._never_return if _refuses(address)]:
            return gone
        now = time.monotonic()
        if addresses and now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            with ThreadPoolExecutor(min(64, len(addresses))) as pool:
                for address, silence in zip(addresses, pool.map(silence_of, addresses), strict=True):
                    self._silent[address] = 0 if silence is None else self._silent.get(address, 0) + 1
        return [address for address in addresses if self._silent.get(address, 0) >= LOST_AFTER_LOOKS]


def silent_process(address: Address, pid: int | None = None) -> str:
    """A sentence about the process of a lost server, which tells on this machine whether the process is stopped.

    pid: where the caller knows it; on this machine it is found by the port.
    """
    host, port = address
    with contextlib.suppress(OSError, psutil.Error):
        socket.create_server((host, 0)).close()  # raises where the address is another machine's
        if pid is None:
            listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
            pid = next((one.pid for one in listening if one.laddr.port == port), None)
        if pid is None:
            return f"nobody listens at {host}:{port} any more (killed, or the machine is short of memory)"
        process = psutil.Process(pid)
        is_stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        state = ": it is stopped (SIGSTOP, Ctrl-Z or a debugger)" if is_stopped else ""
        return f"{process.name()} (pid {pid}) has not answered for {_PATIENCE_S:g} s{state}"
    known = "" if pid is None else f" (pid {pid} on its machine)"
    return f"{host}:{port}{known} has not answered for {_PATIENCE_S:g} s"
