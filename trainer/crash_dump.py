"""A crash capsule: what is needed to run the step that failed once more, under a debugger, on this machine or another.

A run that ends with an error (not the user's) leaves RUN/crash/step_N: config.yaml, the error as it was printed, the
stacks of the driver's threads, versions, the ends of all logs (where a stall has left the stacks of the workers), and
step.pkl with the prompts of the step and the batch as far as it was known. `python -m trainer.replay
RUN/crash/step_N` runs that step again, inline.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trainer.checkpoint import saved_steps
from trainer.cli import failure_text
from trainer.ray_trainer import RayPPOTrainer
from verl_lite.errors import UserError, circumstances
from verl_lite.protocol import DataProto
from verl_lite.schema import column

PACKAGES = ("torch", "vllm", "ray", "transformers", "peft", "tensordict", "omegaconf", "numpy")
BEFORE_THE_BATCH = ("gen", "reward")
"""Phases that make the batch: they run again in a replay."""
COMPUTED_BY = ("workers/actor_rollout.py", "workers/reference.py", "workers/critic.py", "trainer/advantage.py")
"""Writers of columns that a replay computes again."""

END_OF_LOG = 64 << 10
"""Bytes kept of each log."""


@dataclass(frozen=True)
class FailedStep:
    """What step.pkl holds.

    step, epoch: where the run was. phase: of `fit`, such as update_actor. prompts: of the step. batch: its answers and
    their scores; None if it failed before they were there. checkpoint: the newest at that time, if any.
    """

    step: int
    epoch: int
    phase: str | None
    prompts: DataProto
    batch: DataProto | None
    checkpoint: str | None


@contextmanager
def capsule_on_failure(trainer: RayPPOTrainer) -> Iterator[None]:
    """What goes wrong inside `trainer.fit()` leaves a capsule in the run folder, and goes on."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        folder = write_capsule(trainer, error)
        if folder is not None:
            error.add_note(f"To run the failed step again, inline: python -m trainer.replay {folder}")
        raise


def write_capsule(trainer: RayPPOTrainer, error: BaseException) -> Path | None:
    """The capsule's folder; None if the run failed before its first step, where the command itself is the replay."""
    frame = _frame_of_fit(error)
    prompts = None if frame is None else frame.f_locals.get("prompts")
    if frame is None or prompts is None:
        return None
    phase, step = circumstances(error).phase, trainer.steps.global_step
    saved = saved_steps(trainer.run_dir)
    folder = trainer.run_dir / "crash" / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    failed = FailedStep(
        step=step,
        epoch=trainer.steps.epoch,
        phase=phase,
        prompts=prompts,
        batch=None if phase in BEFORE_THE_BATCH else _sampled_and_scored(frame.f_locals["batch"]),
        checkpoint=str(saved[max(saved)]) if saved else None,
    )
    DataProto(meta_info={"failed": failed}).save_to_disk(folder / "step.pkl")
    (folder / "error.txt").write_text(failure_text(error))
    (folder / "stacks.txt").write_text(thread_stacks())
    (folder / "versions.json").write_text(json.dumps(versions(), indent=2))
    if (trainer.run_dir / "config.yaml").exists():
        shutil.copy(trainer.run_dir / "config.yaml", folder)
    _copy_ends(trainer.run_dir / "logs", folder / "logs")
    return folder


def read_capsule(folder: Path) -> FailedStep:
    """What `write_capsule` kept. A pickle: open only capsules that you trust. UserError if it is none."""
    if not (folder / "step.pkl").exists() or not (folder / "config.yaml").exists():
        raise UserError(f"{folder}: no capsule there; expected a folder RUN/crash/step_N with step.pkl and config.yaml")
    return DataProto.load_from_disk(folder / "step.pkl").meta_info["failed"]


def thread_stacks() -> str:
    """The stack of each thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )


def versions() -> dict[str, str]:
    """Of Python, the system and the packages that matter; those that are not installed are left out."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    installed = {entry.metadata["Name"].lower(): entry.version for entry in importlib.metadata.distributions()}
    return found | {name: installed[name] for name in PACKAGES if name in installed}


def _sampled_and_scored(batch: DataProto) -> DataProto:
    """The batch with the columns only that were there after the reward."""
    kept = [name for name in map(str, batch.batch.keys()) if column(name).writer not in COMPUTED_BY]
    return batch.select(batch_keys=kept, meta_info_keys=[])


def _copy_ends(source: Path, target: Path) -> None:
    """The last part of each log."""
    for log in source.glob("*.log"):
        target.mkdir(exist_ok=True)
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - END_OF_LOG))
            (target / log.name).write_bytes(file.read())


def _frame_of_fit(error: BaseException) -> FrameType | None:
    """The frame of `RayPPOTrainer.fit` that the error passed through, with what it knew."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((frame for frame in frames if frame.f_code is RayPPOTrainer.fit.__code__), None)
