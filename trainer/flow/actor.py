"""The driver's face of the workers of reward flow: each call plans the batch, dispatches it and puts the answer back in
order. A row is a sample, whatever its size: what a step's loss is divided by is their number over all ranks."""

from __future__ import annotations

import numpy as np

from trainer.saving import SavedByWorkers
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.metrics import Metric, join
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import BatchPlan, plan_batch
from verl_lite.single_controller.worker_group import WorkerGroup

LORA = "lora"
"""The folder of a checkpoint that diffusers' `load_lora_weights` reads."""


class FlowActorRole(SavedByWorkers):
    """The diffusion model with its adapter, on a worker group."""

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
        return plan_batch(
            ones,
            world_size=self.group.world_size,
            mini_batch_size=None,
            micro_batch_size=self.config.actor.micro_batch_size_per_gpu,
            num_tokens=ones,
        )


class AdapterExport:
    """The adapter as diffusers reads it, a part of each checkpoint that is written for others; nothing is resumed from
    it."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    def save(self, folder: str, background: bool = False) -> None:
        """Writes the adapter alone; it is small, so at once."""
        self.group.export_lora(folder)

    def finish_save(self) -> None:
        """It is written."""

    def load(self, folder: str) -> None:
        """The adapter comes with the actor's own files."""
