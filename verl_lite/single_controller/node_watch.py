"""Which machines of a joined cluster can still be reached: asked of their ports, since Ray itself may need a minute.

A thread of the driver opens a connection to each address every few seconds and closes it again. A machine that is only
busy still accepts, by its kernel; one whose Ray process was killed refuses; one without power or network is silent.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 2.0
LOST_AFTER_S = 15.0
_LEAST_FAILURES = 4  # in a row: after the driver itself was suspended one look says nothing
_CONNECT_TIMEOUT_S = 3.0

Address = tuple[str, int]


@dataclass
class _Silence:
    """Failed looks in a row: how many, when the first of them was, and what the last one said."""

    failures: int
    since: float
    reason: str


class NodeWatch:
    """Looks at addresses until it is closed.

    places: where to look, by the name under which `lost` tells of it. clock, look: for tests; look raises OSError where
    nobody answers.
    """

    def __init__(
        self,
        places: dict[str, Address],
        *,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[Address], None] | None = None,
    ) -> None:
        self._places, self._clock, self._look = dict(places), clock, look or connect
        self._silent: dict[str, _Silence] = {}
        self._closed = threading.Event()

    def start(self) -> NodeWatch:
        """Begin to look, in a thread."""
        threading.Thread(target=self._run, name="node watch", daemon=True).start()
        return self

    def close(self) -> None:
        """End the thread, soon."""
        self._closed.set()

    def lost(self) -> dict[str, str]:
        """Why each place that has not answered for LOST_AFTER_S is thought to be gone."""
        return {
            name: f"{silence.reason}, for {self._clock() - silence.since:.0f} s"
            for name, silence in list(self._silent.items())
            if silence.failures >= _LEAST_FAILURES and self._clock() - silence.since >= LOST_AFTER_S
        }

    def look_once(self) -> None:
        """Try all places."""
        for name, address in self._places.items():
            begun = self._clock()
            try:
                self._look(address)
                self._silent.pop(name, None)
            except OSError as error:
                before = self._silent.get(name)
                failures, since = (before.failures, before.since) if before else (0, begun)
                self._silent[name] = _Silence(failures + 1, since, _told(address, error))

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            self.look_once()


def connect(address: Address) -> None:
    """Opens a connection and closes it. Raises OSError if nobody takes it."""
    with socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S):
        pass


def silence_of(address: Address) -> str | None:
    """What happens on trying to reach it; None if somebody answers."""
    try:
        connect(address)
        return None
    except OSError as error:
        return _told(address, error)


def _told(address: Address, error: OSError) -> str:
    return f"{address[0]}:{address[1]} does not answer ({error.strerror or error})"


def answers_within(address: Address, patience_s: float) -> bool:
    """Whether somebody takes a connection there, tried again until then."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            connect(address)
            return True
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
