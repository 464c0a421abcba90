"""What goes between a pool and its processes: calls there, replies back, over a socket pair, framed as
`multiprocessing.Connection` does, which is the process's end. The pool's end never blocks, whatever the process does.
"""

import socket
import struct
from dataclasses import dataclass
from typing import Any

CONTROL = -1
"""In place of the number of a session: of the process itself."""

_HEADER = struct.Struct("!iq")
_NUMBER = struct.Struct("!q")
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Reply:
    """What a call came to.

    seconds: it took. error: it failed, as a traceback or a sentence; there is no value then. is_timeout: it failed
    because it took too long. The first one of CONTROL says how the handler began; further ones answer empty messages.
    """

    session: int
    value: Any = None
    seconds: float = 0.0
    error: str | None = None
    is_timeout: bool = False


def packed(number: int, message: bytes) -> bytes:
    """A message of the process's end."""
    return _NUMBER.pack(number) + message


def unpacked(message: bytes) -> tuple[int, bytes]:
    """A message to the process's end."""
    return _NUMBER.unpack_from(message)[0], message[_NUMBER.size :]


class PoolEnd:
    """Sends what the socket takes and keeps the rest for the next `flush`; receives what there is."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket, self._unsent, self._received = end, bytearray(), bytearray()
        self.is_closed = False
        self.fileno, self.close = end.fileno, end.close

    def send(self, number: int, message: bytes) -> None:
        """Adds to what is sent, and sends what goes."""
        self._unsent += _HEADER.pack(_NUMBER.size + len(message), number) + message
        self.flush()

    def flush(self) -> bool:
        """True: something is left. If the other end is gone, `receive` tells."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return True
        except OSError:
            self._unsent.clear()
        return False

    def receive(self) -> list[tuple[int, bytes]]:
        """The messages that are complete. Sets is_closed when the other end is gone and all is read."""
        try:
            while chunk := self._socket.recv(_CHUNK_BYTES):
                self._received += chunk
            self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        messages, place = [], 0
        while len(self._received) - place >= _HEADER.size:
            size, number = _HEADER.unpack_from(self._received, place)
            end = place + _HEADER.size - _NUMBER.size + size
            if len(self._received) < end:
                break
            messages.append((number, bytes(self._received[place + _HEADER.size : end])))
            place = end
        del self._received[:place]
        return messages
