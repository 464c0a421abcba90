"""The devices of rollout engines: those of the trainer, or with hybrid_engine=false a pool of their own."""

from verl_lite.config.fields import Problems
from verl_lite.config.ppo import PPOConfig
from verl_lite.device import is_on_cpu


def rollout_devices(config: PPOConfig, slots: int) -> int:
    """Returns the number of devices with a rollout engine. slots: devices of the trainer."""
    rollout, here = config.rollout, config.rollout.n_gpus_per_node or slots // max(1, config.trainer.nnodes)
    return slots if config.hybrid_engine else rollout.nnodes * here


def num_engines(config: PPOConfig, slots: int) -> int:
    """Returns the number of rollout engines. slots: devices of the trainer."""
    return max(1, rollout_devices(config, slots) // config.rollout.tensor_model_parallel_size)


def pool_problems(config: PPOConfig, count: int | None, available: int | None) -> Problems:
    """Checks the devices of rollout engines in a separate pool. For the arguments see `machine_problems`."""
    rollout, trainer, address = config.rollout, config.trainer, config.ray_kwargs.ray_init.address
    nodes, here, parallel = rollout.nnodes, rollout.n_gpus_per_node, rollout.tensor_model_parallel_size
    shown = f"rollout.nnodes={nodes} with hybrid_engine={str(config.hybrid_engine).lower()}"
    if config.hybrid_engine:
        if nodes:
            yield f"{shown}: the engines share the trainer's devices: set hybrid_engine=false, or rollout.nnodes=0"
        return
    if not nodes:
        yield f"{shown}: there are no devices for the engines: set rollout.nnodes=1 rollout.n_gpus_per_node=1, or more"
        return
    if trainer.backend == "inline":
        yield "trainer.backend=inline with hybrid_engine=false: the engines need processes: set trainer.backend=ray"
    if nodes > 1 and address is None:
        yield f"rollout.nnodes={nodes} needs a Ray cluster: set ray_kwargs.ray_init.address=HOST:PORT"
    if count is None or trainer.nnodes < 1:
        return
    here = rollout_devices(config, count) // nodes
    if here % parallel:
        yield (
            f"rollout.n_gpus_per_node={here} with rollout.tensor_model_parallel_size={parallel}: each engine has "
            f"{parallel} devices of one machine: set a multiple of {parallel} devices, or one of {divisors(here)}"
        )
    total = count // trainer.nnodes + here
    if available is not None and is_on_cpu(trainer.device):  # several processes may share a core
        available = max(available, config.ray_kwargs.ray_init.num_cpus or 0)
    if available is not None and address is None and count <= available < total:
        noun = "cores" if is_on_cpu(trainer.device) else "GPUs"
        yield (
            f"trainer.n_gpus_per_node={count} and rollout.n_gpus_per_node={here} are more than the {available} {noun} "
            "of this machine: set fewer of either, or join a cluster with ray_kwargs.ray_init.address"
            + (", or share cores with ray_kwargs.ray_init.num_cpus" if is_on_cpu(trainer.device) else "")
        )


def divisors(number: int) -> str:
    """Returns the divisors of a number, as a list for a message."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
