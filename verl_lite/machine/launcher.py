"""Refuses to run under a launcher that starts several copies of a command: torchrun, accelerate, mpirun, srun.

The commands start their own processes, one per device, so each copy would be a whole training of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from verl_lite.errors import UserError


@dataclass(frozen=True)
class Launcher:
    """A launcher, and the environment variables in which it tells a process the number of all processes and its own.

    Attributes:
        name: commands of the launcher.
        size: variable with the number of processes.
        rank: variable with the number of this process.
    """

    name: str
    size: str
    rank: str


LAUNCHERS = (
    Launcher("torchrun, accelerate or deepspeed", "WORLD_SIZE", "RANK"),
    Launcher("mpirun (Open MPI)", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    Launcher("mpirun (MPICH or Intel MPI)", "PMI_SIZE", "PMI_RANK"),
    Launcher("mpirun (MVAPICH)", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    Launcher("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK"),
    Launcher("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def refuse_launcher(environment: Mapping[str, str]) -> None:
    """Raises UserError if a launcher started several copies of this process.

    One copy, such as `srun --ntasks=1` or `torchrun --nproc_per_node=1`, is no problem.
    """
    for launcher in LAUNCHERS:
        copies = _count(environment, launcher.size)
        rank = _count(environment, launcher.rank)
        if launcher.name == "srun" and copies == 0 and "SLURM_STEP_ID" in environment:
            # A batch script has SLURM_NTASKS too, the tasks that its steps may have; only a step has a SLURM_STEP_ID.
            copies = _count(environment, "SLURM_NTASKS")
        if copies > 1 or rank > 0:
            raise UserError(_refusal(launcher, max(copies, rank + 1), environment))
    # only torchrun sets this variable; without WORLD_SIZE the number of copies is unknown
    if "TORCHELASTIC_RUN_ID" in environment and _count(environment, "WORLD_SIZE") == 0:
        raise UserError(_refusal(LAUNCHERS[0], 0, environment))


def _refusal(launcher: Launcher, copies: int, environment: Mapping[str, str]) -> str:
    """Returns the message of the error.

    Args:
        launcher: the launcher that has started copies of this command.
        copies: number of copies; 0 if it is unknown.
        environment: environment variables of this process.
    """
    names = [launcher.size, launcher.rank, "TORCHELASTIC_RUN_ID"]
    names = [name for name in names if name in environment]
    variables = " ".join(f"{name}={environment[name]}" for name in names)
    unset = " ".join(f"-u {name}" for name in names)
    # torchrun and Open MPI say how many copies run on this machine
    per_node = _count(environment, "LOCAL_WORLD_SIZE") or _count(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") or copies
    devices = f"trainer.n_gpus_per_node={per_node or 'N'}"
    machines = ""
    if per_node and copies > per_node:
        num_machines = -(-copies // per_node)
        machines = f" trainer.nnodes={num_machines} ray_kwargs.ray_init.address=HOST:PORT"
    number = "copies of this command"
    if copies:
        number = f"{copies} copies of this command"
    return (
        f"the environment variables {variables} say that {launcher.name} starts {number}, and each of them would be a "
        "training of its own: the command itself starts one process per device. Run it once, without the launcher, "
        f"with the options {devices} trainer.backend=ray{machines}. If the variables are left over from something "
        f"else, unset them: env {unset} python -m ..."
    )


def _count(environment: Mapping[str, str], name: str) -> int:
    """Returns the number in a variable; 0 if it is not set or no number."""
    text = environment.get(name, "")
    if not text.isascii() or not text.isdigit():
        return 0
    return int(text)
