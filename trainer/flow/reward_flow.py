"""The driver of reward flow. `fit` is the algorithm: read it first, then the stages it names.

An adapter of a video diffusion model learns from a reward that frames give and that gradients pass through: there is no
rollout beside the training, no advantage and no old policy. A step is one call of the workers, which sample clips with
gradient, score them and update.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from trainer.checkpoint import find_checkpoint, read_state
from trainer.clips.writing import VideoWriter
from trainer.evaluate.sample import Sample
from trainer.flow.actor import FlowActorRole
from trainer.flow.steps import ClipSteps
from trainer.resume import flat_config
from trainer.saving import Saver
from trainer.timing import timed
from trainer.tracking import Tracking
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.metrics import Metric, values
from verl_lite.protocol import DataProto
from verl_lite.random_state import get_random_state, set_random_state


@dataclass
class FlowResult:
    """What a run leaves: validation metrics and samples before and after, the last checkpoint.

    first, last: the validation's samples, None where there was none. stopped: the user ended it before its last step.
    """

    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    first: DataProto | None = None
    last: DataProto | None = None
    checkpoint: Path | None = None
    stopped: bool = False


class RewardFlowTrainer:
    """Holds the parts of a run, which `trainer.flow.build` makes from the configuration.

    validation: the clips that are sampled before, on the way and after, with the seeds of their noise. videos: None
    where none are saved (trainer.video_freq=0).
    """

    def __init__(
        self,
        config: RewardFlowConfig,
        *,
        actor: FlowActorRole,
        steps: ClipSteps,
        validation: DataProto,
        videos: VideoWriter | None,
        tracking: Tracking,
        saver: Saver,
        run_dir: Path,
    ) -> None:
        self.config, self.actor, self.steps, self.validation = config, actor, steps, validation
        self.videos, self.tracking, self.saver, self.run_dir = videos, tracking, saver, run_dir
        self.metrics: dict[str, Metric] = {}
        self.timing: dict[str, float] = {}
        self.result = FlowResult()

    # ---------------------------------------------------------------------------------------------- the algorithm

    def fit(self) -> FlowResult:
        """Trains to the end of the configured steps. Returns what to show."""
        result = self.result = FlowResult()
        if self.validates and self.config.trainer.val_before_train:
            result.before, result.first = self.validate()
        self.resume()
        if result.before and self.steps.global_step == 0:
            self.tracking.log(result.before, step=0)
        for step in self.steps:
            self.metrics, self.timing = {}, {}
            with self.timed("step"):
                with self.timed("data"):
                    batch = self.steps.batch(step)
                with self.timed("train"):
                    self.metrics |= self.actor.train_step(batch)
                if self.steps.due(self.config.trainer.video_freq):
                    with self.timed("videos"):
                        self.save_videos()
            if self.validates and self.steps.due(self.config.trainer.test_freq):
                with self.timed("testing"):
                    result.after, result.last = self.validate()
            self.log_step(batch, result.after if "testing" in self.timing else {})
            if self.saver.is_due(self.steps):
                self.save()  # last, so that a resumed run finds the whole history of the steps before it
        result.checkpoint, result.stopped = self.saver.newest, self.steps.stopping
        return result

    # ------------------------------------------------------------------------------------------------- the stages

    @property
    def validates(self) -> bool:
        """Whether there is a validation."""
        return self.config.trainer.test_freq != 0

    def validate(self) -> tuple[dict[str, float], DataProto]:
        """Samples the validation's clips without gradient, always from the same noise: (the mean score over those that
        count, and the share of those that do not; frames, face_score and counted of each)."""
        samples = self.actor.sample(self.validation)
        counted = samples.batch["counted"].bool()
        scores = samples.batch["face_score"][counted]
        name = self.config.reward.name.rpartition(":")[2]
        metrics = {f"val-aux/{name}/no_face_frac": 1.0 - float(counted.float().mean())}
        if len(scores):
            metrics[f"val-core/{name}/reward/mean@1"] = float(scores.mean())
        return metrics, samples

    def save_videos(self) -> None:
        """Hands the clips that this step's update was made of to the writer, which does not keep the training."""
        assert self.videos is not None
        samples = self.actor.last_frames()
        for row, frames in zip(samples.batch["row"].tolist(), samples.batch["frames"], strict=True):
            self.videos.write(f"step_{self.steps.global_step}/row_{row}", frames)

    # ------------------------------------------------------------------------------------- saving, resuming, logging

    def save(self) -> None:
        """Writes a checkpoint of this step, and logs how long it kept the training."""
        with self.timed("save_checkpoint"):
            state = {
                "config": flat_config(self.config),
                "steps": {"global_step": self.steps.global_step, "dataset": self.steps.dataset},
                "random": get_random_state(),
            }
            is_last = self.steps.is_last or self.steps.stopping
            self.saver.save(self.steps.global_step, state, is_last=is_last)
        self.tracking.log({"timing_s/save_checkpoint": self.timing["save_checkpoint"]}, step=self.steps.global_step)

    def resume(self) -> None:
        """Continues from the checkpoint that `trainer.resume_mode` names, if any."""
        trainer = self.config.trainer
        folder = find_checkpoint(self.run_dir, trainer.resume_mode, trainer.resume_from_path)
        if folder is not None:
            state = read_state(folder)
            self.steps.global_step = state["steps"]["global_step"]
            for name, learner in self.saver.learners.items():
                learner.load(str(folder / name))
            set_random_state(state["random"])

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Adds the block's seconds to timing_s/<name>."""
        return timed(self.timing, name, self.steps.global_step)

    def log_step(self, batch: DataProto, validation: dict[str, float]) -> None:
        """Sends this step's metrics to the trackers."""
        step = self.steps.global_step
        logged = {
            "training/global_step": float(step),
            "training/epoch": float(self.steps.epoch),
            **values(self.metrics),
            **{f"timing_s/{name}": seconds for name, seconds in self.timing.items()},
            "perf/samples_per_second": len(batch) / self.timing["step"],
            **validation,
        }
        self.tracking.log(logged, step=step)
        if validation:
            self.saver.note_validation(step, validation)
