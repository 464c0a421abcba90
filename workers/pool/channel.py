"""The channel between a pool and one of its processes: a socket pair that carries calls and replies.

The process uses `multiprocessing.Connection`, whose framing the pool's end follows. The pool's end never blocks.
"""

import socket
import struct
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

Value = TypeVar("Value")

CONTROL = -1
"""Session number of messages about the process itself."""

# `multiprocessing.Connection` begins a message with its size; every message begins with the number of its session
_HEADER = struct.Struct("!iq")
_NUMBER = struct.Struct("!q")
_CHUNK_BYTES = 1 << 18
"""Number of bytes that one read of the socket may return."""


@dataclass(frozen=True)
class Reply(Generic[Value]):
    """The result of a call. The first reply of CONTROL reports how the handler started; further ones answer pings.

    Attributes:
        session: number of the session.
        value: what the call returned; None if it failed.
        seconds: duration of the call.
        error: traceback or sentence if the call failed.
        is_timeout: True if it exceeded its deadline.
    """

    session: int
    value: Value | None = None
    seconds: float = 0.0
    error: str | None = None
    is_timeout: bool = False

    @property
    def result(self) -> Value:
        """What the call returned. Must not be read if it failed."""
        assert self.error is None, self.error
        # without an error, None is a returned value too
        return cast(Value, self.value)


def packed(number: int, message: bytes) -> bytes:
    """Puts the session number before a message. Used in the process."""
    return _NUMBER.pack(number) + message


def unpacked(message: bytes) -> tuple[int, bytes]:
    """Splits a message into session number and content. Used in the process."""
    [number] = _NUMBER.unpack_from(message)
    return number, message[_NUMBER.size :]


class PoolEnd:
    """The pool's end: sends as much as the socket accepts and keeps the rest for `flush`; receives without waiting."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent = bytearray()
        self._received = bytearray()
        self.is_closed = False
        # with this method, `multiprocessing.connection.wait` accepts the object
        self.fileno = end.fileno
        self.close = end.close

    def send(self, number: int, message: bytes) -> None:
        """Queues a message and sends as much as possible."""
        self._unsent += _HEADER.pack(_NUMBER.size + len(message), number) + message
        self.flush()

    def flush(self) -> bool:
        """Sends queued data. Returns True if some is left."""
        try:
            while self._unsent:
                num_sent = self._socket.send(self._unsent)
                del self._unsent[:num_sent]
        except BlockingIOError:
            return True
        except OSError:
            # the other end is closed, which `receive` reports
            self._unsent.clear()
        return False

    def receive(self) -> list[tuple[int, bytes]]:
        """Returns the complete messages.

        Sets is_closed when the other end is closed and everything is read, or when it has sent something else than
        messages.
        """
        try:
            while chunk := self._socket.recv(_CHUNK_BYTES):
                self._received += chunk
            self.is_closed = True
        except BlockingIOError:
            # everything is read, and the other end is open
            pass
        except OSError:
            self.is_closed = True

        messages: list[tuple[int, bytes]] = []
        start = 0
        while len(self._received) - start >= _HEADER.size:
            size, number = _HEADER.unpack_from(self._received, start)
            # no message of `multiprocessing`: untrusted code has written to the channel
            if size < _NUMBER.size:
                self.is_closed = True
                self._received.clear()
                return messages
            content_start = start + _HEADER.size
            # the size counts the number as well, which has been read with the header
            end = content_start + size - _NUMBER.size
            # the rest of the message has not arrived yet
            if len(self._received) < end:
                break
            content = bytes(self._received[content_start:end])
            messages.append((number, content))
            start = end
        del self._received[:start]
        return messages
