"""A service with Ray: one object in an actor of its own, whose handle can be given to workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from verl_lite.errors import add_circumstances
from verl_lite.single_controller.local_worker_group import LocalService
from verl_lite.single_controller.ray_cluster import worker_env
from verl_lite.single_controller.ray_errors import death, original_error
from verl_lite.single_controller.ray_worker_group import Portable, redirect_output
from verl_lite.single_controller.worker_group import ClassWithInitArgs, StalledError


class ServiceProcess:
    """What runs in the service's process."""

    def __init__(self, recipe: ClassWithInitArgs, log_file: str | None) -> None:
        self._recipe = recipe
        if log_file is not None:
            redirect_output(log_file)

    def start(self) -> None:
        """Make the object; apart from the constructor, so that its error arrives as it was raised."""
        with Portable():
            self._service = LocalService(self._recipe)

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        self._service.send(method, *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with Portable():
            return self._service.call(method, *args, **kwargs)


class RayServiceHandle:
    """Handle of a service; pickles."""

    def __init__(self, actor: Any, name: str, log: str | None, stall_timeout_s: float | None) -> None:
        self._actor, self._stall_timeout_s = actor, stall_timeout_s
        self._name = name
        self._log = log

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        self._actor.send.remote(method, *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.wait(self._actor.call.remote(method, *args, **kwargs), method)

    def wait(self, ref: Any, method: str) -> Any:
        """The answer of a running call; raises what the service raised."""
        cause: Exception
        try:
            return ray.get(ref, timeout=self._stall_timeout_s)
        except GetTimeoutError:
            cause = StalledError(
                f"{self._name}.{method} has not answered for {self._stall_timeout_s:g} s (trainer.stall_timeout_s). "
                "Raise the limit if the work simply takes longer"
            )
            add_circumstances(cause, role=self._name, method=method, log=self._log)
        except RayTaskError as error:
            cause = original_error(error)
            add_circumstances(cause, role=self._name, method=method)
        except RayError as error:
            cause = death(error, self._name, None, method, self._log, "")
        raise cause

    def stop(self) -> None:
        if ray.is_initialized():
            ray.kill(self._actor)


def start_ray_service(
    recipe: ClassWithInitArgs,
    *,
    env: dict[str, str],
    log_dir: str | Path | None,
    max_concurrency: int,
    stall_timeout_s: float | None,
) -> RayServiceHandle:
    """See `start_service`."""
    name = recipe.cls.__name__
    log = None if log_dir is None else str(Path(log_dir).resolve() / f"{name}.log")
    options = {"num_cpus": 0, "runtime_env": {"env_vars": worker_env(env)}, "max_concurrency": max_concurrency}
    actor: Any = ray.remote(ServiceProcess).options(**options).remote(recipe, log)
    handle = RayServiceHandle(actor, name, log, stall_timeout_s)
    handle.wait(actor.start.remote(), "its constructor")
    return handle
