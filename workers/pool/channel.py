"""What goes between a pool and its processes: calls there, replies back, over a socket pair.

A message is a number and bytes. The number is that of a session, or CONTROL. The pool's end never blocks, whatever the
process does; the process's end blocks.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any

CONTROL = -1

_HEADER = struct.Struct("<qq")
_CHUNK_BYTES = 1 << 18

Frame = tuple[int, bytes]


@dataclass(frozen=True)
class Call:
    """A call of a session, which has one under way at most. lane: of calls with the same, one runs at a time in each
    process; None = any number."""

    session: int
    payload: Any
    lane: str | None = None


@dataclass(frozen=True)
class Reply:
    """What a call came to. seconds: it took. error: it failed, as a traceback or a sentence; there is no value then.
    is_timeout: it failed because it took too long."""

    session: int
    value: Any = None
    seconds: float = 0.0
    error: str | None = None
    is_timeout: bool = False


@dataclass(frozen=True)
class Start:
    """The first message to a process. make: pickled; called without arguments, it gives the `Handler`. log_path: where
    prints go, None = nowhere. overdue: what is said of a call that takes longer than timeout_s."""

    make: bytes
    threads: int
    log_path: str | None
    overdue: str
    timeout_s: float


@dataclass(frozen=True)
class Loaded:
    """The process is ready. info: its handler's."""

    info: Any


@dataclass(frozen=True)
class NotLoaded:
    """The handler cannot be made. error: the traceback."""

    error: str


@dataclass(frozen=True)
class Spoiled:
    """Something goes on that should have ended: the process has to be replaced."""


@dataclass(frozen=True)
class Pong:
    """The answer to an empty control message: the process is not frozen. stacks: of each call that runs."""

    stacks: dict[int, str]


Control = Loaded | NotLoaded | Spoiled | Pong


class PoolEnd:
    """Sends what the socket takes and keeps the rest for the next `flush`; receives what there is."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent, self._received = bytearray(), bytearray()
        self.is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, number: int, message: bytes) -> None:
        """Adds to what the next `flush` sends."""
        self._unsent += _HEADER.pack(number, len(message)) + message

    def flush(self) -> bool:
        """Never blocks. True: something is left. If the other end is gone, `receive` tells."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return True
        except OSError:
            self._unsent.clear()
        return False

    def receive(self) -> list[Frame]:
        """The messages that are complete. Sets is_closed when the other end is gone and all is read."""
        while True:
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            self.is_closed |= not chunk
            self._received += chunk
            if len(chunk) < _CHUNK_BYTES:
                break
        return self._frames()

    def close(self) -> None:
        self._socket.close()

    def _frames(self) -> list[Frame]:
        frames, place = [], 0
        while len(self._received) - place >= _HEADER.size:
            number, size = _HEADER.unpack_from(self._received, place)
            end = place + _HEADER.size + size
            if len(self._received) < end:
                break
            frames.append((number, bytes(self._received[place + _HEADER.size : end])))
            place = end
        del self._received[:place]
        return frames


class ProcessEnd:
    """Blocks until a message is there, or sent; many threads may send."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._file = self._socket.makefile("rb")
        self._sending = threading.Lock()

    def send(self, number: int, message: bytes) -> None:
        with self._sending:
            self._socket.sendall(_HEADER.pack(number, len(message)) + message)

    def receive(self) -> Frame | None:
        """The next message; None when the other end is gone."""
        header = self._file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        number, size = _HEADER.unpack(header)
        message = self._file.read(size)
        return (number, message) if len(message) == size else None

    def leave(self) -> None:
        """In a forked child: the pool must not take it for this process. Takes no lock, which a thread may hold that is
        not there any more."""
        os.close(self._socket.detach())
