"""What a run leaves that ends with an error, so that the failed step can be run again, here or on another machine.

RUN/crash/step_N has config.yaml, the error as it was printed, the stacks of the driver's threads, versions, and the
ends of all logs (where a stall has left the stacks of the workers). Where the loop keeps prompts and a batch, step.pkl
has them, and `python -m trainer.replay RUN/crash/step_N` runs that step once more, inline.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.checkpoint import saved_steps, why_not_written
from trainer.cli import failure_text
from trainer.saving import Saver
from trainer.steps import StepCounter
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


class FailedTrainer(Protocol):
    saver: Saver

    @property
    def steps(self) -> StepCounter: ...


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
def dump_on_failure(trainer: FailedTrainer, run_dir: Path) -> Iterator[None]:
    """What goes wrong inside leaves a dump in the run folder and goes on; a dump that fails changes nothing of it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        folder = run_dir / "crash" / f"step_{trainer.steps.global_step}"
        try:
            error.add_note(write_dump(trainer, run_dir, folder, error))
        except OSError as why:
            error.add_note(f"No crash dump was kept: {why_not_written(folder, why)}")
        raise


def write_dump(trainer: FailedTrainer, run_dir: Path, folder: Path, error: BaseException) -> str:
    """Writes everything; returns the sentence that says what to do with it."""
    failed = _failed_step(trainer, run_dir, error)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "error.txt").write_text(failure_text(error))
    (folder / "stacks.txt").write_text(thread_stacks())
    (folder / "versions.json").write_text(json.dumps(versions(), indent=2))
    if (run_dir / "config.yaml").exists():
        shutil.copy(run_dir / "config.yaml", folder)
    _copy_ends(run_dir / "logs", folder / "logs")
    if failed is None:
        return f"Stacks, versions and the ends of all logs: {folder}"
    DataProto(meta_info={"failed": failed}).save_to_disk(folder / "step.pkl")
    return f"To run the failed step again, inline: python -m trainer.replay {shlex.quote(str(folder))}"


def read_dump(folder: Path) -> FailedStep:
    """The step that `write_dump` kept. It is a pickle: open only dumps that you trust.

    Raises:
        UserError: there is none.
    """
    if not (folder / "step.pkl").exists() or not (folder / "config.yaml").exists():
        raise UserError(
            f"{folder}: no crash dump there; expected a folder RUN/crash/step_N with step.pkl and config.yaml"
        )
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


def _failed_step(trainer: FailedTrainer, run_dir: Path, error: BaseException) -> FailedStep | None:
    """None where the loop keeps no prompts, or failed before its first step: there the command is the replay."""
    found = _locals_of_fit(trainer, error)
    prompts = found.get("prompts")
    if not isinstance(prompts, DataProto):
        return None
    trainer.saver.settle()
    phase, saved = circumstances(error).phase, saved_steps(run_dir)
    return FailedStep(
        step=trainer.steps.global_step,
        epoch=trainer.steps.epoch,
        phase=phase,
        prompts=prompts,
        batch=None if phase in BEFORE_THE_BATCH else _sampled_and_scored(found["batch"]),
        checkpoint=str(saved[max(saved)]) if saved else None,
    )


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


def _locals_of_fit(trainer: FailedTrainer, error: BaseException) -> dict[str, Any]:
    """What the innermost `fit` knew that the error passed through."""
    loops = {kind.__dict__["fit"].__code__ for kind in type(trainer).__mro__ if "fit" in kind.__dict__}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code in loops]
    return dict(frames[-1].f_locals) if frames else {}
