"""The job and the training loop shared by all runs of diffusion models (reward flow and recipes/flow_grpo).

A job reads the data and builds the trainer. A trainer implements `train_step`, which is its algorithm, and `evaluate`.
The rows of a step depend only on the seed and the step, so a resumed run needs no state of the data but its step.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from trainer.checkpoint.resume import refuse_other_data
from trainer.diffusion.clips.writing import Strip, as_frames, draw_strips
from trainer.launch.resources import join_ray, start_workers
from trainer.launch.run import Job
from trainer.loop.saving import SavedByWorkers, Saver
from trainer.loop.steps import EpochSteps
from trainer.loop.training_loop import TrainingLoop
from trainer.observe.final_report import FitResult
from trainer.observe.tracking import Tracking
from verl_lite.config import RunConfig, RunOptions
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import BatchPlan, plan_samples
from verl_lite.single_controller import ClassWithInitArgs
from verl_lite.single_controller.worker_group import WorkerGroup

Options = TypeVar("Options", bound=RunOptions)


@dataclass
class DiffusionResult(FitResult):
    """Result of a run. first, last: samples of the validation before training and of the last validation, or None."""

    first: DataProto | None = None
    last: DataProto | None = None


class DiffusionJob(Job[Options]):
    """A run of a diffusion model: counts its steps and starts its workers. worker: class of the workers."""

    worker: ClassVar[type[Any]]
    config: Any

    def prepare(self) -> None:
        """Checks the options, then runs the recipe."""
        self.check(None)  # first, because a recipe can take minutes
        super().prepare()

    def count_steps(self, rows: int, dataset: str, repeat: int = 1) -> int:
        """Sets `steps` and returns their number. dataset: fingerprint of the rows."""
        config, data = self.config, self.config.data
        self.steps = EpochSteps(
            rows, data.train_batch_size, config.trainer, shuffle=data.shuffle, repeat=repeat, dataset=dataset
        )
        return self.steps.total

    def check_folder(self) -> None:
        refuse_other_data(self.config.trainer, self.run_dir, self.steps.dataset)

    @contextmanager
    def workers(self, tracking: Tracking, modules: Sequence[str]) -> Iterator[WorkerGroup]:
        """Starts the workers; ends them with the context. modules: modules that each worker process imports first."""
        with ExitStack() as stack:
            join_ray(self.config, self.run_dir.name, tracking.note, stack)
            roles = {"actor": ClassWithInitArgs(self.worker, self.config, self.steps.total)}
            yield start_workers(self.config, roles, list(dict.fromkeys(modules)), self.run_dir / "logs", stack)["actor"]


class DiffusionTrainer(TrainingLoop[EpochSteps, DiffusionResult]):
    """Base class of the trainers. A subclass implements `train_step` and `evaluate`."""

    def __init__(self, options: RunConfig, *, steps: EpochSteps, tracking: Tracking, saver: Saver) -> None:
        super().__init__(options, steps, tracking, saver, DiffusionResult())

    def evaluate(self) -> tuple[dict[str, float], DataProto]:
        """Samples with the same noise in each call; returns metrics and frames (B, F, 3, H, W), face_score (B,)."""
        raise NotImplementedError

    @property
    def validates(self) -> bool:
        """True unless `trainer.test_freq` is 0."""
        return self.options.test_freq != 0

    def validate(self, result: DiffusionResult) -> dict[str, float]:
        """Evaluates the model and stores the samples in `result.first` before the first step, else in `result.last`."""
        metrics, samples = self.evaluate()
        if self.steps.global_step == 0:
            result.first = samples
        else:
            result.last = samples
        return metrics

    def begin(self) -> None:
        """Validates the untrained model, also in a run that then continues from a checkpoint, and restores."""
        if self.validates and self.options.val_before_train:
            self.result.before = self.validate(self.result)
        self.resume()
        if self.result.before and self.steps.global_step == 0:
            self.tracking.log(self.result.before, step=0)
            self.report_validation(self.result.before)

    def log_step(self, batch: DataProto, validation: dict[str, float]) -> None:
        """Sends this step's metrics to the trackers."""
        logged = {
            "training/global_step": float(self.steps.global_step),
            "training/epoch": float(self.steps.epoch),
            **self.metrics,
            **{f"timing_s/{name}": seconds for name, seconds in self.timing.items()},
            "perf/time_per_step": self.timing["step"],
            "perf/samples_per_second": len(batch) / self.timing["step"],
            **self.usage_metrics(),
            **validation,
        }
        self.tracking.log(logged, step=self.steps.global_step)


class DiffusionRole(SavedByWorkers):
    """The driver's handle of the model on a worker group.

    Each call plans a batch, dispatches it and restores the order of the results. together: samples per micro-batch.
    """

    def __init__(self, group: WorkerGroup, together: int) -> None:
        self.group, self.together = group, together

    def plan_of(self, rows: DataProto) -> BatchPlan:
        """Returns a plan that splits the rows evenly over the ranks for one optimizer step."""
        return plan_samples(len(rows), self.group.world_size, self.together)


def draw_before_and_after(
    run_dir: Path,
    result: DiffusionResult,
    groups: Sequence[tuple[str, slice]],
    references: Sequence[torch.Tensor] = (),
    columns: int = 6,
) -> Path | None:
    """Draws RUN/before_after.png from the samples of the first and the last validation.

    Args:
        groups: prompts with the slices of their samples. A single sample is drawn as a clip; of several samples, the
            first frame of each is drawn.
        references: clips (F, 3, H, W) in [0, 1] drawn above the samples, one per prompt.

    Returns:
        The path of the picture, or None if a validation is missing.
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
    """Returns a hash of the entries, which depends on their number, order and text."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry}\n".encode())
    return digest.hexdigest()[:16]
