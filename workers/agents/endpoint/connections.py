"""Limits the connections of the endpoint, so that clients without a key cannot use up the files of the trainer.

A connection belongs to nobody until a request on it has a valid key. When all places are taken, a new connection
replaces the oldest one that belongs to nobody, so that programs can always connect.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import Callable, Hashable
from typing import cast

MAX_CONNECTIONS = 4096
FILES_SHARE = 2
"""The connections of the endpoint use at most the files that the process may open, divided by this number."""
MAX_CONNECTIONS_PER_EPISODE = 256
ANONYMOUS_S = 30.0
"""Seconds within which a connection has to send a request with a valid key."""
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    b'Content-Length: 70\r\n\r\n{"error": {"message": "too many connections", "type": "server_error"}}'
)


def most_connections() -> int:
    """Returns the limit of connections of one endpoint, from the limit of open files of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(8, min(MAX_CONNECTIONS, soft // FILES_SHARE))


class Connections:
    """The open connections of one endpoint. All methods are called in the thread of its event loop.

    Args:
        count_refusal: called with the reason for each connection that is refused or closed.
    """

    def __init__(self, count_refusal: Callable[[str], None]) -> None:
        self._count_refusal = count_refusal
        self._limit = most_connections()
        # the owner of each connection, in the order in which they began; None while it belongs to nobody
        self._owners: dict[asyncio.Transport, Hashable | None] = {}
        # numbers of connections by owner
        self._counts: Counter[Hashable] = Counter()

    def admit(self, transport: asyncio.Transport) -> bool:
        """Adds a new connection. Closes it and returns False if there is no place for it."""
        if len(self._owners) >= self._limit:
            self._count_refusal("connections")
            oldest = self._oldest_without_owner()
            # all connections belong to episodes: their programs are served rather than a new client
            if oldest is None:
                transport.write(_REFUSAL)
                transport.close()
                return False
            self.remove(oldest)
            oldest.abort()
        self._owners[transport] = None
        asyncio.get_running_loop().call_later(ANONYMOUS_S, self._expire, transport)
        return True

    def _oldest_without_owner(self) -> asyncio.Transport | None:
        """Returns the connection that has belonged to nobody for longest; None if all have owners."""
        for transport, owner in self._owners.items():
            if owner is None:
                return transport
        return None

    def give(self, transport: asyncio.BaseTransport | None, owner: Hashable) -> bool:
        """Gives a connection to the episode whose key it has sent. Returns False if the episode has too many."""
        connection = cast(asyncio.Transport, transport)
        # a connection that has ended meanwhile needs no owner
        if connection not in self._owners or self._owners[connection] is owner:
            return True
        if self._counts[owner] >= MAX_CONNECTIONS_PER_EPISODE:
            return False
        # a client may send the keys of several episodes over one connection; the last one owns it
        self._take_from_owner(connection)
        self._owners[connection] = owner
        self._counts[owner] += 1
        return True

    def release(self, owner: Hashable) -> None:
        """Makes the connections of an episode that has ended replaceable."""
        for transport, current in self._owners.items():
            if current is owner:
                self._owners[transport] = None
        self._counts.pop(owner, None)

    def remove(self, transport: asyncio.Transport) -> None:
        """Removes a connection that has ended."""
        if transport in self._owners:
            self._take_from_owner(transport)
            del self._owners[transport]

    def _take_from_owner(self, transport: asyncio.Transport) -> None:
        """Subtracts a connection from the count of its owner."""
        owner = self._owners[transport]
        if owner is None:
            return
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner]

    def _expire(self, transport: asyncio.Transport) -> None:
        """Closes a connection that has not sent a valid key in time."""
        if transport in self._owners and self._owners[transport] is None:
            self._count_refusal("slow")
            self.remove(transport)
            transport.abort()


class LimitedProtocol(asyncio.Protocol):
    """Passes a connection to the protocol of the web server if `Connections` admits it."""

    def __init__(self, connections: Connections, web_server: Callable[[], asyncio.Protocol]) -> None:
        self._connections = connections
        self._web_server = web_server
        # None for a connection that was refused
        self._inner: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._connections.admit(self._transport):
            self._inner = self._web_server()
            self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        if self._inner is None:
            return None
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self._transport)
        if self._inner is not None:
            self._inner.connection_lost(exc)
