"""RayResourcePool: the slots of a `ResourcePool`, reserved in a Ray cluster as one placement group: all or nothing.

Each machine of the pool is one bundle, and no two bundles share a machine of the cluster. In a cluster that was joined
machines may come later, or get free: there the reservation waits, and says for what.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_lite.errors import NoRoomError
from verl_lite.single_controller.ray_cluster import joined_cluster
from verl_lite.single_controller.ray_joined import JoinedCluster, Machine, machines
from verl_lite.single_controller.resource_pool import ResourcePool

_PRIVATE_PATIENCE_S = 60.0
_SILENT_PATIENCE_S = 3.0  # as long as that nobody wonders
_LOOK_EVERY_S = 1.0
_KINDS = ("CPU", "GPU")

Bundle = dict[str, float]


@dataclass
class RayResourcePool(ResourcePool):
    """Reserves on `reserve`, gives back on `release`."""

    _group: PlacementGroup | None = field(default=None, init=False, repr=False)

    @property
    def bundles(self) -> list[Bundle]:
        """What each machine is asked for."""
        return [
            {"CPU": self.cpus_per_process * count} | ({"GPU": float(count)} if self.use_gpu else {})
            for count in self.process_on_nodes
        ]

    def reserve(self) -> list[PlacementGroupSchedulingStrategy]:
        """Where the process of each rank goes. Raises NoRoomError if there is no room, in a joined cluster after
        `ray_kwargs.ray_init.wait_for_nodes_s`."""
        if not ray.is_initialized():
            raise RuntimeError("trainer.backend=ray needs a cluster: call start_ray first")
        joined = joined_cluster()
        if joined is None:
            self._require_enough()
        group = placement_group(self.bundles, strategy="STRICT_SPREAD" if len(self.bundles) > 1 else "STRICT_PACK")
        self._group = group
        self._wait(group, joined)
        return [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node) for node in self.nodes]

    def _wait(self, group: PlacementGroup, joined: JoinedCluster | None) -> None:
        patience_s = _PRIVATE_PATIENCE_S if joined is None else joined.wait_s
        begun, told = time.monotonic(), False
        while not group.wait(timeout_seconds=_LOOK_EVERY_S):
            waited_s = time.monotonic() - begun
            if joined is not None:
                joined.require_head()
            if waited_s >= patience_s:
                self.release()
                limit = f"{patience_s:g} s{' (ray_kwargs.ray_init.wait_for_nodes_s)' if joined else ''}"
                shortage = self.shortage(machines(), ray.available_resources())
                raise NoRoomError(f"there is no room for the run after {limit}: {shortage}")
            if joined is not None and not told and waited_s >= _SILENT_PATIENCE_S:
                told = True
                shortage = self.shortage(machines(), ray.available_resources())
                joined.tell(f"waiting up to {patience_s:g} s for room in the cluster: {shortage}")

    def shortage(self, present: list[Machine], free: Bundle) -> str:
        """What is asked for, what there is, and what to change. present: machines; free: in all of them together."""
        asked = max(self.bundles, key=lambda bundle: bundle["CPU"])
        fitting = sum(machine.has(asked) for machine in present)
        listed = "".join(f"\n  {machine.name}: {_told(machine.resources)}" for machine in present)
        wanted, found = len(self.bundles), f"{fitting} of the {len(present)} machines there can hold that"
        change = (
            f"go on with fewer, trainer.nnodes={fitting}: any number of devices can load a checkpoint"
            if 0 < fitting < wanted
            else "lower trainer.n_gpus_per_node or trainer.nnodes"
        )
        if fitting >= wanted:
            found, change = f"{found}, but others use them", "wait for the others"
        return (
            f"{self.world_size} slots are asked for, on {wanted} machine{'s' * (wanted > 1)} with {_told(asked)} each; "
            f"{found}:{listed}\n  free now, in all: {_told(free)}\nAdd machines "
            f"(`ray start --address=...`), or {change}"
        )

    def _require_enough(self) -> None:
        """A private cluster grows no more."""
        total = ray.cluster_resources()
        for name in self.bundles[0]:
            needed = sum(bundle[name] for bundle in self.bundles)
            if needed > total.get(name, 0.0) + 1e-6:
                raise NoRoomError(
                    f"{self.world_size} workers need {needed:g} {name}, the cluster has {total.get(name, 0.0):g}: "
                    "lower trainer.n_gpus_per_node or raise ray_kwargs.ray_init.num_cpus"
                )

    def release(self) -> None:
        """Give the reservation back."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)


def _told(resources: Bundle) -> str:
    """`2 CPU, 1 GPU`."""
    return ", ".join(f"{resources.get(kind, 0.0):g} {kind}" for kind in _KINDS if kind == "CPU" or kind in resources)
