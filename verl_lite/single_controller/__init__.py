"""The single controller: one driver calls groups of workers as if they were local objects.

`register` marks a worker's methods and says how their arguments are dispatched; `create_worker_groups` makes the
workers, in Ray actors or in this process. Importing it needs no Ray.
"""

from verl_lite.errors import WorkerDiedError
from verl_lite.single_controller.decorator import (
    Dispatch,
    Execute,
    Mesh,
    PerRank,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)
from verl_lite.single_controller.local_worker_group import create_worker_groups, start_service
from verl_lite.single_controller.worker import Worker
from verl_lite.single_controller.worker_group import (
    ClassWithInitArgs,
    ResourcePool,
    ServiceHandle,
    WorkerGroup,
)

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "Mesh",
    "PerRank",
    "ResourcePool",
    "ServiceHandle",
    "Worker",
    "WorkerDiedError",
    "WorkerGroup",
    "create_worker_groups",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "start_service",
]
