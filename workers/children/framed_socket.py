"""Messages over a socket pair, each a number and bytes: the blocking end of a supervised process, and its owner's end,
which never blocks, whatever the process does.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

_HEADER = struct.Struct("<qq")
_CHUNK_BYTES = 1 << 18

Frame = tuple[int, bytes]
"""What the message is about, and the message."""


class OwnerEnd:
    """Sends what the socket takes and keeps the rest for the next `flush`; receives what there is."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setblocking(False)
        self._unsent = bytearray()
        self._received = bytearray()
        self.is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, number: int, message: bytes) -> None:
        self._unsent += _HEADER.pack(number, len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Sends on; nothing if the other end is gone, which `receive` tells."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> list[Frame]:
        """The messages that are complete. Sets is_closed when the other end is gone and all is read."""
        while True:
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                self.is_closed = True
                break
            self._received += chunk
            if len(chunk) < _CHUNK_BYTES:
                break
        return list(self._frames())

    def close(self) -> None:
        self._socket.close()

    def _frames(self) -> Iterator[Frame]:
        place = 0
        while len(self._received) - place >= _HEADER.size:
            number, size = _HEADER.unpack_from(self._received, place)
            end = place + _HEADER.size + size
            if len(self._received) < end:
                break
            yield number, bytes(self._received[place + _HEADER.size : end])
            place = end
        del self._received[:place]


class ChildEnd:
    """Blocks until a message is there, or sent; may be sent from many threads."""

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
        """In a forked child: the other end must not take it for this one. Takes no lock, which a thread may hold that
        is not there any more."""
        os.close(self._socket.detach())
