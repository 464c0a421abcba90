"""A cluster that somebody else started: joining it, its machines, whether they still answer.

Only what is the run's own is ended here; the cluster stays. Nothing in this file waits for a head that is gone, as Ray
itself would for many minutes: a thread of the driver opens a connection to each machine's port every few seconds. One
that is only busy still accepts, by its kernel; one whose Ray process was killed refuses; one without power is silent.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from verl_lite.errors import ClusterLostError, NoRoomError, UserError

HEAD = "the head"
LOST_AFTER_S = 15.0
_EVERY_S = 2.0
_LEAST_FAILURES = 4  # in a row: after the driver itself was suspended one look says nothing
_CONNECT_TIMEOUT_S = 3.0
_FIRST_ANSWER_S = 10.0
_KEY = "ray_kwargs.ray_init.address="

Address = tuple[str, int]


def silence_of(address: Address) -> str | None:
    """What happens on trying to reach it; None if somebody answers."""
    try:
        with socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S):
            return None
    except OSError as error:
        return f"{address[0]}:{address[1]} does not answer ({error.strerror or error})"


def answers_within(address: Address, patience_s: float) -> bool:
    """True if somebody takes a connection there, tried again until then."""
    deadline = time.monotonic() + patience_s
    while silence_of(address) is not None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
    return True


class NodeWatch:
    """Looks at addresses until it is closed.

    Args:
        places: where to look, by the name under which `lost` has it.
        lost_after_s: silence after which a place is lost.
        clock, look: for tests.
    """

    def __init__(
        self,
        places: dict[str, Address],
        *,
        lost_after_s: float = LOST_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[Address], str | None] = silence_of,
    ) -> None:
        self._places, self._lost_after_s, self._clock, self._look = dict(places), lost_after_s, clock, look
        self._silent: dict[str, tuple[int, float, str]] = {}  # failed looks in a row, time of the first, last reason
        self._closed = threading.Event()

    def start(self) -> NodeWatch:
        """Begin to look, in a thread."""
        threading.Thread(target=self._run, name="node watch", daemon=True).start()
        return self

    def close(self) -> None:
        """End the thread, soon."""
        self._closed.set()

    def lost(self) -> dict[str, str]:
        """Why each place that has been silent for so long is thought to be gone."""
        now = self._clock()
        return {
            name: f"{reason}, for {now - since:.0f} s"
            for name, (failures, since, reason) in list(self._silent.items())
            if failures >= _LEAST_FAILURES and now - since >= self._lost_after_s
        }

    def look_once(self) -> None:
        """Try all places."""
        for name, address in self._places.items():
            begun, reason = self._clock(), self._look(address)
            failures, since, _ = self._silent.pop(name, (0, begun, ""))
            if reason is not None:
                self._silent[name] = (failures + 1, since, reason)

    def _run(self) -> None:
        while not self._closed.wait(_EVERY_S):
            self.look_once()


@dataclass(frozen=True)
class Machine:
    """A node of the cluster. name: its address, and its host name where that tells more."""

    node_id: str
    name: str
    address: Address
    resources: dict[str, float]

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Machine:
        """From an entry of `ray.nodes()`."""
        ip, host = entry["NodeManagerAddress"], entry["NodeManagerHostname"]
        name = ip if host in ("", ip) else f"{ip} ({host})"
        return cls(entry["NodeID"], name, (ip, int(entry["NodeManagerPort"])), dict(entry["Resources"]))

    def has(self, bundle: dict[str, float]) -> bool:
        """True if it could hold this, were nothing else on it."""
        return all(self.resources.get(name, 0.0) + 1e-6 >= amount for name, amount in bundle.items())


def machines() -> list[Machine]:
    """The machines of the cluster that are alive: by what Ray knows, which may be late, and that answer."""
    known = [Machine.of(entry) for entry in ray.nodes() if entry["Alive"]]
    return [machine for machine in known if silence_of(machine.address) is None]


def head_address() -> Address:
    """Where the control store of the cluster answers."""
    host, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
    return host, int(port)


class JoinedCluster:
    """The cluster that this process has joined. wait_s: how long to wait for machines. log: takes sentences."""

    def __init__(self, address: str, wait_s: float, log: Callable[[str], None]) -> None:
        self.address, self.wait_s, self.log = address, wait_s, log
        self.head = head_address()
        self.watch = NodeWatch({HEAD: self.head}).start()

    def follow(self, machines: list[Machine]) -> None:
        """Watch the head, and from now on these machines."""
        self.watch.close()
        places = {HEAD: self.head} | {machine.name: machine.address for machine in machines}
        self.watch = NodeWatch(places).start()

    @property
    def is_headless(self) -> bool:
        """True if the head is gone."""
        return HEAD in self.watch.lost()

    def require_head(self) -> None:
        """Raises ClusterLostError if the head is gone."""
        if reason := self.watch.lost().get(HEAD):
            raise ClusterLostError(
                f"the Ray cluster at {self.address} is gone: its head {reason}. To go on from the last "
                "checkpoint: start a cluster, then the same command with trainer.resume_mode=auto"
            )


def join(address: str, run_id: str, wait_s: float, log: Callable[[str], None]) -> JoinedCluster:
    """Join the cluster at HOST:PORT. Raises NoRoomError if nobody answers for `wait_s`, UserError if Ray refuses."""
    require_answer(address, wait_s, log)
    try:  # below CRITICAL are Ray's own words about machines that leave, with the end of their logs
        ray.init(address=address, namespace=run_id, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{_KEY}{address}: {error}\nThis machine must be one of the cluster's: "
            f"`ray start --address={address} --num-cpus=0` makes it one without giving it work"
        ) from error
    return JoinedCluster(address, wait_s, log)


def require_answer(address: str, wait_s: float, log: Callable[[str], None]) -> None:
    """Raises NoRoomError if nobody answers at HOST:PORT within `wait_s`: Ray would try for many minutes."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not port.isdigit() or "//" in address:
        raise UserError(f"{_KEY}{address}: expected HOST:PORT, as `ray start --head` prints it")
    is_local = host in ("localhost", "127.0.0.1", "::1")
    asked = (ray.util.get_node_ip_address() if is_local else host, int(port))  # as Ray reads it
    if answers_within(asked, min(_FIRST_ANSWER_S, wait_s)):
        return
    log(f"nobody answers at {asked[0]}:{port}; waiting up to {wait_s:g} s (ray_kwargs.ray_init.wait_for_nodes_s)")
    if not answers_within(asked, max(0.0, wait_s - _FIRST_ANSWER_S)):
        raise NoRoomError(
            f"{_KEY}{address}: nobody has answered at {asked[0]}:{port} for {wait_s:g} s. Start a cluster with "
            "`ray start --head`, and give the address that it prints"
        )
