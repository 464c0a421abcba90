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
from trainer.diffusion.clips.reading import Frames
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
from workers.roles.training_worker import TrainingWorker

Options = TypeVar("Options", bound=RunOptions)


@dataclass
class DiffusionResult(FitResult):
    """Result of a run.

    Attributes:
        first: samples of the validation before training; None if the run had none.
        last: samples of the last validation during training; None if the run had none.
    """

    first: DataProto | None = None
    last: DataProto | None = None


class DiffusionJob(Job[Options]):
    """A run of a diffusion model: counts its steps and starts its workers.

    Attributes:
        worker: class of the workers, constructed with the options and the number of steps.
    """

    worker: ClassVar[type[TrainingWorker]]
    config: Any

    def prepare(self) -> None:
        """Checks the options, then runs the recipe."""
        # first, because building a recipe's files can take minutes
        self.check(available=None)
        super().prepare()

    def count_steps(self, rows: int, dataset: str, repeat: int = 1) -> int:
        """Sets `steps` and returns their number.

        Args:
            rows: number of training rows.
            dataset: fingerprint of the rows.
            repeat: how often an epoch contains each row.
        """
        data = self.config.data
        trainer = self.config.trainer
        self.steps = EpochSteps(
            rows, data.train_batch_size, trainer, shuffle=data.shuffle, repeat=repeat, dataset=dataset
        )
        return self.steps.total

    def check_folder(self) -> None:
        refuse_other_data(self.config.trainer, self.run_dir, self.steps.dataset)

    @contextmanager
    def workers(self, tracking: Tracking, modules: Sequence[str]) -> Iterator[WorkerGroup]:
        """Starts the workers; ends them with the context.

        Args:
            tracking: shows the messages of the start.
            modules: modules that each worker process imports first, because they register what the options name.
        """
        unique_modules = list(dict.fromkeys(modules))
        actor = ClassWithInitArgs(self.worker, self.config, self.steps.total)
        log_folder = self.run_dir / "logs"
        # the stack ends the workers before it leaves Ray
        with ExitStack() as stack:
            join_ray(self.config, self.run_dir.name, tracking.note, stack)
            groups = start_workers(self.config, {"actor": actor}, unique_modules, log_folder, stack)
            yield groups["actor"]


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
        # before `resume` replaces the weights, so that a continued run also has the untrained samples to compare with
        result = self.result
        if self.validates and self.options.val_before_train:
            result.before = self.validate(result)
        self.resume()
        # a run that continues has logged this validation when it started
        if result.before and self.steps.global_step == 0:
            self.tracking.log(result.before, step=0)
            self.report_validation(result.before)

    def log_step(self, batch: DataProto, validation: dict[str, float]) -> None:
        """Sends this step's metrics to the trackers."""
        step_seconds = self.timing["step"]
        timing = {f"timing_s/{name}": seconds for name, seconds in self.timing.items()}
        logged = {
            "training/global_step": float(self.steps.global_step),
            "training/epoch": float(self.steps.epoch),
            **self.metrics,
            **timing,
            "perf/time_per_step": step_seconds,
            "perf/samples_per_second": len(batch) / step_seconds,
            **self.usage_metrics(),
            **validation,
        }
        self.tracking.log(logged, step=self.steps.global_step)


class DiffusionRole(SavedByWorkers):
    """The driver's handle of the model on a worker group.

    Each call plans a batch, dispatches it and restores the order of the results.

    Args:
        group: the workers.
        together: samples per micro-batch.
    """

    def __init__(self, group: WorkerGroup, together: int) -> None:
        self.group = group
        self.together = together

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
        run_dir: folder of the run.
        result: its samples.
        groups: prompts with the slices of their samples. A single sample is drawn as a clip; of several samples, the
            first frame of each is drawn.
        references: clips (F, 3, H, W) in [0, 1] drawn above the samples, one per prompt; none if it is empty.
        columns: largest number of frames side by side.

    Returns:
        The path of the picture, or None if a validation is missing.
    """
    if result.first is None or result.last is None:
        return None
    # each prompt gets two strips, or three with a reference
    strips_of_prompts = []
    for index, (prompt, rows) in enumerate(groups):
        strips = []
        if index < len(references):
            reference = as_frames(references[index])
            strips.append(Strip("reference", reference))

        score_before = _mean_score(result.first, rows)
        frames_before = _frames_of(result.first, rows)
        strips.append(Strip(f"before\n{score_before:.2f}", frames_before))

        score_after = _mean_score(result.last, rows)
        frames_after = _frames_of(result.last, rows)
        is_better = score_after > score_before
        strips.append(Strip(f"after\n{score_after:.2f}", frames_after, is_better))
        strips_of_prompts.append((prompt, strips))
    return draw_strips(run_dir / "before_after.png", strips_of_prompts, run_dir.name, columns)


def _mean_score(samples: DataProto, rows: slice) -> float:
    """Returns the mean score of the rows, without those whose score is NaN."""
    scores = samples.batch["face_score"][rows]
    return scores.nanmean().item()


def _frames_of(samples: DataProto, rows: slice) -> Frames:
    """Returns the frames of a single sample, or the first frame of each of several samples."""
    clips = samples.batch["frames"][rows]
    if len(clips) == 1:
        return as_frames(clips[0])
    return as_frames(clips[:, 0])


def fingerprint(entries: Iterable[str]) -> str:
    """Returns a hash of the entries, which depends on their number, order and text."""
    digest = hashlib.sha256()
    # a line for each entry, so that entries joined in another way have another hash
    for entry in entries:
        digest.update(f"{entry}\n".encode())
    return digest.hexdigest()[:16]
