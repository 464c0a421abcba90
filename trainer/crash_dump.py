"""What a run leaves that ends with an error, so that the failed step can be run again, here or on another machine.

RUN/crash/step_N has config.yaml, the error as it was printed, the stacks of the driver's threads, versions, and the
ends of all logs (where a stall has left the stacks of the workers). Where the loop keeps prompts and a batch, step.pkl
has them, and `python -m trainer.replay RUN/crash/step_N` runs that step once more, inline.
"""

import faulthandler
import json
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

from trainer.checkpoint import saved_steps, why_not_written
from trainer.cli import failure_text
from verl_lite.errors import UserError, circumstances
from verl_lite.protocol import DataProto
from verl_lite.schema import column

PACKAGES = ("torch", "vllm", "ray", "transformers", "peft", "tensordict", "omegaconf", "numpy")
BEFORE_THE_BATCH = ("gen", "reward")  # phases that make the batch: they run again in a replay, as do these writers
COMPUTED_BY = ("workers/actor_rollout.py", "workers/frozen_models.py", "workers/critic.py", "trainer/advantage.py")
STEP = "step.pkl"
END_OF_LOG = 64 << 10  # bytes kept of each


@dataclass(frozen=True)
class FailedStep:
    """What step.pkl holds. phase: of `fit`, such as update_actor. prompts: of the step. batch: its answers and their
    scores; None if it failed before they were there. checkpoint: the newest at that time, if any."""

    step: int
    epoch: int
    phase: str | None
    prompts: DataProto
    batch: DataProto | None
    checkpoint: str | None


@contextmanager
def dump_on_failure(trainer: Any, run_dir: Path) -> Iterator[None]:
    """What goes wrong inside leaves a dump in the run folder and goes on; a dump that fails changes nothing of it. A
    replay, whose run folder is inside a dump, leaves none."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (run_dir.parent / STEP).exists():
            raise
        folder = run_dir / "crash" / f"step_{trainer.steps.global_step}"
        try:
            error.add_note(write_dump(trainer, run_dir, folder, error))
        except OSError as why:
            error.add_note(f"No crash dump was kept: {why_not_written(folder, why)}")
        raise


def write_dump(trainer: Any, run_dir: Path, folder: Path, error: BaseException) -> str:
    """Writes everything; returns the sentence that says what to do with it."""
    failed = _failed_step(trainer, run_dir, error)
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
    """The step that `write_dump` kept. It is a pickle: open only dumps that you trust. UserError if there is none."""
    if not (folder / STEP).exists() or not (folder / "config.yaml").exists():
        raise UserError(f"{folder}: no crash dump there; expected RUN/crash/step_N with step.pkl and config.yaml")
    return DataProto.load_from_disk(folder / STEP).meta_info["failed"]


def _failed_step(trainer: Any, run_dir: Path, error: BaseException) -> FailedStep | None:
    """None where the loop keeps no prompts, or failed before its first step: there the command is the replay."""
    loops = {kind.__dict__["fit"].__code__ for kind in type(trainer).__mro__ if "fit" in kind.__dict__}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code in loops]
    found = frames[-1].f_locals if frames else {}  # what the innermost `fit` knew
    prompts, phase = found.get("prompts"), circumstances(error).phase
    if not isinstance(prompts, DataProto):
        return None
    trainer.saver.wait()
    batch, saved = None, saved_steps(run_dir)
    if phase not in BEFORE_THE_BATCH:
        batch = found["batch"]
        kept = [name for name in map(str, batch.batch.keys()) if column(name).writer not in COMPUTED_BY]
        batch = batch.select(batch_keys=kept, meta_info_keys=[])
    checkpoint = str(saved[max(saved)]) if saved else None
    return FailedStep(trainer.steps.global_step, trainer.steps.epoch, phase, prompts, batch, checkpoint)
