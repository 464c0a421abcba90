"""Writes, publishes and prunes the checkpoints of a run, in the foreground or in the background.

A checkpoint contains the trained models and the driver's state. A thread hashes and publishes the files while training
continues. A full disk does not end training: the following steps try again. It is an error at the last step.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.checkpoint import files
from trainer.checkpoint.resume import flat_config
from trainer.loop.steps import StepCounter
from verl_lite.config import RunConfig, RunOptions
from verl_lite.machine.random_state import get_random_state, set_random_state
from verl_lite.machine.safe_state import write_state
from verl_lite.single_controller.worker_group import WorkerGroup


class SavedByWorkers:
    """The driver's handle to a trained model: each worker of `group` writes its shards
    (`workers.roles.training_worker`).

    A save in the background lasts until `finish_save`.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    @property
    def groups(self) -> list[WorkerGroup]:
        """All worker groups of the model; the first one trains it."""
        return [self.group]

    def save(self, folder: str, background: bool = False) -> None:
        self.group.save_checkpoint(folder, background)

    def finish_save(self) -> None:
        self.group.finish_save()

    def load(self, folder: str) -> None:
        self.group.load_checkpoint(folder)


class Saver:
    """Writes the checkpoints of a run folder, and restores the checkpoint that a run resumes from.

    Args:
        learners: trained models, by the name of their folder.
        expected_bytes: estimated size of the first checkpoint.
        log: shows a sentence to the user.

    Attributes:
        newest: The newest checkpoint that this process has completed.
        is_overdue: True if the last checkpoint failed because the disk was full.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunOptions,
        learners: Mapping[str, SavedByWorkers],
        expected_bytes: int,
        log: Callable[[str], None],
    ) -> None:
        self.run_dir = run_dir
        self.config = config
        self.trainer = config.trainer
        self.learners = learners
        self.expected_bytes = expected_bytes
        self.log = log
        self.newest: Path | None = None
        self._completed: list[Path] = []  # checkpoints that `take_completed` has not returned yet
        self.is_overdue = False
        self._written: Path | None = None  # a draft whose files the workers write
        self._publishing: Future[Path] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # a killed process leaves drafts, which would occupy the space of the next checkpoint
        files.tidy(run_dir)

    def is_due(self, steps: StepCounter) -> bool:
        """Returns True if the current step ends with a checkpoint.

        It does if one is due, the disk was full at the last one, or the run is being stopped.
        """
        frequency = self.trainer.save_freq
        # called in every step, also if a checkpoint is due anyway: `must_stop` decides whether the run ends
        is_stopped = steps.must_stop()
        if steps.due(frequency) or self.is_overdue:
            return True
        # 0 turns all checkpoints off
        return is_stopped and frequency != 0

    def save(self, steps: StepCounter, state: Mapping[str, object] | None = None) -> None:
        """Writes the checkpoint of this step. With trainer.async_save the workers write their files in the background.

        If the disk is full, the next step tries again (`is_due`).

        Args:
            steps: the steps of the run, whose state becomes part of the checkpoint.
            state: state of the trainer to save in addition to options, steps and random states.

        Raises:
            DiskFull: if the disk is full in the last step, after which nothing tries again.
        """
        step = steps.global_step
        is_last = steps.is_last or steps.stopping
        driver_state: dict[str, object] = {
            "config": flat_config(self.config),
            "steps": steps.state_dict(),
            "random": get_random_state(),
        }
        driver_state |= state or {}
        try:
            # the workers keep only one copy of their state on the host, so the previous save comes to its end first
            self._begin_publication()
            draft = files.open_draft(self.run_dir, step, self.expected_bytes)
            with files.removed_on_failure(draft):
                for name, learner in self.learners.items():
                    learner.save(str(draft / name), background=self.trainer.async_save)
                write_state(draft / files.STATE, driver_state)
            self._written = draft

            # hashing and publishing run in the thread in any case; only the last step waits for their end
            if is_last:
                self.finish()
            elif not self.trainer.async_save:
                self._begin_publication()
            self.is_overdue = False
        except files.DiskFull as error:
            if is_last:
                raise
            self.log(f"no checkpoint at step {step}, the next steps try again. {error}")
            self.is_overdue = True

    def finish(self) -> None:
        """Completes a checkpoint that is still being written, if there is one."""
        self._begin_publication()
        self._finish_publication()

    def wait(self) -> None:
        """Waits until the running publication ends, and ignores its errors: called when the run has failed."""
        if self._publishing is not None:
            self._publishing.exception()

    def _begin_publication(self) -> None:
        """Waits for the files of the workers; a thread then publishes them and deletes surplus checkpoints."""
        # one publication at a time, so that checkpoints become visible in the order of their steps
        self._finish_publication()
        if self._written is None:
            return

        # cleared first: if the workers fail, the draft is removed, and the next save must not wait for its files
        draft = self._written
        self._written = None
        with files.removed_on_failure(draft):
            for learner in self.learners.values():
                learner.finish_save()
        self._publishing = self._thread.submit(self._publish, draft)

    def _finish_publication(self) -> None:
        """Waits for the thread that publishes a checkpoint, if one is running. Raises its error."""
        if self._publishing is None:
            return
        # cleared first, so that an error is raised once and the next save can succeed
        publishing = self._publishing
        self._publishing = None
        self.newest = publishing.result()
        self._completed.append(self.newest)

    def take_completed(self) -> list[Path]:
        """Returns the checkpoints that were completed since the last call, without waiting for one that is not.

        A checkpoint that `max_actor_ckpt_to_keep` has deleted meanwhile is left out.
        """
        publishing = self._publishing
        # an error of the publication is raised at the next save, which handles a full disk
        if publishing is not None and publishing.done() and publishing.exception() is None:
            self._finish_publication()
        completed = [folder for folder in self._completed if folder.is_dir()]
        self._completed = []
        return completed

    def _publish(self, draft: Path) -> Path:
        with files.removed_on_failure(draft):
            folder = files.publish(draft)
        # older checkpoints are deleted only when the new one is complete, so there is always one to resume from
        files.prune(self.run_dir, self.trainer.max_actor_ckpt_to_keep)
        return folder

    def restore(self, steps: StepCounter) -> dict[str, Any] | None:
        """Restores learners, steps and random states from the checkpoint that `trainer.resume_mode` selects.

        Returns the driver's state, or None if the run starts at step 1.
        """
        folder = files.find_checkpoint(self.run_dir, self.trainer.resume_mode, self.trainer.resume_from_path)
        if folder is None:
            if self.trainer.resume_mode == "auto":
                self.log(f"trainer.resume_mode=auto: {self.run_dir} has no checkpoint; the run starts at step 1")
            return None
        state = files.read_state(folder)
        for name, learner in self.learners.items():
            learner.load(str(folder / name))
        steps.load_state_dict(state["steps"])
        # after the models: with trainer.backend=inline, loading them also sets the generators of this process
        set_random_state(state["random"])
        self.log(f"The run continues after step {steps.global_step} of {steps.total}, from {folder}")
        return state


def most_checkpoints(trainer: RunConfig, total_steps: int) -> int:
    """Returns the largest number of checkpoints in the run folder at a time: those kept and one being written."""
    if trainer.save_freq == 0:
        return 0
    total = 1  # a negative save_freq saves only the last step
    if trainer.save_freq > 0:
        total = math.ceil(total_steps / trainer.save_freq)
    if trainer.max_actor_ckpt_to_keep is None:
        return total
    return min(total, trainer.max_actor_ckpt_to_keep + 1)


def require_room_for_checkpoints(trainer: RunConfig, run_dir: Path, total_steps: int, estimated_bytes: int) -> None:
    """Raises DiskFull, before anything heavy starts, unless the disk has room for all remaining checkpoints.

    Args:
        total_steps: number of steps of the whole run.
        estimated_bytes: size of a checkpoint, used while the folder contains none.
    """
    most = most_checkpoints(trainer, total_steps)
    if most == 0:
        return
    num_saved = len(files.saved_steps(run_dir))
    # at least one: a checkpoint is complete before the one that it replaces is deleted
    num_missing = max(1, most - num_saved)
    size = files.expected_size(run_dir, estimated_bytes)
    files.require_space(run_dir, num_missing * size)
