"""When a run's checkpoints are complete and which of them stay: in the foreground or beside the training.

Takes the models that learn and the driver's state at a step. A disk that is full does not end the training: the next
steps try again, and only where nothing is left to train it is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from trainer.checkpoint import (
    DiskFull,
    note_score,
    open_draft,
    prune,
    publish,
    removed_on_failure,
    require_space,
)
from trainer.requirements import needs_critic
from trainer.steps import StepCounter
from verl_lite.config import PPOConfig, RunConfig
from verl_lite.errors import UserError
from verl_lite.single_controller.worker_group import WorkerGroup
from workers.critic import critic_network
from workers.policy.loading import count_parameters, count_trained

BYTES_PER_PARAMETER = 12  # fp32: the parameter and AdamW's two moments


class Savable(Protocol):
    """A model that learns, as the driver sees it."""

    def save(self, folder: str, background: bool = False) -> None: ...

    def finish_save(self) -> None: ...

    def load(self, folder: str) -> None: ...


class SavedByWorkers:
    """A `Savable` whose files the workers of `group` write, each its shards (`workers.training_worker`)."""

    group: WorkerGroup

    def save(self, folder: str, background: bool = False) -> None:
        """Writes a checkpoint of what learns and its optimizer; in the background until `finish_save`."""
        self.group.save_checkpoint(folder, background)

    def finish_save(self) -> None:
        """Waits for the files of a save in the background."""
        self.group.finish_save()

    def load(self, folder: str) -> None:
        """Reads what `save` wrote."""
        self.group.load_checkpoint(folder)


class Saver:
    """Writes the checkpoints of a run folder.

    learners: by the name of their folder. expected_bytes: size of a checkpoint, as far as known before the first.
    tell: shows a sentence to the user.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        learners: Mapping[str, Savable],
        expected_bytes: int,
        tell: Callable[[str], None],
    ) -> None:
        self.run_dir, self.config, self.learners = run_dir, config, learners
        self.expected_bytes, self.tell = expected_bytes, tell
        self.newest: Path | None = None
        self.is_overdue = False
        self._pending: tuple[int, Path] | None = None

    def is_due(self, steps: StepCounter) -> bool:
        """Whether the step that runs now ends with a checkpoint: it is due, one failed for want of room, or the run is
        stopped."""
        frequency, is_stopped = self.config.save_freq, steps.must_stop()
        return steps.due(frequency) or self.is_overdue or (is_stopped and frequency != 0)

    def save(self, step: int, state: Mapping[str, Any], *, is_last: bool) -> None:
        """Writes the checkpoint of `step`; with trainer.async_save its files are written while training goes on.

        Without room on the disk `is_overdue` is set, and the next step should try again; on the last one DiskFull.
        """
        try:
            self.finish()
            draft = open_draft(self.run_dir, step, self.expected_bytes)
            with removed_on_failure(draft, self.expected_bytes):
                for name, learner in self.learners.items():
                    learner.save(str(draft / name), background=self.config.async_save)
                torch.save(dict(state), draft / "data.pt")
            self._pending = step, draft
            if is_last or not self.config.async_save:
                self.finish()
        except DiskFull as error:
            if is_last:
                raise
            self.tell(f"no checkpoint at step {step}, the next steps try again. {error}")
            self.is_overdue = True
        else:
            self.is_overdue = False

    def finish(self) -> None:
        """Completes a checkpoint whose files are still being written, if there is one, and deletes what is to go."""
        if self._pending is None:
            return
        (step, draft), self._pending = self._pending, None
        with removed_on_failure(draft, self.expected_bytes):
            for learner in self.learners.values():
                learner.finish_save()
            self.newest = publish(self.run_dir, step)
        prune(
            self.run_dir,
            self.config.max_actor_ckpt_to_keep,
            self.config.max_best_ckpt_to_keep,
            self.config.best_ckpt_mode,
        )

    def note_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps the score of a step, by which the best checkpoints stay.

        Raises UserError if trainer.best_ckpt_metric is not among the metrics.
        """
        if not self.config.max_best_ckpt_to_keep:
            return
        name = self.config.best_ckpt_metric
        core = [value for key, value in metrics.items() if key.startswith("val-core/")]
        if name is not None and name not in metrics:
            raise UserError(
                f"trainer.best_ckpt_metric={name}: the validation gives no such metric; it gives "
                f"{', '.join(sorted(metrics))}. Name one of these, or leave it out for the mean of val-core/*"
            )
        if name is None and not core:  # every reward failed: the step has no score
            return
        note_score(self.run_dir, step, metrics[name] if name is not None else sum(core) / len(core))


def checkpoint_bytes(config: PPOConfig) -> int:
    """About the size of one checkpoint: weights and moments of what learns."""
    count = count_trained(config.model)
    if needs_critic(config):
        count += count_parameters(critic_network(config))
    return count * BYTES_PER_PARAMETER


def require_room_for_checkpoints(trainer: RunConfig, run_dir: Path, total_steps: int, one: int) -> None:
    """Raises DiskFull, before anything heavy starts, unless all checkpoints that will lie there together fit.

    one: bytes of one checkpoint, about."""
    if trainer.save_freq == 0:
        return
    written = 1 if trainer.save_freq < 0 else math.ceil(total_steps / trainer.save_freq)
    if trainer.max_actor_ckpt_to_keep is not None:  # one more than is kept while the next is written
        written = min(written, trainer.max_actor_ckpt_to_keep + trainer.max_best_ckpt_to_keep + 1)
    require_space(run_dir, written * one, count=written)
