"""The sequence of training steps, and their periodic actions. Resumable at any step."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from verl_lite.config import RunConfig


class StepCounter:
    """Counts training steps.

    Attributes:
        total: Last step of the run.
        global_step: Current step, from 1; 0 before the first.
        epoch: Current epoch, from 0.
        stop_asked: True if `stop` was called.
        stopping: True if the run ends after the current step although steps remain.
    """

    total: int
    global_step: int = 0
    epoch: int = 0
    stop_asked = False
    stopping = False

    def __iter__(self) -> Iterator[Any]:
        """Yields the data of each remaining step, and counts the steps."""
        raise NotImplementedError

    def stop(self) -> None:
        """Requests that the run ends after the current step. Safe to call at any time, also in a signal handler."""
        self.stop_asked = True

    def must_stop(self) -> bool:
        """True if the run must end after this step because `stop` was called."""
        # evaluated once per step, before its checkpoint, so that a stopped run always has one: a signal that arrives
        # between this checkpoint and the end of the step is for the next step
        self.stopping = self.stop_asked and not self.is_last
        return self.stopping

    @property
    def is_last(self) -> bool:
        return self.global_step >= self.total

    def due(self, frequency: int) -> bool:
        """True if an action with this frequency is due in the current step; -1 = only in the last step, 0 = never."""
        if frequency == 0:
            return False
        # the last step counts with any frequency, so that the result is validated and saved
        if self.is_last:
            return True
        return frequency > 0 and self.global_step % frequency == 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which a resumed run continues."""
        return {"global_step": self.global_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.global_step = state["global_step"]


class EpochSteps(StepCounter):
    """Steps over a dataset of numbered rows: seed and step alone determine the rows of a step.

    An epoch contains every row `repeat` times, and its last batch may be smaller. Iterating yields step numbers.

    Args:
        rows: number of training rows.
        batch_size: number of rows of a step.
        options: number of epochs or steps, and the seed.
        shuffle: True to draw a new order of the rows in each epoch.
        repeat: number of times that an epoch contains each row.
        dataset: fingerprint of the data, which checkpoints store.
    """

    def __init__(
        self, rows: int, batch_size: int, options: RunConfig, *, shuffle: bool, repeat: int = 1, dataset: str = ""
    ) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.repeat = repeat
        self.shuffle = shuffle
        self.seed = options.seed
        self.dataset = dataset
        # rounded up, because the last batch of an epoch may be smaller
        self.per_epoch = math.ceil(rows * repeat / batch_size)
        self.total = options.total_epochs * self.per_epoch
        if options.total_training_steps is not None:
            self.total = options.total_training_steps

    def __iter__(self) -> Iterator[int]:
        while self.global_step < self.total and not self.stopping:
            self.epoch = self.global_step // self.per_epoch
            self.global_step += 1
            yield self.global_step

    def state_dict(self) -> dict[str, Any]:
        # `refuse_other_data` compares it when the run resumes
        return super().state_dict() | {"dataset": self.dataset}

    def rows_of(self, step: int) -> list[int]:
        """Returns the row numbers of the batch of `step`; steps count from 1, rows from 0."""
        epoch, batch_of_epoch = divmod(step - 1, self.per_epoch)
        order = np.tile(np.arange(self.rows), self.repeat)
        if self.shuffle:
            # a generator for each epoch: a resumed run finds its rows without drawing those of the steps before
            generator = np.random.default_rng([self.seed, epoch])
            order = generator.permutation(order)
        start = batch_of_epoch * self.batch_size
        rows = order[start : start + self.batch_size]
        return rows.tolist()
