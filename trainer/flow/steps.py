"""The steps of reward flow: which clips, from which noise. A function of the seed and the step alone, so that a resumed
run needs to know nothing but where it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.checkpoint import find_checkpoint, read_state
from trainer.steps import StepCounter
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto


def count_steps(config: RewardFlowConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    limit = config.trainer.total_training_steps
    return steps_per_epoch * config.trainer.total_epochs if limit is None else limit


class ClipSteps(StepCounter):
    """Iterates over the numbers of the steps, from the first or the resumed one to the last.

    batch: gives their clips, as `VideoLoader.batch` does. steps_per_epoch: of one pass over the clips. dataset: its
    `VideoDataset.fingerprint`.
    """

    def __init__(self, batch: Callable[[int], DataProto], *, total: int, steps_per_epoch: int, dataset: str) -> None:
        self.batch, self.total, self.steps_per_epoch, self.dataset = batch, total, steps_per_epoch, dataset

    def __iter__(self) -> Iterator[int]:
        while self.global_step < self.total and not self.stopping:
            self.epoch = self.global_step // self.steps_per_epoch
            self.global_step += 1
            yield self.global_step


def refuse_other_clips(config: RewardFlowConfig, run_dir: Path, dataset: str) -> None:
    """Raises UserError if the run continues from a checkpoint that was made with other clips, unless
    trainer.resume_allow names data.train_files or data.train_max_samples. dataset: see `VideoDataset.fingerprint`."""
    trainer = config.trainer
    if {"data.train_files", "data.train_max_samples"} & set(trainer.resume_allow):
        return
    folder = find_checkpoint(run_dir, trainer.resume_mode, trainer.resume_from_path)
    before = dataset if folder is None else read_state(folder)["steps"]["dataset"]
    if before != dataset:
        raise UserError(
            f"The clips are not those of {folder}: their fingerprint is {dataset}, that of the checkpoint {before}. "
            "Resume with the same data.train_files, prompts and videos; or, if the change is meant, with "
            "trainer.resume_allow=[data.train_files]"
        )
