"""RayResourcePool: the slots of a `ResourcePool`, reserved in a Ray cluster as one placement group per machine."""

from __future__ import annotations

from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_lite.single_controller.resource_pool import ResourcePool

_RESERVE_TIMEOUT_S = 60.0


@dataclass
class RayResourcePool(ResourcePool):
    """Reserves on `reserve`, gives back on `release`."""

    _groups: list[PlacementGroup] = field(default_factory=list, init=False, repr=False)

    def reserve(self) -> list[PlacementGroupSchedulingStrategy]:
        """Where the process of each rank goes. Raises RuntimeError if the cluster has no room within a minute."""
        if not ray.is_initialized():
            raise RuntimeError("trainer.backend=ray needs a cluster: call start_ray first")
        bundle = {"CPU": self.cpus_per_process} | ({"GPU": 1.0} if self.use_gpu else {})
        total = ray.cluster_resources()
        for name, each in bundle.items():
            if each * self.world_size > total.get(name, 0.0) + 1e-6:
                raise RuntimeError(
                    f"{self.world_size} workers need {each * self.world_size:g} {name}, the cluster has "
                    f"{total.get(name, 0.0):g}: lower trainer.n_gpus_per_node or raise ray_kwargs.ray_init.num_cpus"
                )
        groups = [placement_group([bundle] * count, strategy="STRICT_PACK") for count in self.process_on_nodes]
        self._groups = groups
        for group, count in zip(groups, self.process_on_nodes, strict=True):
            if not group.wait(timeout_seconds=_RESERVE_TIMEOUT_S):
                self.release()
                raise RuntimeError(
                    f"no machine of the cluster has room for {count} x {bundle} within {_RESERVE_TIMEOUT_S:g} s; "
                    f"free now: {ray.available_resources()}"
                )
        return [
            PlacementGroupSchedulingStrategy(groups[node], placement_group_bundle_index=place)
            for node, place in self.seats
        ]

    def release(self) -> None:
        """Give the reservation back."""
        groups, self._groups = self._groups, []
        for group in groups:
            remove_placement_group(group)
