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
from verl_lite.single_controller.ray_joined import Machine, machines
from verl_lite.single_controller.worker_group import ResourcePool

_PRIVATE_PATIENCE_S = 60.0
_SILENT_PATIENCE_S = 3.0  # as long as that nobody wonders

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
        joined = joined_cluster()
        total = ray.cluster_resources()
        asked = {name: sum(bundle[name] for bundle in self.bundles) for name in self.bundles[0]}
        if joined is None and any(amount > total.get(name, 0.0) + 1e-6 for name, amount in asked.items()):
            raise NoRoomError(  # a private cluster grows no more
                f"{self.world_size} workers need {_listed(asked)}, the cluster has {_listed(total)}: "
                "lower trainer.n_gpus_per_node or raise ray_kwargs.ray_init.num_cpus"
            )
        patience_s = _PRIVATE_PATIENCE_S if joined is None else joined.wait_s
        group = placement_group(self.bundles, strategy="STRICT_SPREAD" if len(self.bundles) > 1 else "STRICT_PACK")
        self._group, begun, said = group, time.monotonic(), False
        while not group.wait(timeout_seconds=1.0):
            waited_s = time.monotonic() - begun
            if joined is not None:
                joined.require_head()
            if waited_s >= patience_s:
                self.release()
                limit = f"{patience_s:g} s{' (ray_kwargs.ray_init.wait_for_nodes_s)' if joined else ''}"
                shortage = self.shortage(machines(), ray.available_resources())
                raise NoRoomError(f"there is no room for the run after {limit}: {shortage}")
            if joined is not None and not said and waited_s >= _SILENT_PATIENCE_S:
                said = True
                shortage = self.shortage(machines(), ray.available_resources())
                joined.log(f"waiting up to {patience_s:g} s for room in the cluster: {shortage}")
        return [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node) for node in self.nodes]

    def shortage(self, present: list[Machine], free: Bundle) -> str:
        """What is asked for, what there is, and what to change. present: machines; free: in all of them together."""
        asked = max(self.bundles, key=lambda bundle: bundle["CPU"])
        fitting, wanted = sum(machine.has(asked) for machine in present), len(self.bundles)
        listed = "".join(f"\n  {machine.name}: {_listed(machine.resources)}" for machine in present)
        return (
            f"{self.world_size} slots are asked for, on {wanted} machine{'s' * (wanted > 1)} with {_listed(asked)} "
            f"each; {fitting} of the {len(present)} machines there can hold that:{listed}\n  free now, in all: "
            f"{_listed(free)}\nAdd machines (`ray start --address=...`), wait for those who use them, or lower "
            "trainer.nnodes or trainer.n_gpus_per_node: any number of devices can load a checkpoint"
        )

    def release(self) -> None:
        """Give the reservation back."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)


def _listed(resources: Bundle) -> str:
    """`2 CPU, 1 GPU`."""
    kinds = ["CPU", *({"GPU"} & resources.keys())]
    return ", ".join(f"{resources.get(kind, 0.0):g} {kind}" for kind in kinds)
