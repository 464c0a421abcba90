"""Whether the options that every run has fit each other and the machine: a part of each command's checks.

Takes any `RunOptions`; yields problems, each naming key, value, what was expected and what to change.
"""

from __future__ import annotations

from collections.abc import Collection

from verl_lite.config.checks.values import Problems
from verl_lite.config.keys import unknown_value
from verl_lite.config.ppo import RunOptions

TRACKERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")


def run(config: RunOptions, trackers: Collection[str]) -> Problems:
    """Trackers, and how Ray starts."""
    ray_init = config.ray_kwargs.ray_init
    for tracker in config.trainer.logger:
        if ":" not in tracker and tracker not in trackers:
            yield unknown_value("trainer.logger", tracker, trackers)
    if ray_init.address is not None and ray_init.num_cpus is not None:
        yield (
            f"ray_kwargs.ray_init.num_cpus={ray_init.num_cpus} has no effect on the cluster at "
            f"ray_kwargs.ray_init.address={ray_init.address}, which is already running: leave one of them out"
        )


def slots(config: RunOptions, count: int | None, available: int | None) -> Problems:
    """Devices (on a CPU: worker slots) against the machine and the backend. count: of the whole run; available: of this
    machine; None = not known."""
    trainer, address = config.trainer, config.ray_kwargs.ray_init.address
    if trainer.nnodes > 1 and address is None:
        yield (
            f"trainer.nnodes={trainer.nnodes} needs a cluster that spans the machines: start Ray on them and give "
            "ray_kwargs.ray_init.address=HOST:PORT, or set trainer.nnodes=1"
        )
    if count is None or trainer.nnodes < 1 or count < 1:
        return
    here = count // trainer.nnodes
    if trainer.backend == "inline" and count > 1:
        yield (
            f"trainer.backend=inline runs everything in one process, but trainer.n_gpus_per_node={here} and "
            f"trainer.nnodes={trainer.nnodes}: set both to 1, or trainer.backend=ray"
        )
    if available is not None and address is None and here > available:
        noun = f"core{'s' * (available != 1)}" if runs_on_cpu(trainer.device) else f"GPU{'s' * (available != 1)}"
        yield (
            f"trainer.n_gpus_per_node={here} is more than the {available} {noun} of this machine: "
            f"set at most {available}"
        )


def group_size(name: str, size: int, count: int) -> Problems:
    """Whether ranks that share one copy of the weights divide all ranks. name: the key of `size`."""
    if size > 0 and count % size != 0:
        yield f"{name}={size} does not divide the {count} devices; use -1 or one of {divisors(count)}"


def divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def runs_on_cpu(device: str) -> bool:
    """Whether `trainer.device` means the CPU of this machine."""
    if device == "auto":
        from verl_lite.device import device_type

        return device_type() == "cpu"
    return device == "cpu"
