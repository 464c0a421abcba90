"""A cluster that somebody else started: joining it, its machines, whether they still answer, leaving it.

Only what is the run's own is ended here; the cluster stays. Nothing in this file waits for a head that is gone, as Ray
itself would for many minutes: a thread of the driver opens a connection to each machine's port every few seconds. One
that is only busy still accepts, by its kernel; one whose Ray process was killed refuses; one without power is silent.
"""

from __future__ import annotations

import atexit
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray

from verl_lite.errors import ClusterLostError, NoRoomError, UserError

HEAD = "the head"
ADDRESS_KEY = "ray_kwargs.ray_init.address="
EVERY_S = 2.0
LOST_AFTER_S = 15.0
_LEAST_FAILURES = 4  # in a row: after the driver itself was suspended one look says nothing
_CONNECT_TIMEOUT_S = 3.0
_FIRST_ANSWER_S = 10.0
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")

Address = tuple[str, int]


# ---------------------------------------------------------------------------------------------------- who answers


def silence_of(address: Address) -> str | None:
    """What happens on trying to reach it; None if somebody answers."""
    try:
        with socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S):
            return None
    except OSError as error:
        return f"{address[0]}:{address[1]} does not answer ({error.strerror or error})"


def answers_within(address: Address, patience_s: float) -> bool:
    """Whether somebody takes a connection there, tried again until then."""
    deadline = time.monotonic() + patience_s
    while silence_of(address) is not None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
    return True


@dataclass
class _Silence:
    """Failed looks in a row: how many, when the first of them was, and what the last one said."""

    failures: int
    since: float
    reason: str


class NodeWatch:
    """Looks at addresses until it is closed.

    Args:
        places: where to look, by the name under which `lost` tells of it.
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
        """Why each place that has been silent for so long is thought to be gone."""
        return {
            name: f"{silence.reason}, for {self._clock() - silence.since:.0f} s"
            for name, silence in list(self._silent.items())
            if silence.failures >= _LEAST_FAILURES and self._clock() - silence.since >= self._lost_after_s
        }

    def look_once(self) -> None:
        """Try all places."""
        for name, address in self._places.items():
            begun, reason = self._clock(), self._look(address)
            if reason is None:
                self._silent.pop(name, None)
            else:
                before = self._silent.get(name, _Silence(0, begun, reason))
                self._silent[name] = _Silence(before.failures + 1, before.since, reason)

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            self.look_once()


# ---------------------------------------------------------------------------------------------------- the cluster


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
        """Whether it could hold this, were nothing else on it."""
        return all(self.resources.get(name, 0.0) + 1e-6 >= amount for name, amount in bundle.items())


def machines() -> list[Machine]:
    """The machines of the cluster that are alive: by what Ray knows, which may be late, and that answer."""
    known = [Machine.of(entry) for entry in ray.nodes() if entry["Alive"]]
    return [machine for machine in known if silence_of(machine.address) is None]


@dataclass
class JoinedCluster:
    """The cluster that this process has joined. wait_s: how long to wait for machines. tell: takes sentences."""

    address: str
    wait_s: float
    tell: Callable[[str], None]
    watch: NodeWatch

    def follow(self, machines: list[Machine]) -> None:
        """Watch the head, and from now on these machines."""
        self.watch.close()
        places = {HEAD: self.head} | {machine.name: machine.address for machine in machines}
        self.watch = NodeWatch(places).start()

    @cached_property
    def head(self) -> Address:
        """Where the head answers."""
        host, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
        return host, int(port)

    def head_answers(self) -> bool:
        """Whether the head answers at this moment."""
        return silence_of(self.head) is None

    @property
    def is_headless(self) -> bool:
        """Whether the head is gone."""
        return HEAD in self.watch.lost()

    def require_head(self) -> None:
        """Raises ClusterLostError if the head is gone."""
        if reason := self.watch.lost().get(HEAD):
            raise ClusterLostError(
                f"the Ray cluster at {self.address} is gone: its head {reason}. To go on from the last "
                "checkpoint: start a cluster, then the same command with trainer.resume_mode=auto"
            )


def join(
    address: str, run_id: str, wait_s: float, tell: Callable[[str], None], option: str = ADDRESS_KEY
) -> JoinedCluster:
    """Join the cluster at HOST:PORT.

    Args:
        option: what the user gave the address with, for messages.

    Raises:
        NoRoomError: nobody answers there for `wait_s`. UserError: Ray refuses.
    """
    require_answer(address, wait_s, tell, option)
    try:  # below CRITICAL are Ray's own words about machines that leave, with the end of their logs
        ray.init(address=address, namespace=run_id, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{option}{address}: {error}\nThis machine must be one of the cluster's: "
            f"`ray start --address={address} --num-cpus=0` makes it one without giving it work"
        ) from error
    cluster = JoinedCluster(address, wait_s, tell, NodeWatch({}))
    cluster.follow([])
    return cluster


def require_answer(address: str, wait_s: float, tell: Callable[[str], None], option: str = ADDRESS_KEY) -> None:
    """Raises NoRoomError if nobody answers at HOST:PORT within `wait_s`: Ray would try for many minutes."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not port.isdigit() or "//" in address:
        raise UserError(f"{option}{address}: expected HOST:PORT, as `ray start --head` prints it")
    asked = (ray.util.get_node_ip_address() if host in _LOCAL_NAMES else host, int(port))  # as Ray reads it
    if answers_within(asked, min(_FIRST_ANSWER_S, wait_s)):
        return
    limit = " (ray_kwargs.ray_init.wait_for_nodes_s)" if option == ADDRESS_KEY else ""
    tell(f"nobody answers at {asked[0]}:{port}; waiting up to {wait_s:g} s{limit}")
    if not answers_within(asked, max(0.0, wait_s - _FIRST_ANSWER_S)):
        raise NoRoomError(
            f"{option}{address}: nobody has answered at {asked[0]}:{port} for {wait_s:g} s. Start "
            "a cluster with `ray start --head`, and give the address that it prints"
        )


def leave(cluster: JoinedCluster) -> None:
    """Leave the cluster. One whose head is gone cannot be left: Ray would wait for the head for a minute, with the
    interpreter's lock held, and then end the process without a word. The process stays connected to nothing, and must
    end itself."""
    cluster.watch.close()
    if cluster.is_headless:
        atexit.unregister(ray.shutdown)
    else:
        ray.shutdown()
