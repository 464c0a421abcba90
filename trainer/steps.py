"""The sequence of training steps: which prompts, which epoch, what is due. Resumable at any step."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer.data.order import build_order, build_train_loader
from trainer.data.prompts import PromptDataset
from trainer.rollout_scheduler import RolloutScheduler
from verl_lite.config import PPOConfig, RunConfig
from verl_lite.protocol import DataProto


class StepCounter:
    """`global_step` is the step that runs now (1 is the first; 0 before it), `epoch` counts from 0; `total` is the last
    one."""

    total: int
    global_step: int = 0
    epoch: int = 0
    stop_asked = False
    stopping = False  # the step that runs now is the last one although there are more

    def stop(self) -> None:
        """Asks the run to end after the step that runs now, at any instant, even from a signal's handler."""
        self.stop_asked = True

    def must_stop(self) -> bool:
        """Whether the run was asked to end after this step. Decided here, once a step, before its checkpoint, so that
        it never ends without one."""
        self.stopping = self.stop_asked and not self.is_last
        return self.stopping

    @property
    def is_last(self) -> bool:
        return self.global_step >= self.total

    def due(self, frequency: int) -> bool:
        """Whether something that happens every `frequency` steps happens in this one; -1 = in the last, 0 = never."""
        return frequency != 0 and (self.is_last or (frequency > 0 and self.global_step % frequency == 0))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from."""
        return {"global_step": self.global_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.global_step = state["global_step"]


class EpochSteps(StepCounter):
    """Steps over rows that are known by their number: which rows a step has depends on seed and step alone.

    An epoch has every row `repeat` times, and its last batch may be smaller. Iterates over the numbers of the steps.

    Args:
        rows: to train on.
        options: how many epochs or steps, and the seed.
        dataset: fingerprint of the data, which a checkpoint keeps.
    """

    def __init__(
        self, rows: int, batch_size: int, options: RunConfig, *, shuffle: bool, repeat: int = 1, dataset: str = ""
    ) -> None:
        self.rows, self.batch_size, self.repeat, self.shuffle = rows, batch_size, repeat, shuffle
        self.seed, self.dataset = options.seed, dataset
        self.per_epoch = -(-rows * repeat // batch_size)
        limit = options.total_training_steps
        self.total = options.total_epochs * self.per_epoch if limit is None else limit

    def __iter__(self) -> Iterator[int]:
        while self.global_step < self.total and not self.stopping:
            self.epoch = self.global_step // self.per_epoch
            self.global_step += 1
            yield self.global_step

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"dataset": self.dataset}

    def rows_of(self, step: int) -> list[int]:
        """The rows of the batch of a step, which count from 1."""
        epoch, number = divmod(step - 1, self.per_epoch)
        order = np.tile(np.arange(self.rows), self.repeat)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        return order[number * self.batch_size : (number + 1) * self.batch_size].tolist()


def count_steps(config: PPOConfig, epoch_prompts: int | None) -> int:
    """Training steps of the whole run; the last batch of an epoch may be short. epoch_prompts: of one epoch; None =
    there is no dataset, and trainer.total_training_steps is given."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    assert epoch_prompts is not None
    return math.ceil(epoch_prompts / config.data.train_batch_size) * config.trainer.total_epochs


class TrainingSteps(StepCounter):
    """Iterates over the prompts of each step, from the first or the resumed one to the last. Epochs follow one another
    until the number of steps is reached."""

    def __init__(self, config: PPOConfig, data: PromptDataset) -> None:
        self.config = config
        self.order = build_order(data, config)
        self.loader: Any = build_train_loader(data, config, self.order)
        self.total = count_steps(config, self.order.rows)

    def __iter__(self) -> Iterator[DataProto]:
        while self.global_step < self.total:
            for prompts in self.loader:
                self.global_step += 1
                yield prompts
                if self.stopping or self.is_last:
                    return
            self.epoch += 1

    def update(self, batch: DataProto) -> dict[str, float]:
        """Tells a sampler what became of the step's batch, once a step and before its checkpoint; gives what it wants
        logged."""
        return self.order.update(batch)

    def only(self, step: int, epoch: int, prompts: DataProto) -> None:
        """Leaves one step to do, with these prompts."""
        self.loader, self.global_step, self.epoch, self.total = [prompts], step - 1, epoch, step

    @property
    def past_critic_warmup(self) -> bool:
        """Whether the actor learns in this step; before, only the critic does."""
        return self.global_step > self.config.trainer.critic_warmup

    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self.global_step, "epoch": self.epoch, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.global_step, self.epoch = state["global_step"], state["epoch"]
        self.loader.load_state_dict(state["loader"])


class EpisodeSteps(TrainingSteps):
    """The steps of a run without a dataset: what is to be done in each is the scheduler's part, whose state is saved
    with them. Each step gives a batch without rows: meta_info global_step, from 0, and the number of its first group.
    """

    def __init__(self, config: PPOConfig, scheduler: RolloutScheduler) -> None:
        self.config, self.scheduler = config, scheduler
        self.total = count_steps(config, None)

    def __iter__(self) -> Iterator[DataProto]:
        while self.global_step < self.total and not self.stopping:
            self.global_step += 1
            yield DataProto(meta_info={"global_step": self.global_step - 1, "next_group": self.scheduler.next_group})

    def update(self, batch: DataProto) -> dict[str, float]:
        """Nothing: the scheduler saw the episodes end."""
        return {}

    def only(self, step: int, epoch: int, prompts: DataProto) -> None:
        """Leaves one step to do, with its groups, where these were not begun in an earlier one."""
        self.scheduler.next_group = prompts.meta_info["next_group"]
        self.global_step, self.total = step - 1, step

    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self.global_step, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.global_step = state["global_step"]
        self.scheduler.load_state_dict(state["scheduler"])
