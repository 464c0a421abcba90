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
from typing import Any

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

    job: class of the job. options: class of its configuration. phase: phase of the step, such as update_actor.
    sampling: state of the sampling before the step (see `steps.TrainingSteps`); None in supervised training, where the
    step determines its rows. batch: responses and their scores; None if the step failed before they were complete.
    checkpoint: newest checkpoint at that time, or None.
    """

    job: type[Any]
    options: type[Any]
    step: int
    epoch: int
    phase: str | None
    sampling: DataProto | None
    batch: DataProto | None
    checkpoint: str | None


@contextmanager
def dump_on_failure(job: Any, trainer: Any) -> Iterator[None]:
    """Writes a dump into the run folder if the block raises an exception other than UserError, which passes through. A
    replay, whose run folder is inside a dump, writes none. A dump that cannot be written adds a note to the error."""
    run_dir: Path = job.run_dir
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (run_dir.parent / STEP).exists():
            raise
        folder = run_dir / "crash" / f"step_{trainer.steps.global_step}"
        try:
            error.add_note(write_dump(job, trainer, folder, error))
        except OSError as why:
            error.add_note(f"No crash dump was written: {why_not_written(folder, why)}")
        except (pickle.PicklingError, AttributeError, TypeError) as why:  # what pickle raises for objects of a user
            error.add_note(f"{folder} cannot be replayed, because the batch cannot be pickled: {why}")
        raise


def write_dump(job: Any, trainer: Any, folder: Path, error: BaseException) -> str:
    """Writes a dump. Returns a sentence that tells the user how to use it."""
    run_dir: Path = job.run_dir
    failed = _failed_step(job, trainer, error)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "error.txt").write_text("".join(traceback.format_exception(error)) + failure_text(error))
    with (folder / "stacks.txt").open("w") as file:
        faulthandler.dump_traceback(file)
    installed = {entry.name: entry.version for entry in distributions() if entry.name in PACKAGES}
    versions = {"python": platform.python_version(), "system": platform.platform()} | installed
    (folder / "versions.json").write_text(json.dumps(versions, indent=2))
    if (run_dir / "config.yaml").exists():
        shutil.copy(run_dir / "config.yaml", folder)
    for log in (run_dir / "logs").glob("*.log"):
        with log.open("rb") as source:
            source.seek(max(0, log.stat().st_size - END_OF_LOG))
            (folder / "logs" / log.name).write_bytes(source.read())
    if failed is None:
        return f"Stacks, versions and the ends of all logs: {folder}"
    DataProto(meta_info={"failed": failed}).save_to_disk(folder / STEP)
    return f"To run the failed step again, inline: python -m trainer.replay {shlex.quote(str(folder))}"


def read_dump(folder: Path) -> FailedStep:
    """Returns the step that `write_dump` stored. It is a pickle: open only dumps that you trust. Raises UserError if
    the folder has none."""
    if not (folder / STEP).exists() or not (folder / "config.yaml").exists():
        raise UserError(f"{folder}: no crash dump there; expected RUN/crash/step_N with step.pkl and config.yaml")
    return DataProto.load_from_disk(folder / STEP).meta_info["failed"]


def _failed_step(job: Any, trainer: Any, error: BaseException) -> FailedStep | None:
    """Returns the failed step; None if the run failed before its first step or cannot replay one."""
    data, phase = trainer.step_data, circumstances(error).phase
    sampling = data if isinstance(data, DataProto) else None
    if data is None or (sampling is None and not job.replays_steps):
        return None
    trainer.saver.wait()
    saved = saved_steps(job.run_dir)
    batch = None if trainer.scored_batch is None else trainer.scored_batch.select(meta_info_keys=[])
    checkpoint = str(saved[max(saved)]) if saved else None
    steps, kinds = trainer.steps, (type(job), type(job.config))
    return FailedStep(*kinds, steps.global_step, steps.epoch, phase, sampling, batch, checkpoint)
