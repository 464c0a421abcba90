"""A service in a Ray actor on the driver's machine. Its process imports torch only if the service does."""

import time
from pathlib import Path

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_lite.errors import WorkerDiedError, add_circumstances
from verl_lite.single_controller import ray_cluster, ray_errors
from verl_lite.single_controller.liveness import Address, Lookout, silent_process
from verl_lite.single_controller.resource_pool import ClassWithInitArgs, LocalService

_POLL_S = 0.5


class ServiceProcess:
    """The actor in the service's process."""

    def __init__(self, umask: int, log_file: str | None) -> None:
        ray_cluster.begin_process(umask, log_file)
        self._log_file = log_file

    def start(self, recipe: ClassWithInitArgs) -> None:
        """Constructs the service's object."""
        # not in __init__: Ray would wrap an exception of an actor's constructor
        with ray_errors.portable_errors():
            self._service = LocalService(recipe)

    def send(self, method: str, *args: object, **kwargs: object) -> None:
        self._service.send(method, *args, **kwargs)

    def call(self, method: str, *args: object, **kwargs: object) -> object:
        ray_cluster.restore_log(self._log_file)
        with ray_errors.portable_errors():
            return self._service.call(method, *args, **kwargs)


class RayService:
    """Starts a service and is its handle, which can be pickled. For the arguments see `start_service`."""

    def __init__(
        self,
        recipe: ClassWithInitArgs,
        env: dict[str, str],
        log_dir: str | Path | None,
        max_concurrency: int,
        stall_timeout_s: float | None,
    ) -> None:
        self._name = recipe.cls.__name__
        self._stall_timeout_s = stall_timeout_s
        self._log: str | None = None
        if log_dir is not None:
            # absolute, because an actor of a joined cluster has another working directory
            folder = Path(log_dir).resolve()
            self._log = str(folder / f"{self._name}.log")

        # on the driver's machine: the service survives the loss of other machines and sees the driver's files
        own_node = ray.get_runtime_context().get_node_id()
        actor = ray.remote(ServiceProcess)
        self._actor = actor.options(
            num_cpus=0,
            runtime_env={"env_vars": ray_cluster.worker_env(env)},
            max_concurrency=max_concurrency,
            scheduling_strategy=NodeAffinitySchedulingStrategy(own_node, soft=False),
        ).remote(ray_cluster.current_umask(), self._log)
        self._lookout = Lookout()
        self._process: tuple[Address, int] | None = None
        self._wait(self._actor.start.remote(recipe), "its constructor")
        self._process = ray_cluster.process_of(self._actor)

    def send(self, method: str, *args: object, **kwargs: object) -> None:
        self._actor.send.remote(method, *args, **kwargs)

    def call(self, method: str, *args: object, **kwargs: object) -> object:
        ref = self._actor.call.remote(method, *args, **kwargs)
        return self._wait(ref, method)

    def _wait(self, ref: ray.ObjectRef, method: str) -> object:
        """Waits for a call and returns its result, or raises the exception of the method or the cause of its end."""
        start_time = time.monotonic()
        limit_s = self._stall_timeout_s
        # Ray keeps the call of a stopped process pending forever
        while not self._has_ended(ref):
            if self._process is not None:
                address, pid = self._process
                if self._lookout.lost([address]):
                    raise self._death(f"{silent_process(address, pid)}. The run ends the process", method)
            if limit_s is not None and time.monotonic() - start_time > limit_s:
                raise ray_errors.stalled(f"{self._name}.{method} has", limit_s, self._name, method, self._log)
        try:
            return ray_cluster.call_ray(lambda: ray.get(ref))
        except RayTaskError as error:
            cause = ray_errors.original_error(error)
            add_circumstances(cause, role=self._name, method=method)
        except RayError as error:
            # if the raylet has ended, that is the cause
            ray_cluster.require_ray()
            cause = self._death(ray_errors.cause_of_death(error), method)
        raise cause

    def _has_ended(self, ref: ray.ObjectRef) -> bool:
        """Waits up to _POLL_S seconds for a call. Returns True if it has ended."""
        ended, _ = ray_cluster.call_ray(lambda: ray.wait([ref], timeout=_POLL_S))
        return bool(ended)

    def _death(self, cause: str, method: str) -> WorkerDiedError:
        return ray_errors.death(cause, self._name, None, method, self._log)

    def stop(self) -> None:
        if ray_cluster.cluster_answers():
            ray.kill(self._actor)
