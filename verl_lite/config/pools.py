"""The devices of rollout engines: those of the trainer, or with hybrid_engine=false a pool of their own."""

from verl_lite.config.fields import Problems
from verl_lite.config.ppo import PPOConfig
from verl_lite.machine.device import is_on_cpu


def rollout_devices(config: PPOConfig, slots: int) -> int:
    """Returns the number of devices with a rollout engine.

    Args:
        config: the options of the run.
        slots: number of devices of the trainer.
    """
    if config.hybrid_engine:
        return slots
    per_node = config.rollout.n_gpus_per_node
    if not per_node:
        # as many as the trainer; a wrong number of machines is reported elsewhere
        per_node = slots // max(1, config.trainer.nnodes)
    return config.rollout.nnodes * per_node


def num_engines(config: PPOConfig, slots: int) -> int:
    """Returns the number of rollout engines. For the arguments see `rollout_devices`."""
    num_devices = rollout_devices(config, slots)
    return max(1, num_devices // config.rollout.tensor_model_parallel_size)


def pool_problems(config: PPOConfig, count: int | None, available: int | None) -> Problems:
    """Checks the devices of rollout engines in a separate pool.

    Args:
        config: the options of the run.
        count: number of devices of the trainer; None = unknown.
        available: number of devices of this machine; None = not checked.
    """
    rollout = config.rollout
    trainer = config.trainer
    has_own_devices = not config.hybrid_engine and rollout.nnodes > 0
    if not has_own_devices or count is None or trainer.nnodes < 1:
        return

    per_node = rollout_devices(config, count) // rollout.nnodes
    parallel = rollout.tensor_model_parallel_size
    if per_node % parallel:
        yield (
            f"rollout.n_gpus_per_node={per_node} with rollout.tensor_model_parallel_size={parallel}: each engine has "
            f"{parallel} devices of one machine: set a multiple of {parallel} devices, or one of {divisors(per_node)}"
        )

    # in a joined cluster, the engines may be on other machines
    ray_init = config.ray_kwargs.ray_init
    if available is None or ray_init.address is not None:
        return
    remedies = "set fewer of either, or join a cluster with ray_kwargs.ray_init.address"
    if is_on_cpu(trainer.device):
        # several processes may share a core
        available = max(available, ray_init.num_cpus or 0)
        remedies += ", or share cores with ray_kwargs.ray_init.num_cpus"
    # both pools have devices on this machine; `machine_problems` reports a trainer that needs more devices alone
    needed = count // trainer.nnodes + per_node
    if count <= available < needed:
        yield (
            f"trainer.n_gpus_per_node={count} and rollout.n_gpus_per_node={per_node} are more than the {available} "
            f"{device_noun(trainer.device)} of this machine: {remedies}"
        )


def device_noun(device: str) -> str:
    """Returns the plural of what `trainer.device` counts."""
    return "cores" if is_on_cpu(device) else "GPUs"


def divisors(number: int) -> str:
    """Returns the divisors of a number, as a list for a message."""
    exact = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(exact)
