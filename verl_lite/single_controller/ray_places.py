"""Places for processes on the machines of a Ray cluster that is there already, one at a time as there is room.

A place is a placement group, so that Ray, which knows what others have, says on which machine there is room; in it an
actor of the caller's does what is to be done there. Everything ends with this process's connection to the cluster.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RaySystemError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_lite.errors import ClusterLostError, UserError, WorkerDiedError
from verl_lite.single_controller.ray_joined import join, leave, machines

_ROOM_S = 2.0
"""How long a look for a place waits for Ray's answer."""
_PATIENCE_S = 30.0
"""Until what Ray has not given is taken for something that others have."""
_MACHINES_EVERY_S = 10.0
_SILENCE_S = 0.5
"""Between looks at a head that does not answer."""


@dataclass(frozen=True)
class Place:
    """Cores and devices of one machine, reserved. machine: its name."""

    machine: str
    group: PlacementGroup


class RayPlaces:
    """Places on the machines of a cluster, which this process has joined until `close`.

    option: what the user gave the address with, for messages. gpus: of each place, where the cluster has any; needed:
    it must. cores: of each place, by Ray's count. wait_s: for the first answer. Raises NoRoomError if nobody answers at
    the address, UserError if no machine of the cluster could ever hold a place.
    """

    def __init__(
        self,
        address: str,
        option: str,
        *,
        gpus: int,
        needed: bool,
        cores: int,
        wait_s: float,
        tell: Callable[[str], None] = print,
    ) -> None:
        before = signal.getsignal(signal.SIGTERM)
        self._cluster = join(address, f"places-{os.getpid()}", wait_s, tell, option)
        signal.signal(signal.SIGTERM, before)  # Ray sets one that knows nothing of the caller
        self._machines, self._looked = machines(), time.monotonic()
        self.cores = cores
        self.gpus = gpus if needed or any("GPU" in machine.resources for machine in self._machines) else 0
        self._bundle = {"CPU": float(cores), **({"GPU": float(self.gpus)} if self.gpus else {})}
        self._pending: PlacementGroup | None = None
        self._asked = 0.0
        if not self._room():
            there = "; ".join(f"{machine.name} has {_amounts(machine.resources)}" for machine in self._machines)
            self.close()
            raise UserError(
                f"{option}{address}: each run asks for {_amounts(self._bundle)} on one machine, and none has that: "
                f"{there or 'there are no machines'}. Ask for less, or add machines with `ray start --address=...`"
            )

    def room(self) -> int:
        """Places that the machines there are now can hold, whoever has them."""
        if time.monotonic() - self._looked > _MACHINES_EVERY_S:
            self.wait_for_head()
            self._machines, self._looked = machines(), time.monotonic()
        return self._room()

    def take(self, avoid: Collection[str] = ()) -> Place | None:
        """A place that Ray has reserved, not on one of the machines in `avoid` if there is room elsewhere; None while
        there is none."""
        self.wait_for_head()
        if self._pending is None:
            self._asked = time.monotonic()
        group, self._pending = self._pending or self._reserve(), None
        if not group.wait(_ROOM_S):
            self._pending = group  # it keeps its place in Ray's queue
            return None
        place = self._place(group)
        if place.machine in avoid:
            other = self._reserve()  # while the first is held, so that it is another one
            if other.wait(_ROOM_S) and self._place(other).machine not in avoid:
                group, other = other, group
                place = self._place(group)
            remove_placement_group(other)
        return place

    def give_back(self, place: Place) -> None:
        self.wait_for_head()
        remove_placement_group(place.group)

    def why_not(self) -> list[str]:
        """Why `take` has found nothing for a while."""
        if self._pending is None or time.monotonic() - self._asked < _PATIENCE_S:
            return []
        return [f"the cluster has no room for {_amounts(self._bundle)} now: others, or runs from here, use it"]

    def start(self, place: Place, kind: type, *arguments: Any) -> Remote:
        """An object of this class on the place's machine."""
        self.wait_for_head()
        where = PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=0)
        options = {"num_cpus": self.cores, "num_gpus": self.gpus, "scheduling_strategy": where, "max_concurrency": 4}
        return Remote(ray.remote(kind).options(**options).remote(*arguments), place.machine)

    @property
    def is_headless(self) -> bool:
        """Whether the cluster's head is gone."""
        return self._cluster.is_headless

    def require_head(self) -> None:
        """Raises ClusterLostError if the cluster's head is gone."""
        if self.is_headless:
            raise ClusterLostError(
                f"the Ray cluster at {self._cluster.address} is gone: its head does not answer, and what ran there ends"
            )

    def wait_for_head(self) -> None:
        """Returns when the head answers, as it must before Ray is asked for anything: from a head that is gone Ray
        waits for an answer with the interpreter's lock held, and ends this process after a minute. Raises
        ClusterLostError."""
        while not self._cluster.head_answers():
            self.require_head()
            time.sleep(_SILENCE_S)

    def close(self) -> None:
        """Leaves the cluster; what was started there ends."""
        leave(self._cluster)

    def _reserve(self) -> PlacementGroup:
        return placement_group([self._bundle], strategy="STRICT_PACK")

    def _room(self) -> int:
        return sum(
            int(min(machine.resources.get(name, 0.0) / amount for name, amount in self._bundle.items()) + 1e-6)
            for machine in self._machines
        )

    def _place(self, group: PlacementGroup) -> Place:
        node = placement_group_table(group)["bundles_to_node_id"][0]
        if all(machine.node_id != node for machine in self._machines):  # it has joined since
            self._machines, self._looked = machines(), time.monotonic()
        names = (machine.name for machine in self._machines if machine.node_id == node)
        return Place(next(names, f"node {node[:8]}"), group)


class Remote:
    """An object on another machine. machine: its name."""

    def __init__(self, actor: Any, machine: str) -> None:
        self._actor, self.machine = actor, machine

    def ask(self, method: str) -> Any:
        """Calls a method; gives what `answer` takes."""
        return getattr(self._actor, method).remote()

    def answer(self, asked: Any, wait_s: float = 0.0) -> Any:
        """What the method gave; None while it has not. Raises WorkerDiedError if the machine, or its part of Ray, is
        lost."""
        try:
            return ray.get(asked, timeout=wait_s)
        except GetTimeoutError:
            return None
        except (RayActorError, RaySystemError) as error:
            lines = str(error).strip().splitlines()
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise WorkerDiedError(
                    f"{self.machine} cannot start it: {lines[-1]}. Python, the project and the folders it works in "
                    "must be at the same path on all machines"
                ) from error
            raise WorkerDiedError(f"{self.machine}, or its part of Ray, is lost: {lines[0]}") from error

    def end(self) -> None:
        """Ends it, whatever it does."""
        ray.kill(self._actor)


def _amounts(resources: Mapping[str, float]) -> str:
    """`8 CPU, 4 GPU`; a machine has more resources than those."""
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources) or "nothing"
