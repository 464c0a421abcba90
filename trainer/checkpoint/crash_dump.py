"""The crash dump of a run that ended with an error, from which the failed step can be repeated.

RUN/crash/step_N has config.yaml, the error as it was printed, the stacks of the driver's threads, versions, and the
ends of all logs (after a stall also the stacks of the workers). In runs of `main_ppo`, `main_sft` and `main_rm`,
step.pkl describes the failed step, and `python -m trainer.replay RUN/crash/step_N` repeats it in one process.
"""

import faulthandler
import json
import pickle
import platform
import shlex
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Protocol

from trainer.checkpoint.files import saved_steps, why_not_written
from trainer.cli import failure_text
from verl_lite.errors import UserError, circumstances
from verl_lite.protocol import DataProto

PACKAGES = ("torch", "vllm", "ray", "transformers", "peft", "tensordict", "omegaconf", "numpy")
STEP = "step.pkl"
END_OF_LOG = 64 << 10  # bytes of each log in a dump


@dataclass(frozen=True)
class FailedStep:
    """Content of step.pkl.

    Attributes:
        job: Class of the job.
        options: Class of its configuration.
        phase: Phase of the step, such as update_actor.
        sampling: State of the sampling before the step (see `TrainingSteps`); None in supervised training, where the
            step determines its rows.
        batch: Responses and their scores; None if the step failed before they were complete.
        checkpoint: Newest checkpoint at that time, or None.
    """

    job: type[Any]
    options: type[Any]
    step: int
    epoch: int
    phase: str | None
    sampling: DataProto | None
    batch: DataProto | None
    checkpoint: str | None


class CrashedJob(Protocol):
    """What a dump contains of a job (`trainer.launch.run.Job`)."""

    run_dir: Path

    @property
    def config(self) -> object: ...

    @property
    def replays_steps(self) -> bool: ...


class CrashedSteps(Protocol):
    """What a dump contains of the steps of a run (`trainer.loop.steps.StepCounter`)."""

    @property
    def global_step(self) -> int: ...

    @property
    def epoch(self) -> int: ...


class SavingThread(Protocol):
    """The saver of a run (`trainer.loop.saving.Saver`)."""

    def wait(self) -> None: ...


class CrashedTrainer(Protocol):
    """What a dump contains of a trainer (`trainer.loop.training_loop.TrainingLoop`)."""

    @property
    def steps(self) -> CrashedSteps: ...

    @property
    def saver(self) -> SavingThread: ...

    @property
    def step_data(self) -> object: ...

    @property
    def scored_batch(self) -> DataProto | None: ...


@contextmanager
def dump_on_failure(job: CrashedJob, trainer: CrashedTrainer) -> Iterator[None]:
    """Writes a dump into the run folder if the block raises an exception other than UserError, which passes through.

    A replay, whose run folder is inside a dump, writes none. A dump that cannot be written adds a note to the error.
    """
    try:
        yield
    except UserError:  # wrong input of the user: its message says what to change
        raise
    except Exception as error:
        if (job.run_dir.parent / STEP).exists():
            raise
        folder = job.run_dir / "crash" / f"step_{trainer.steps.global_step}"
        # an error of the dump, such as a full disk, must not hide the error of the run
        try:
            note = write_dump(job, trainer, folder, error)
        except OSError as reason:
            note = f"No crash dump was written: {why_not_written(folder, reason)}"
        except (pickle.PicklingError, AttributeError, TypeError) as reason:  # by pickle, for objects of a user
            note = f"{folder} cannot be replayed, because the batch cannot be pickled: {reason}"
        error.add_note(note)
        raise


def write_dump(job: CrashedJob, trainer: CrashedTrainer, folder: Path, error: BaseException) -> str:
    """Writes a dump. Returns a sentence that tells the user how to use it."""
    failed = _failed_step(job, trainer, error)
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    error_text = "".join(traceback.format_exception(error)) + failure_text(error)
    # the message may quote a text with a lone surrogate, which UTF-8 lacks
    (folder / "error.txt").write_text(error_text, encoding="utf-8", errors="backslashreplace")
    with (folder / "stacks.txt").open("w") as file:
        faulthandler.dump_traceback(file)

    versions = {"python": platform.python_version(), "system": platform.platform()}
    for package in distributions():
        if package.name in PACKAGES:
            versions[package.name] = package.version
    (folder / "versions.json").write_text(json.dumps(versions, indent=2))

    config_file = job.run_dir / "config.yaml"
    if config_file.exists():
        shutil.copy(config_file, folder)
    for log in (job.run_dir / "logs").glob("*.log"):
        beginning = max(0, log.stat().st_size - END_OF_LOG)
        with log.open("rb") as source:
            source.seek(beginning)
            end_of_log = source.read()
        (logs / log.name).write_bytes(end_of_log)

    # last, because objects of a user can make it fail: the files above then exist
    if failed is None:
        return f"Stacks, versions and the ends of all logs: {folder}"
    DataProto(meta_info={"failed": failed}).save_to_disk(folder / STEP)
    return f"To run the failed step again, inline: python -m trainer.replay {shlex.quote(str(folder))}"


def read_dump(folder: Path) -> FailedStep:
    """Returns the step that `write_dump` stored. It is a pickle: open only dumps that you trust.

    Raises:
        UserError: if the folder has none.
    """
    step_file = folder / STEP
    config_file = folder / "config.yaml"
    if not step_file.exists() or not config_file.exists():
        raise UserError(f"{folder}: no crash dump there; expected RUN/crash/step_N with step.pkl and config.yaml")
    dump = DataProto.load_from_disk(step_file)
    return dump.meta_info["failed"]


def _failed_step(job: CrashedJob, trainer: CrashedTrainer, error: BaseException) -> FailedStep | None:
    """Returns the failed step; None if the run failed before its first step or cannot replay one."""
    if trainer.step_data is None:
        return None
    # steps that sample yield the state of the sampling; all others yield their number
    sampling = trainer.step_data if isinstance(trainer.step_data, DataProto) else None
    if sampling is None and not job.replays_steps:
        return None

    # a checkpoint can still be in publication; the replay starts from the newest one
    trainer.saver.wait()
    saved = saved_steps(job.run_dir)
    checkpoint = None
    if saved:
        checkpoint = str(saved[max(saved)])
    batch = trainer.scored_batch
    if batch is not None:
        batch = batch.select(meta_info_keys=[])
    return FailedStep(
        job=type(job),
        options=type(job.config),
        step=trainer.steps.global_step,
        epoch=trainer.steps.epoch,
        phase=circumstances(error).phase,
        sampling=sampling,
        batch=batch,
        checkpoint=checkpoint,
    )
