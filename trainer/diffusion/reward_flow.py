"""The driver of reward flow: an adapter of a video diffusion model learns from a reward with a gradient.

There is no rollout beside the training, no advantage and no old policy. A step is one call of the workers, which sample
clips with gradient, score them and update.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trainer.clips.writing import VideoWriter
from trainer.diffusion.loop import DiffusionTrainer, EpochSteps
from trainer.saving import SavedByWorkers, Saver
from trainer.tracking import Tracking
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.metrics import Metric, join, values
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import BatchPlan, plan_batch
from verl_lite.single_controller.worker_group import WorkerGroup

LORA = "lora"
"""The folder of a checkpoint that diffusers' `load_lora_weights` reads."""


class RewardFlowTrainer(DiffusionTrainer):
    """Args:
    read_batch: the clips of a step, by its number.
    validation: the clips that are sampled before, on the way and after, with the seeds of their noise.
    videos: takes samples of some steps; None = none are saved (trainer.video_freq=0).
    """

    def __init__(
        self,
        config: RewardFlowConfig,
        *,
        actor: FlowActorRole,
        steps: EpochSteps,
        read_batch: Callable[[int], DataProto],
        validation: DataProto,
        videos: VideoWriter | None,
        tracking: Tracking,
        saver: Saver,
    ) -> None:
        super().__init__(config.trainer, steps=steps, tracking=tracking, saver=saver)
        self.config, self.actor, self.read_batch = config, actor, read_batch
        self.validation, self.videos = validation, videos

    def train_step(self) -> None:
        """Reads clips, samples and learns from them; hands samples of some steps to the writer."""
        step = self.steps.global_step
        with self.timed("data"):
            batch = self.read_batch(step)
        self.samples = len(batch)
        with self.timed("train"):
            self.metrics |= values(self.actor.train_step(batch))
        if self.videos is not None and self.steps.due(self.config.trainer.video_freq):
            with self.timed("videos"):
                samples = self.actor.last_frames()
                for row, frames in zip(samples.batch["row"].tolist(), samples.batch["frames"], strict=True):
                    self.videos.write(f"step_{step}/row_{row}", frames)

    def validate(self) -> tuple[dict[str, float], DataProto]:
        """The mean score over the samples that count, and the share of those that do not."""
        samples = self.actor.sample(self.validation)
        counted = samples.batch["counted"].bool()
        scores = samples.batch["face_score"][counted]
        name = self.config.reward.name.rpartition(":")[2]
        metrics = {f"val-aux/{name}/no_face_frac": 1.0 - float(counted.float().mean())}
        if len(scores):
            metrics[f"val-core/{name}/reward/mean@1"] = float(scores.mean())
        return metrics, samples


class FlowActorRole(SavedByWorkers):
    """The model with its adapter on a worker group: each call plans the batch, dispatches it and restores its order.

    A row is a sample, whatever its size: what a step's loss is divided by is their number over all ranks.
    """

    def __init__(self, group: WorkerGroup, config: RewardFlowConfig) -> None:
        self.group, self.config = group, config

    def train_step(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer step on the batch."""
        return join(self.group.train_step(self._plan(batch).apply(batch)).meta_info["metrics"])

    def sample(self, batch: DataProto) -> DataProto:
        """frames (B, F, 3, H, W) in [0, 1], face_score (B,) and counted (B,) of each row, without gradient."""
        plan = self._plan(batch)
        return plan.restore(self.group.sample(plan.apply(batch)))

    def last_frames(self) -> DataProto:
        """frames and row of the samples that the last step was trained on, without padding, in no order."""
        return DataProto.concat([part for part in self.group.last_frames() if len(part)])

    def _plan(self, batch: DataProto) -> BatchPlan:
        """All rows in one optimizer step, cut evenly."""
        ones = np.ones(len(batch), dtype=np.int64)
        micro = self.config.actor.micro_batch_size_per_gpu
        return plan_batch(
            ones, world_size=self.group.world_size, mini_batch_size=None, micro_batch_size=micro, num_tokens=ones
        )


class AdapterExport:
    """The adapter as diffusers reads it: a part of each checkpoint, from which nothing is resumed."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    def save(self, folder: str, background: bool = False) -> None:
        """Writes the adapter alone; it is small, so at once."""
        self.group.export_lora(folder)

    def finish_save(self) -> None:
        """It is written."""

    def load(self, folder: str) -> None:
        """The adapter comes with the actor's own files."""
