"""What every command that trains with workers does around its training: from the command line to the exit status, with
tries after a lost worker, a run folder of its own, and the command that goes on after a stop.

Takes the command's options (any `RunOptions`) and the function that trains once; knows nothing of what is trained.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from trainer.checkpoint import saved_steps
from trainer.cli import failure_text
from trainer.trackers.base import check_trackers
from verl_lite.config import LoadedConfig, RunOptions, help_config, print_config
from verl_lite.device import device_type, visible_devices
from verl_lite.errors import ClusterLostError, NoRoomError, StalledError, UserError, WorkerDiedError
from verl_lite.machine.lease import Holder, LeaseTaken, leased_file
from verl_lite.single_controller.guard import guarded

MOST_DEFAULT_CPU_SLOTS = 2
INTERRUPTED = 130  # exit status of a run that its user stopped, as shells have it

Options = TypeVar("Options", bound=RunOptions)
Attempt = Callable[[int, ExitStack], int]
"""Trains once, on so many slots; what it holds meanwhile ends with the stack. Gives the exit status."""


def run_or_show(loaded: LoadedConfig[Options], command: list[str], attempt: Attempt) -> int:
    """Does what the command line asks for: the help, the configuration, or the run. Returns the exit status.

    command: as the user would type it, for the sentence that says how to go on.
    """
    config = loaded.config
    if loaded.action == "help":
        print(help_config(type(config)))
        return 0
    slots = resolve_slots(config)
    if loaded.action == "print":
        print(print_config(loaded))
        return 0
    check_trackers(config.trainer.logger)
    return with_retries(config, command, lambda stack: attempt(slots, stack))


def with_retries(config: RunOptions, command: list[str], attempt: Callable[[ExitStack], int]) -> int:
    """Tries again from the last checkpoint where a worker was lost, as often as trainer.max_retries says; returns the
    exit status."""
    lost: WorkerDiedError | StalledError | None = None
    for retries_left in range(config.trainer.max_retries, -1, -1):
        try:
            with ExitStack() as stack:
                stack.enter_context(guarded())
                return attempt(stack)
        except (WorkerDiedError, StalledError) as error:
            if not retries_left or isinstance(error, ClusterLostError):  # which cannot be joined anew by this process
                raise
            lost = error
            print(failure_text(error), file=sys.stderr)
            print(f"Starting again from the last checkpoint; trainer.max_retries leaves {retries_left - 1} more.")
        except NoRoomError as error:
            if lost is None:
                raise
            lost.add_note(f"Starting again failed: {error}\n{how_to_continue(command, run_folder(config))}")
            raise lost from None
        config.trainer.resume_mode, config.trainer.resume_from_path = "auto", None
    raise AssertionError("the last try returns or raises")


def how_to_continue(command: list[str], run_dir: Path) -> str:
    """The command that goes on where a stopped run ended."""
    folder = f"trainer.default_local_dir={run_dir}"
    return "Stopped. To go on:\n  " + shlex.join([*command, folder, "trainer.resume_mode=auto"])


def available_devices(config: RunOptions) -> int:
    """GPUs that this process sees, or its CPU cores."""
    return visible_devices(device_type(config.trainer.device))


def resolve_slots(config: RunOptions) -> int:
    """Fills in trainer.n_gpus_per_node and gives the number of slots of the run."""
    trainer = config.trainer
    if trainer.n_gpus_per_node is None:
        available = available_devices(config)
        on_cpu = device_type(trainer.device) == "cpu"
        trainer.n_gpus_per_node = min(MOST_DEFAULT_CPU_SLOTS, available) if on_cpu else available
        if trainer.backend == "inline":
            trainer.n_gpus_per_node = 1
    return trainer.n_gpus_per_node * trainer.nnodes


# -------------------------------------------------------------------------------------------------------- run folder


def run_folder(config: RunOptions) -> Path:
    """Where the run folder is, or will be."""
    return Path(config.trainer.default_local_dir).absolute()


@contextmanager
def held_folder(run_dir: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, no other run can write to this run folder. Raises UserError if one does already."""
    with ExitStack() as stack:
        try:
            stack.enter_context(leased_file(run_dir / "in_use", Holder.this_process(str(run_dir))))
        except LeaseTaken as error:
            raise UserError(
                f"trainer.default_local_dir={run_dir} is in use by {error}: choose another trainer.experiment_name, "
                "or wait"
            ) from None
        except OSError as error:
            tell(f"{run_dir} cannot be locked ({error.strerror}): a second run in it would not be noticed")
        yield


def make_run_dir(config: RunOptions) -> Path:
    """Makes the run folder. Raises UserError where it cannot be made or written to, and for one that holds another run
    unless that is to be resumed."""
    run_dir = run_folder(config)
    taken = (run_dir / "metrics.jsonl").exists() or saved_steps(run_dir)
    if taken and config.trainer.resume_mode == "disable":
        raise UserError(
            f"trainer.default_local_dir={run_dir} holds a run already, and trainer.resume_mode=disable. Choose another "
            "trainer.experiment_name, or continue that run with trainer.resume_mode=auto"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise UserError(
            f"trainer.default_local_dir={run_dir} cannot be written to ({error.strerror}): give a folder of yours on a "
            "disk with room"
        ) from error
    return run_dir
