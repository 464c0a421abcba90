"""Runs any training command, from its command line to its exit status.

A command provides a `Job`: its options, how its data is read and checked, and how its trainer is built. This file does
the rest: help, retries, devices, run folder and lock, resuming, plan, signals, trackers, crash dump and report.
Options, data and disk are checked before any process is started.
"""

import fcntl
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar, Generic, TypeVar

import psutil
from rich.console import RenderableType

from trainer.callbacks import Callback, Callbacks, load_callbacks
from trainer.checkpoint.crash_dump import dump_on_failure
from trainer.checkpoint.files import saved_steps, whole_checkpoint
from trainer.checkpoint.resume import refuse_another_run, refuse_missed_profiles
from trainer.cli import INTERRUPTED, WRONG_INPUT, failure_text, file_mask, stopping_on_signal
from trainer.launch.resources import reserved_devices, resolve_slots
from trainer.loop.saving import Saver, require_room_for_checkpoints
from trainer.loop.training_loop import TrainingLoop
from trainer.observe import final_report
from trainer.observe.console import Console
from trainer.observe.final_report import FitResult
from trainer.observe.findings import closing_findings, findings_table
from trainer.observe.health_checks import DIVERGED
from trainer.observe.tracking import Tracking, check_trackers
from trainer.recipe import prepare_recipe
from verl_lite.config import (
    ConfigError,
    LoadedConfig,
    RunConfig,
    RunOptions,
    help_text,
    print_config,
    save_config,
    value_of,
)
from verl_lite.config.idle_options import Situation, idle_options
from verl_lite.errors import ClusterLostError, NoRoomError, StalledError, UserError, WorkerDiedError
from verl_lite.machine.device import device_type, visible_devices
from verl_lite.machine.gpus import ResourceRequest
from verl_lite.machine.random_state import seed_random_state
from verl_lite.single_controller.guard import guarded

LOCK = "in_use"

Options = TypeVar("Options", bound=RunOptions)


@dataclass
class Report:
    """A job's additions to the final report: lines, pictures by name, and suggested next commands by name."""

    lines: list[RenderableType] = field(default_factory=list)
    pictures: Mapping[str, Path | None] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)


class Job(Generic[Options]):
    """One attempt of a training command. `run` creates a job per attempt and calls its methods in the order below.

    Attributes:
        module: module of the command `python -m module`.
        to_look: command that inspects a finished run; may contain {run_dir}.
        continues: True if the job starts from the checkpoints in its run folder.
        replays_steps: True if `trainer.replay` can repeat a step from its number alone.
    """

    module: ClassVar[str]
    to_look: ClassVar[str] = "python -m trainer.report {run_dir}"
    continues: bool = True
    replays_steps: ClassVar[bool] = False

    def __init__(self, config: Options, slots: int, console: Console) -> None:
        self.config = config
        self.slots = slots
        self.console = console
        self.run_dir = run_folder(config)

    def prepare(self) -> None:
        """Lets the recipe create what the options refer to, such as data, before anything reads it."""
        prepare_recipe(self.config)

    def check(self, available: int | None) -> None:
        """Raises UserError for invalid options. available: number of devices of this machine; None = no check."""

    def check_models(self) -> None:
        """Checks the files of all models of the run, before its data are read and any worker starts.

        Raises UserError if a model cannot be used, trained or exported.
        """

    def situation(self) -> Situation:
        """Returns what decides which options have no effect. Called after `check`, and again after `read_data`."""
        return Situation(self.config, devices=self.slots)

    def request(self) -> ResourceRequest:
        """Returns the devices that the run needs on each machine."""
        trainer: RunConfig = self.config.trainer
        return ResourceRequest(self.slots // trainer.nnodes, shared=trainer.share_devices)

    def read_data(self) -> int:
        """Reads the data and runs the cheap checks. Returns the number of training steps of the whole run."""
        raise NotImplementedError

    def checkpoint_bytes(self) -> int:
        """Returns the approximate size of a checkpoint in bytes; 0 = unknown."""
        return 0

    def check_folder(self) -> None:
        """Checks the job's own files in the run folder. Raises UserError if the run cannot continue from them."""

    def plan(self) -> str:
        """Returns the plan of steps and batches as text; empty = no plan, and no progress display."""
        return ""

    def full_plan(self) -> tuple[str, bool]:
        """Returns the plan that trainer.dry_run prints, and True if the run fits this machine."""
        return self.plan(), True

    def build(self, tracking: Tracking) -> AbstractContextManager[TrainingLoop[Any, Any]]:
        """Returns a context that starts the trainer with its workers and stops them on exit."""
        raise NotImplementedError

    def report(self, trainer: TrainingLoop[Any, Any], result: Any) -> Report:
        """Returns the job's additions to the final report. Called after the workers have ended."""
        return Report()


def run(
    job_class: type[Job[Options]],
    loaded: LoadedConfig[Options],
    argv: list[str],
    callbacks: Sequence[Callback] = (),
    is_command: bool = True,
    **parts: Any,
) -> int:
    """Executes a parsed command line: prints the help or the configuration, or runs the job.

    After the loss of a worker the run restarts from the last checkpoint, at most trainer.max_retries times.

    Args:
        job_class: the job.
        loaded: the parsed command line.
        argv: its words.
        callbacks: callbacks in addition to those that the options name.
        is_command: False if a program of the user calls this function; messages then show no command line.
        parts: additional keyword arguments for the job's constructor.

    Returns:
        The exit status.
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
    command = ["python", "-m", job_class.module, *argv] if is_command else []
    check_trackers(trainer.logger, trainer.project_name)
    first_states = Callbacks(callbacks).state_dict()
    lost: Exception | None = None
    for retries_left in range(trainer.max_retries, -1, -1):
        job = job_class(config, slots, Console(verbosity=loaded.verbosity), **parts)
        try:
            with ExitStack() as stack:
                stack.enter_context(guarded())
                return train(job, loaded, command, stack, callbacks)
        except ClusterLostError as error:
            # this process cannot join a second cluster, so `cli` starts the command again in its place
            if retries_left and runs_as_command(job):
                error.again = arguments_of_retry(job, retries_left - 1)
            raise
        except (WorkerDiedError, StalledError) as error:
            if not retries_left:
                raise
            lost = error
            print(failure_text(error), file=sys.stderr)
            print(f"Starting again from the last checkpoint; trainer.max_retries leaves {retries_left - 1} more.")
        except NoRoomError as error:
            # of a retry, the loss of the worker is the cause that the user can act on
            if lost is None:
                raise
            lost.add_note(f"Starting again failed: {error}\n{how_to_continue(command, job.run_dir)}")
            raise lost from None
        # the callbacks are objects of the caller, which the failed attempt has changed
        Callbacks(callbacks).load_state_dict(first_states)
        if resumes_from_run_folder(job):
            trainer.resume_mode = "auto"
            trainer.resume_from_path = None
    raise AssertionError("the last try returns or raises")


def runs_as_command(job: Job[Options]) -> bool:
    """True if this process runs `python -m` of the job's module."""
    # None under a debugger
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return False
    module = spec.name.removesuffix(".__main__")
    return bool(module == job.module)


def arguments_of_retry(job: Job[Options], max_retries: int) -> list[str]:
    """Returns the arguments that, added to the command line, let it continue this run."""
    # the default name of a run contains the time of its start
    arguments = [f"trainer.default_local_dir={job.run_dir}", f"trainer.max_retries={max_retries}"]
    if resumes_from_run_folder(job):
        # ~ takes back the user's own value
        arguments += ["~trainer.resume_from_path", "trainer.resume_mode=auto"]
    return arguments


def resumes_from_run_folder(job: Job[Options]) -> bool:
    """Returns True if a retry must resume from the run folder.

    A run that started from another run's checkpoint, and has not saved one yet, starts from there again.
    """
    return job.config.trainer.resume_mode != "resume_path" or bool(saved_steps(job.run_dir))


def train(
    job: Job[Options],
    loaded: LoadedConfig[Options],
    command: list[str],
    stack: ExitStack,
    own_callbacks: Sequence[Callback] = (),
) -> int:
    """Runs one attempt, from reading the data to the report.

    Args:
        stack: releases the locks and devices of the attempt.
        own_callbacks: callbacks in addition to those that the options name.

    Returns:
        The exit status.
    """
    config = job.config
    console = job.console
    for note in loaded.notes:
        console.note(note)
    callbacks = Callbacks([*load_callbacks(config.trainer), *own_callbacks])
    job.prepare()
    if config.trainer.dry_run:
        return dry_run(job, loaded, stack)

    num_devices = visible_devices(device_type(config.trainer.device))
    job.check(num_devices)
    job.check_models()
    tell_idle_options(job, loaded)
    stack.enter_context(reserved_devices(config, job.request(), console.note))
    total_steps = job.read_data()
    # again, because some options have an effect only with certain data
    tell_idle_options(job, loaded)

    run_dir = make_run_dir(config, stack)
    folder = HeldFolder(run_dir, console.note, stack)
    check_run_dir(job, total_steps)
    plan = job.plan()
    config_file = save_config(loaded, run_dir / "config.yaml")
    folder.config_text = config_file.read_text(encoding="utf-8")
    seed_random_state(config.trainer.seed)
    if plan:
        console.print(plan)
        console.start(total_steps)

    with (
        Tracking(run_dir, config, console) as tracking,
        job.build(tracking) as trainer,
        saying_how_to_continue(command, run_dir),
        stopping_on_signal(trainer.steps.stop, console.note),
        dump_on_failure(job, trainer),
    ):
        # a folder that is deleted during training is made again before the next line is written to it
        tracking.before_log = partial(folder.restore, trainer.saver)
        trainer.callbacks = callbacks
        result = trainer.fit()
        folder.restore()
    print_report(job, trainer, result, has_findings=bool(plan))
    if result.stopped:
        console.print(how_to_continue(command, run_dir))
    return INTERRUPTED if result.stopped else 0


def print_report(job: Job[Options], trainer: TrainingLoop[Any, Any], result: FitResult, *, has_findings: bool) -> None:
    """Prints the report of an ended run.

    Args:
        job: the job.
        trainer: its trainer.
        result: the result of the training.
        has_findings: True to check the health of the run.
    """
    console = job.console
    report = job.report(trainer, result)
    findings = []
    if has_findings:
        findings = closing_findings(job.run_dir)
    for line in report.lines:
        if line:
            console.print(line)
    if findings:
        console.print(findings_table(findings, 2))
    console.print(final_report.final_report(result, job.run_dir, report.pictures, report.commands))
    if findings and findings[0].text.startswith(DIVERGED):
        console.note(f"{findings[0].text}; {findings[0].advice}")


def dry_run(job: Job[Options], loaded: LoadedConfig[Options], stack: ExitStack) -> int:
    """Executes `trainer.dry_run=true`. Returns the exit status, WRONG_INPUT if the plan does not fit.

    Runs all checks that need no worker or device, prints the plan, and writes the resolved configuration to
    RUN/dry_run.yaml.
    """
    job.check(None)
    job.check_models()
    tell_idle_options(job, loaded)
    total_steps = job.read_data()
    tell_idle_options(job, loaded)
    _enter_run_folder(job.config, job.run_dir, stack)
    # no other run is writing a checkpoint there
    stack.enter_context(locked_folder(job.run_dir, job.console.note))
    check_run_dir(job, total_steps)
    # not config.yaml, which belongs to the run that may be in this folder
    config_file = job.run_dir / "dry_run.yaml"
    save_config(loaded, config_file)
    text, fits = job.full_plan()
    job.console.print(text)
    job.console.print(f"Nothing was started (trainer.dry_run=true). All options: {config_file}")
    return 0 if fits else WRONG_INPUT


def tell_idle_options(job: Job[Options], loaded: LoadedConfig[Options]) -> None:
    """Notes the options of the user that have no effect in this run, each once.

    Raises ConfigError for those without which the run would be another one than the user wants.
    """
    # a validation ignores the options of the training on purpose
    if value_of(job.config, "trainer.val_only"):
        return
    report = idle_options(loaded, job.situation())
    if report.problems:
        raise ConfigError(report.problems)
    for note in report.notes:
        if note not in loaded.notes:
            # the notes of `loaded` are written to the run's config.yaml
            loaded.notes.append(note)
            job.console.note(note)


def how_to_continue(command: list[str], run_dir: Path) -> str:
    """Returns a message with the command that continues a stopped run; notes if no checkpoint was saved.

    Args:
        command: the words of the command line; empty for a call from Python.
        run_dir: the run folder.
    """
    begin = "Stopped."
    if not saved_steps(run_dir):
        begin += " No step is saved, since no checkpoint was due (trainer.save_freq)."
    if not command:
        return f"{begin} To continue, call train with the same arguments and run_dir={str(run_dir)!r}"

    replaced = ("trainer.default_local_dir", "trainer.resume_mode", "trainer.resume_from_path")
    words = []
    for word in command:
        # + adds a key and ~ removes one
        key = word.partition("=")[0].lstrip("+~")
        if key not in replaced:
            words.append(word)
    words += [f"trainer.default_local_dir={run_dir}", "trainer.resume_mode=auto"]
    return f"{begin} To continue:\n  {shlex.join(words)}"


@contextmanager
def saying_how_to_continue(command: list[str], run_dir: Path) -> Iterator[None]:
    """Adds the command that continues the run to a KeyboardInterrupt that leaves the block."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        stopped.add_note(how_to_continue(command, run_dir))
        raise


def run_folder(config: RunOptions) -> Path:
    """Returns the absolute path of the run folder, which need not exist yet. Raises UserError if the option names none.

    An empty name would be the current folder: a shell writes it for a variable that is not set.
    """
    name = config.trainer.default_local_dir
    if not name.strip() or "\0" in name:
        raise UserError(f"trainer.default_local_dir={name!r}: expected a folder, such as runs/mine")
    return Path(name).expanduser().absolute()


def make_run_dir(config: RunOptions, stack: ExitStack) -> Path:
    """Creates the run folder, and applies trainer.umask to new files until `stack` ends.

    Raises UserError if the folder cannot be created or written to, or holds a run and trainer.resume_mode=disable.
    """
    run_dir = run_folder(config)
    # first, because a folder that others may not enter, or a name that is too long, is an error of any look into it
    _enter_run_folder(config, run_dir, stack)
    # a run that ended before its first checkpoint has metrics
    holds_run = (run_dir / "metrics.jsonl").exists() or saved_steps(run_dir)
    if holds_run and config.trainer.resume_mode == "disable":
        raise UserError(
            f"trainer.default_local_dir={run_dir} holds a run already, and trainer.resume_mode=disable. Choose another "
            "trainer.experiment_name, or continue that run with trainer.resume_mode=auto"
        )
    return run_dir


def _enter_run_folder(config: RunOptions, run_dir: Path, stack: ExitStack) -> None:
    """Creates the run folder, and applies trainer.umask to new files until `stack` ends. Raises UserError if the folder
    cannot be created or written to."""
    try:
        stack.enter_context(file_mask(config.trainer.umask, run_dir))
        (run_dir / LOCK).touch()
    except OSError as error:
        raise UserError(
            f"trainer.default_local_dir={run_dir} cannot be written to ({error.strerror}: {error.filename}): "
            "give a folder of yours on a disk with room"
        ) from error


class HeldFolder:
    """The locked folder of a running training; `stack` releases the lock."""

    config_text = ""
    """The text of the config.yaml in the folder."""

    def __init__(self, run_dir: Path, note: Callable[[str], None], stack: ExitStack) -> None:
        self.run_dir = run_dir
        self.note = note
        # a stack of its own, so that `restore` can release the lock of a deleted folder alone
        self.lock = stack.enter_context(ExitStack())
        self.file = self.lock.enter_context(locked_folder(run_dir, note))

    def restore(self, saver: Saver | None = None) -> None:
        """Recreates and locks the folder, with config.yaml, if it was deleted or renamed.

        If the run saves at intervals, `saver` then saves after the current step. Raises UserError if another run uses
        the folder now.
        """
        try:
            # the open file outlives its name: a folder at this path may be another one by now
            locked_file = os.fstat(self.file.fileno())
            file_at_path = os.stat(self.run_dir / LOCK)
            if os.path.samestat(locked_file, file_at_path):
                return
        except FileNotFoundError:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        self.lock.close()
        self.file = self.lock.enter_context(locked_folder(self.run_dir, self.note))
        (self.run_dir / "config.yaml").write_text(self.config_text, encoding="utf-8")
        # the checkpoints are gone with the old folder
        if saver is not None:
            saver.is_overdue |= saver.trainer.save_freq > 0
        self.note(
            f"{self.run_dir} WAS DELETED OR RENAMED while the run trains. It is made again with config.yaml, and the "
            "training continues. The metrics, samples, logs and checkpoints up to here are not in it. Trackers that "
            "write into it are cut off: trainer/REPORTS.md#trackers shows how to send them the run afterwards"
        )


@contextmanager
def locked_folder(run_dir: Path, log: Callable[[str], None]) -> Iterator[IO[str]]:
    """Locks the run folder within the block and yields the open lock file.

    Raises UserError if another run holds the lock.
    """
    path = run_dir / LOCK
    # to append, so that the text of a run that holds the lock is not deleted
    with path.open("a") as file:
        try:
            # the kernel releases the lock of a killed process
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"trainer.default_local_dir={run_dir} is in use by {path.read_text() or 'another run'}: choose another "
                "trainer.experiment_name, or wait"
            ) from None
        except OSError as error:
            # a file system without locks
            log(f"{run_dir} cannot be locked ({error.strerror}): a second run in it would not be noticed")
        file.truncate(0)
        file.write(f"pid {os.getpid()} of user {psutil.Process().username()}")
        file.flush()
        try:
            yield file
        finally:
            # the text names the owner of a held lock, and this one is released
            file.truncate(0)


def check_run_dir(job: Job[Options], total_steps: int) -> None:
    """Raises UserError if the run cannot continue from its folder, or if the disk has no room for its checkpoints."""
    trainer = job.config.trainer
    run_dir = job.run_dir
    # first, because the other checks read the checkpoint that it leaves
    whole_checkpoint(run_dir, trainer.resume_mode, trainer.resume_from_path, job.console.note)
    if job.continues:
        to_look = job.to_look.format(run_dir=run_dir)
        refuse_another_run(job.config, run_dir, total_steps, to_look)
        refuse_missed_profiles(trainer, run_dir, total_steps)
        require_room_for_checkpoints(trainer, run_dir, total_steps, job.checkpoint_bytes())
    job.check_folder()
