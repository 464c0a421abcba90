"""A service with Ray: one object in an actor of its own, whose handle can be given to workers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_lite.errors import add_circumstances
from verl_lite.single_controller.local_worker_group import LocalService
from verl_lite.single_controller.ray_cluster import cluster_answers, require_head, worker_env
from verl_lite.single_controller.ray_errors import cause_of_death, death, original_error, portable_errors, stalled
from verl_lite.single_controller.ray_worker_group import redirect_output
from verl_lite.single_controller.worker_group import ClassWithInitArgs

_LOOK_EVERY_S = 1.0


class ServiceProcess:
    """What runs in the service's process."""

    def __init__(self, recipe: ClassWithInitArgs, log_file: str | None) -> None:
        self._recipe = recipe
        if log_file is not None:
            redirect_output(log_file)

    def start(self) -> None:
        """Make the object; apart from the constructor, so that its error arrives as it was raised."""
        with portable_errors():
            self._service = LocalService(self._recipe)

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        self._service.send(method, *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with portable_errors():
            return self._service.call(method, *args, **kwargs)


class RayServiceHandle:
    """Handle of a service; pickles."""

    def __init__(self, actor: Any, name: str, log: str | None, stall_timeout_s: float | None) -> None:
        self._actor, self._name, self._log, self._stall_timeout_s = actor, name, log, stall_timeout_s

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        self._actor.send.remote(method, *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.wait(self._actor.call.remote(method, *args, **kwargs), method)

    def wait(self, ref: Any, method: str) -> Any:
        """The answer of a running call; raises what the service raised."""
        begun = time.monotonic()
        while not ray.wait([ref], timeout=_LOOK_EVERY_S)[0]:
            require_head()
            if self._stall_timeout_s is not None and time.monotonic() - begun > self._stall_timeout_s:
                raise stalled(f"{self._name}.{method} has", self._stall_timeout_s, self._name, method, self._log)
        try:
            return ray.get(ref)
        except RayTaskError as error:
            cause = original_error(error)
            add_circumstances(cause, role=self._name, method=method)
        except RayError as error:
            cause = death(cause_of_death(error), self._name, None, method, self._log)
        raise cause

    def stop(self) -> None:
        if cluster_answers():
            ray.kill(self._actor)


def start_ray_service(
    recipe: ClassWithInitArgs,
    env: dict[str, str],
    log_dir: str | Path | None,
    max_concurrency: int,
    stall_timeout_s: float | None,
) -> RayServiceHandle:
    """See `start_service`."""
    name = recipe.cls.__name__
    log = None if log_dir is None else str(Path(log_dir).resolve() / f"{name}.log")
    options: dict[str, Any] = {
        "num_cpus": 0,
        "runtime_env": {"env_vars": worker_env(env)},
        "max_concurrency": max_concurrency,
        # beside the driver: a machine that leaves does not take it along, and it sees the driver's files
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    }
    actor: Any = ray.remote(ServiceProcess).options(**options).remote(recipe, log)
    handle = RayServiceHandle(actor, name, log, stall_timeout_s)
    handle.wait(actor.start.remote(), "its constructor")
    return handle
