"""A cluster that somebody else started: joining it, the machines in it, whether they are still there, leaving it.

Only what is the run's own is ended here; the cluster stays. Nothing in this file waits for a head that is gone: Ray
itself would for many minutes.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray

from verl_lite.errors import ClusterLostError, NoRoomError, UserError
from verl_lite.single_controller.node_watch import Address, NodeWatch, answers_within, silence_of

HEAD = "the head"
ADDRESS_KEY = "ray_kwargs.ray_init.address="
_FIRST_ANSWER_S = 10.0
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


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
    """Join the cluster at HOST:PORT. Raises NoRoomError if nobody answers there for `wait_s`, UserError if
    Ray refuses. option: what the user gave the address with, for messages."""
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
    if not port.isdigit() or "//" in address:
        if address == "auto":
            return
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


def machines() -> list[Machine]:
    """The machines of the cluster that are alive: by what Ray knows, which may be late, and that answer."""
    known = [Machine.of(entry) for entry in ray.nodes() if entry["Alive"]]
    return [machine for machine in known if silence_of(machine.address) is None]


def leave(cluster: JoinedCluster) -> None:
    """Leave the cluster. One whose head is gone cannot be left: Ray would wait for the head for a minute, with the
    interpreter's lock held, and then end the process without a word. The process stays connected to nothing, and must
    end itself."""
    cluster.watch.close()
    if cluster.is_headless:
        atexit.unregister(ray.shutdown)
    else:
        ray.shutdown()
