"""What runs of diffusion models share, reward flow and recipes/flow_grpo: the job around a run and the trainer's loop.

A job reads the data and builds the trainer; a trainer gives the stages: `train_step`, which is its algorithm, and
`validate`. Which rows a step has is a function of the seed and the step alone, so that a resumed run needs to know
nothing but where it stands.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from trainer.clips.writing import Strip, as_frames, draw_strips
from trainer.final_report import FitResult
from trainer.resources import join_ray, start_workers
from trainer.resume import refuse_other_data
from trainer.run import Job
from trainer.saving import SavedByWorkers, Saver
from trainer.step_metrics import timed
from trainer.steps import EpochSteps
from trainer.tracking import Tracking
from verl_lite.config import RunConfig, RunOptions
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import BatchPlan, plan_samples
from verl_lite.single_controller import ClassWithInitArgs
from verl_lite.single_controller.worker_group import WorkerGroup

Options = TypeVar("Options", bound=RunOptions)


@dataclass
class DiffusionResult(FitResult):
    """first, last: the samples of the first validation and of the last one after it; None where there was none."""

    first: DataProto | None = None
    last: DataProto | None = None


class DiffusionJob(Job[Options]):
    """worker: class of the workers."""

    worker: ClassVar[type[Any]]
    config: Any

    def prepare(self) -> None:
        """Options are checked first: what a recipe makes takes minutes."""
        self.check(None)
        super().prepare()

    def count_steps(self, rows: int, dataset: str, repeat: int = 1) -> int:
        """Fills in `steps`; returns how many there are. dataset: fingerprint of the rows."""
        config, data = self.config, self.config.data
        self.steps = EpochSteps(
            rows, data.train_batch_size, config.trainer, shuffle=data.shuffle, repeat=repeat, dataset=dataset
        )
        return self.steps.total

    def check_folder(self) -> None:
        refuse_other_data(self.config.trainer, self.run_dir, self.steps.dataset)

    @contextmanager
    def workers(self, tracking: Tracking, modules: Sequence[str]) -> Iterator[WorkerGroup]:
        """Started; ended with the context. modules: what a worker process imports before it begins."""
        with ExitStack() as stack:
            join_ray(self.config, self.run_dir.name, tracking.note, stack)
            roles = {"actor": ClassWithInitArgs(self.worker, self.config, self.steps.total)}
            yield start_workers(self.config, roles, list(dict.fromkeys(modules)), self.run_dir / "logs", stack)["actor"]


class DiffusionTrainer:
    """Holds the parts of a run. options: `trainer` of its configuration."""

    def __init__(self, options: RunConfig, *, steps: EpochSteps, tracking: Tracking, saver: Saver) -> None:
        self.options = options
        self.steps, self.tracking, self.saver = steps, tracking, saver
        self.metrics: dict[str, float] = {}
        self.samples = 0
        self.timing: dict[str, float] = {}

    def train_step(self) -> None:
        """One step of the algorithm; leaves its metrics in `metrics` and the number of its samples in `samples`."""
        raise NotImplementedError

    def validate(self) -> tuple[dict[str, float], DataProto]:
        """Metrics and samples (frames (B, F, 3, H, W) in [0, 1], face_score (B,)) of the same noise each time."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm keeps from step to step beside the models."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets what `state_dict` gave."""

    def fit(self) -> DiffusionResult:
        """Trains to the end of the configured steps. The validation before is of the untrained model, always."""
        result, frequency = DiffusionResult(), self.options.test_freq
        if frequency != 0 and self.options.val_before_train:
            result.before, result.first = self.validate()
        if (state := self.saver.restore(self.steps)) is not None:
            self.load_state_dict(state)
        if result.before and self.steps.global_step == 0:
            self.tracking.log(result.before, step=0)
        for step in self.steps:
            self.metrics, self.timing = {}, {}
            with self.timed("step"):
                self.train_step()
            validation: dict[str, float] = {}
            if self.steps.due(frequency):
                with self.timed("testing"):
                    result.after, result.last = self.validate()
                validation = result.after
            self.log_step(validation)
            if self.saver.is_due(self.steps):  # last, so that a resumed run finds the whole history before it
                with self.timed("save_checkpoint"):
                    self.saver.save(self.steps, self.state_dict())
                self.tracking.log({"timing_s/save_checkpoint": self.timing["save_checkpoint"]}, step=step)
        result.checkpoint, result.stopped = self.saver.newest, self.steps.stopping
        return result

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Adds the block's seconds to timing_s/<name>."""
        return timed(self.timing, name, self.steps.global_step)

    def log_step(self, validation: Mapping[str, float]) -> None:
        """Sends this step's metrics to the trackers."""
        logged = {
            "training/global_step": float(self.steps.global_step),
            "training/epoch": float(self.steps.epoch),
            **self.metrics,
            **{f"timing_s/{name}": seconds for name, seconds in self.timing.items()},
            "perf/time_per_step": self.timing["step"],
            "perf/samples_per_second": self.samples / self.timing["step"],
            **validation,
        }
        self.tracking.log(logged, step=self.steps.global_step)


class DiffusionRole(SavedByWorkers):
    """The model on a worker group, as the driver sees it: each call plans the batch, dispatches it and puts the answer
    back in order. together: samples of a micro-batch."""

    def __init__(self, group: WorkerGroup, together: int) -> None:
        self.group, self.together = group, together

    def plan_of(self, rows: DataProto) -> BatchPlan:
        """All samples in one optimizer step, cut evenly. A row is a sample, whatever its size."""
        return plan_samples(len(rows), self.group.world_size, self.together)


def draw_before_and_after(
    run_dir: Path,
    result: DiffusionResult,
    groups: Sequence[tuple[str, slice]],
    references: Sequence[torch.Tensor] = (),
    columns: int = 6,
) -> Path | None:
    """Writes RUN/before_after.png from the samples of the first and the last validation; None without them.

    Args:
        groups: prompts, and which of the samples are theirs: a single one, or several of which first frames are shown.
        references: clips (F, 3, H, W) in [0, 1] that stand above the samples, one for each prompt.
    """
    if result.first is None or result.last is None:
        return None
    drawn = []
    for place, (prompt, rows) in enumerate(groups):
        strips = [Strip("reference", as_frames(clip)) for clip in references[place : place + 1]]
        first, last = (samples.batch["face_score"][rows].nanmean().item() for samples in (result.first, result.last))
        for name, score, samples in (("before", first, result.first), ("after", last, result.last)):
            frames = samples.batch["frames"][rows]
            shown = as_frames(frames[0] if len(frames) == 1 else frames[:, 0])
            strips.append(Strip(f"{name}\n{score:.2f}", shown, is_better=last > first if name == "after" else None))
        drawn.append((prompt, strips))
    return draw_strips(run_dir / "before_after.png", drawn, run_dir.name, columns)


def fingerprint(entries: Iterable[str]) -> str:
    """Changes with the number of entries, their order and their text."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry}\n".encode())
    return digest.hexdigest()[:16]
