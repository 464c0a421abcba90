"""The frame of every command that trains: one run from its command line to its exit status.

A command gives a `Job`: its options, how its data is read and tried, and how its trainer is built. All else is here:
help, retries, devices, the run folder and its lock, resuming, the plan, signals, trackers, the crash dump, the report.
Cheap things come first: processes are started when options, data and disk have been looked at.
"""

import fcntl
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar, Generic, Protocol, TypeVar

import psutil
from rich.console import RenderableType

from trainer import final_report
from trainer.checkpoint import saved_steps, whole_checkpoint
from trainer.cli import INTERRUPTED, WRONG_INPUT, failure_text, file_mask, stopping_on_signal
from trainer.console import Console
from trainer.crash_dump import dump_on_failure
from trainer.inspect import closing_findings, findings_shown
from trainer.recipe import prepare_recipe
from trainer.reports.health import DIVERGED
from trainer.resources import reserved_devices, resolve_slots
from trainer.resume import refuse_another_run
from trainer.saving import Saver, require_room_for_checkpoints
from trainer.tracking import Tracking, check_trackers
from verl_lite.config import (
    LoadedConfig,
    RunConfig,
    RunOptions,
    help_text,
    print_config,
    save_config,
)
from verl_lite.device import device_type, visible_devices
from verl_lite.errors import ClusterLostError, NoRoomError, StalledError, UserError, WorkerDiedError
from verl_lite.machine.gpus import ResourceRequest
from verl_lite.random_state import seed_random_state
from verl_lite.single_controller.guard import guarded

LOCK = "in_use"

Options = TypeVar("Options", bound=RunOptions)


class Trainer(Protocol):
    """What a job builds. `fit` gives a `final_report.FitResult`."""

    saver: Saver
    steps: Any

    def fit(self) -> Any: ...


@dataclass
class Report:
    """What a job adds to the report of its run: lines first, then pictures by name, then commands to go on with."""

    lines: list[RenderableType] = field(default_factory=list)
    pictures: Mapping[str, Path | None] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)


class Job(Generic[Options]):
    """What a command trains. Made anew for each try; the frame calls its methods in the order in which they stand.

    module: the command is `python -m module`. to_look: how a user looks at a run that has no step left, with {run_dir}
    in it. continues: whether it starts from checkpoints of its run folder.
    """

    module: ClassVar[str]
    to_look: ClassVar[str] = "python -m trainer.report {run_dir}"
    continues: bool = True

    def __init__(self, config: Options, slots: int, console: Console) -> None:
        self.config, self.slots, self.console = config, slots, console
        self.run_dir = run_folder(config)

    def prepare(self) -> None:
        """Makes what the options name, before anybody looks for it."""
        prepare_recipe(self.config)

    def check(self, available: int | None) -> None:
        """Raises UserError for options that cannot work. available: devices of this machine; None = do not compare."""

    def request(self) -> ResourceRequest:
        """What the run takes of one machine."""
        trainer: RunConfig = self.config.trainer
        return ResourceRequest(self.slots // trainer.nnodes, shared=trainer.share_devices)

    def read_data(self) -> int:
        """Reads the data and tries all that can fail cheaply; returns the training steps of the whole run."""
        raise NotImplementedError

    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint, about; 0 = not known."""
        return 0

    def check_folder(self) -> None:
        """A last look into the run folder; raises UserError if the run cannot continue what is there."""

    def plan(self) -> str:
        """The arithmetic of the run as text; empty = nothing to count, and no progress to show."""
        return ""

    def full_plan(self) -> tuple[str, bool]:
        """For trainer.dry_run: all that is known before the start, and whether it fits this machine."""
        return self.plan(), True

    def build(self, tracking: Tracking) -> AbstractContextManager[Trainer]:
        """The trainer with everything it is made of, started; ended with the context."""
        raise NotImplementedError

    def report(self, trainer: Trainer, result: Any) -> Report:
        """What to show besides validation, samples and places. The workers have ended."""
        return Report()


def run(job_class: type[Job[Options]], loaded: LoadedConfig[Options], argv: list[str], **parts: Any) -> int:
    """Does what a command line, read into `loaded`, asks for: the help, the configuration, or the run. Returns the exit
    status.

    Where a worker was lost it tries again from the last checkpoint, as often as trainer.max_retries says.

    Args:
        parts: more arguments of the job.
    """
    config: Options = loaded.config
    if loaded.action == "help":
        print(help_text(loaded))
        return 0
    slots = resolve_slots(config)
    if loaded.action == "print":
        print(print_config(loaded))
        return 0
    trainer: RunConfig = config.trainer
    command = ["python", "-m", job_class.module, *argv]
    check_trackers(trainer.logger)
    lost: Exception | None = None
    for retries_left in range(trainer.max_retries, -1, -1):
        job = job_class(config, slots, Console(verbosity=loaded.verbosity), **parts)
        try:
            with ExitStack() as stack:
                stack.enter_context(guarded())
                return train(job, loaded, command, stack)
        except ClusterLostError as error:  # this process cannot join another
            spec = getattr(sys.modules["__main__"], "__spec__", None)  # a debugger leaves it out
            if retries_left and spec is not None and spec.name.removesuffix(".__main__") == job.module:
                error.again = [f"trainer.default_local_dir={job.run_dir}", f"trainer.max_retries={retries_left - 1}"]
                error.again += ["~trainer.resume_from_path", "trainer.resume_mode=auto"] if has_own(job) else []
            raise
        except (WorkerDiedError, StalledError) as error:
            if not retries_left:
                raise
            lost = error
            print(failure_text(error), file=sys.stderr)
            print(f"Starting again from the last checkpoint; trainer.max_retries leaves {retries_left - 1} more.")
        except NoRoomError as error:
            if lost is None:
                raise
            lost.add_note(f"Starting again failed: {error}\n{how_to_continue(command, job.run_dir)}")
            raise lost from None
        if has_own(job):
            trainer.resume_mode, trainer.resume_from_path = "auto", None
    raise AssertionError("the last try returns or raises")


def has_own(job: Job[Options]) -> bool:
    """True where another try begins with what the run folder has: not where nothing was saved yet of a run that began
    with another's checkpoint."""
    return job.config.trainer.resume_mode != "resume_path" or bool(saved_steps(job.run_dir))


def train(job: Job[Options], loaded: LoadedConfig[Options], command: list[str], stack: ExitStack) -> int:
    """One try, from the data to the report; returns the exit status. What it holds meanwhile ends with `stack`."""
    config, console, run_dir = job.config, job.console, job.run_dir
    for note in loaded.notes:
        console.note(note)
    job.prepare()
    if config.trainer.dry_run:
        return dry_run(job, loaded, stack)
    job.check(visible_devices(device_type(config.trainer.device)))
    stack.enter_context(reserved_devices(config, job.request(), console.note))
    total_steps = job.read_data()
    make_run_dir(config, stack)
    folder = HeldFolder(run_dir, console.note, stack)
    check_run_dir(job, total_steps)
    plan = job.plan()
    folder.config_file = save_config(loaded, run_dir / "config.yaml").read_text(encoding="utf-8")
    seed_random_state(config.trainer.seed)
    if plan:
        console.print(plan)
        console.start(total_steps)

    with (
        Tracking(run_dir, config, console) as tracking,
        job.build(tracking) as trainer,
        saying_how_to_continue(command, run_dir),
        stopping_on_signal(trainer.steps.stop, console.note),
        dump_on_failure(trainer, run_dir),
    ):
        tracking.before_log = partial(folder.restore, trainer.saver)
        result = trainer.fit()
        folder.restore()
    report = job.report(trainer, result)
    findings = closing_findings(run_dir) if plan else []
    for part in [*report.lines, findings_shown(findings, 2) if findings else None]:
        if part:
            console.print(part)
    console.print(final_report.final_report(result, run_dir, report.pictures, report.commands))
    if findings and findings[0].text.startswith(DIVERGED):
        console.note(f"{findings[0].text}; {findings[0].advice}")
    if result.stopped:
        console.print(how_to_continue(command, run_dir))
    return INTERRUPTED if result.stopped else 0


def dry_run(job: Job[Options], loaded: LoadedConfig[Options], stack: ExitStack) -> int:
    """`trainer.dry_run=true`: all that can be checked without workers and devices, the plan, and the resolved
    configuration as RUN/dry_run.yaml. Returns the exit status: a plan that does not fit is wrong input."""
    job.check(None)
    total_steps = job.read_data()
    stack.enter_context(file_mask(job.config.trainer.umask, job.run_dir))
    stack.enter_context(locked_folder(job.run_dir, job.console.note))  # no other run is writing a checkpoint there
    check_run_dir(job, total_steps)
    save_config(loaded, job.run_dir / "dry_run.yaml")
    text, fits = job.full_plan()
    job.console.print(text)
    job.console.print(f"Nothing was started (trainer.dry_run=true). All options: {job.run_dir / 'dry_run.yaml'}")
    return 0 if fits else WRONG_INPUT


def how_to_continue(command: list[str], run_dir: Path) -> str:
    """Whether a stopped run has saved a step, and the command that goes on from there."""
    again = {"trainer.default_local_dir": f"{run_dir}", "trainer.resume_mode": "auto"}
    kept = [word for word in command if word.partition("=")[0].lstrip("+~") not in (*again, "trainer.resume_from_path")]
    none = "" if saved_steps(run_dir) else " No step is saved, since no checkpoint was due (trainer.save_freq)."
    return f"Stopped.{none} To go on:\n  " + shlex.join([*kept, *(f"{key}={value}" for key, value in again.items())])


@contextmanager
def saying_how_to_continue(command: list[str], run_dir: Path) -> Iterator[None]:
    """Adds to an interrupt that leaves the block how the run can continue."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        stopped.add_note(how_to_continue(command, run_dir))
        raise


def run_folder(config: RunOptions) -> Path:
    """Where the run folder is, or will be."""
    return Path(config.trainer.default_local_dir).expanduser().absolute()


def make_run_dir(config: RunOptions, stack: ExitStack) -> Path:
    """Makes the run folder; until `stack` ends files are made with trainer.umask. Raises UserError if it cannot be made
    or written to, or holds another run that is not to be resumed."""
    run_dir = run_folder(config)
    taken = (run_dir / "metrics.jsonl").exists() or saved_steps(run_dir)
    if taken and config.trainer.resume_mode == "disable":
        raise UserError(
            f"trainer.default_local_dir={run_dir} holds a run already, and trainer.resume_mode=disable. Choose another "
            "trainer.experiment_name, or continue that run with trainer.resume_mode=auto"
        )
    try:
        stack.enter_context(file_mask(config.trainer.umask, run_dir))
        (run_dir / LOCK).touch()
    except OSError as error:
        raise UserError(
            f"trainer.default_local_dir={run_dir} cannot be written to ({error.strerror}: {error.filename}): "
            "give a folder of yours on a disk with room"
        ) from error
    return run_dir


class HeldFolder:
    """The run folder of a run that trains, locked until `stack` ends. config_file: the text of its config.yaml."""

    config_file = ""

    def __init__(self, run_dir: Path, note: Callable[[str], None], stack: ExitStack) -> None:
        self.run_dir, self.note, self.lock = run_dir, note, stack.enter_context(ExitStack())
        self.file = self.lock.enter_context(locked_folder(run_dir, note))

    def restore(self, saver: Saver | None = None) -> None:
        """Makes the folder again if somebody deleted or renamed it: locked and with config.yaml; `saver` writes a
        checkpoint after the step at hand if the run saves at intervals. Raises UserError if another run has it now."""
        try:
            if os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.run_dir / LOCK)):
                return
        except FileNotFoundError:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        self.lock.close()
        self.file = self.lock.enter_context(locked_folder(self.run_dir, self.note))
        (self.run_dir / "config.yaml").write_text(self.config_file, encoding="utf-8")
        if saver is not None:
            saver.is_overdue |= saver.trainer.save_freq > 0
        self.note(
            f"{self.run_dir} WAS DELETED OR RENAMED while the run trains. It is made again with config.yaml, and the "
            "training continues. The metrics, samples, logs and checkpoints up to here are not in it. Trackers that "
            "write into it are cut off: after the run, python -m trainer.sync gives them the metrics from here on"
        )


@contextmanager
def locked_folder(run_dir: Path, log: Callable[[str], None]) -> Iterator[IO[str]]:
    """Inside, no other run can write to this folder; UserError if one does already. The kernel takes the lock off a
    process that is killed. Gives the open file that is locked."""
    path = run_dir / LOCK
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"trainer.default_local_dir={run_dir} is in use by {path.read_text() or 'another run'}: choose another "
                "trainer.experiment_name, or wait"
            ) from None
        except OSError as error:
            log(f"{run_dir} cannot be locked ({error.strerror}): a second run in it would not be noticed")
        file.truncate(0)
        file.write(f"pid {os.getpid()} of user {psutil.Process().username()}")
        file.flush()
        try:
            yield file
        finally:
            file.truncate(0)  # nobody has it any more; the folder may be another run's by now


def check_run_dir(job: Job[Options], total_steps: int) -> None:
    """Raises UserError where the run cannot continue from what the folder has, or its checkpoints find no room."""
    trainer = job.config.trainer
    whole_checkpoint(job.run_dir, trainer.resume_mode, trainer.resume_from_path, job.console.note)
    if job.continues:
        refuse_another_run(job.config, job.run_dir, total_steps, job.to_look.format(run_dir=job.run_dir))
        require_room_for_checkpoints(trainer, job.run_dir, total_steps, job.checkpoint_bytes())
    job.check_folder()
