"""The training steps of a PPO run, whose samples the scheduler chooses."""

import math
from collections.abc import Iterator
from typing import Any

from trainer.loop.steps import StepCounter
from trainer.rollout.scheduler import RolloutScheduler
from verl_lite.config import PPOConfig
from verl_lite.protocol import DataProto


def count_steps(config: PPOConfig, epoch_prompts: int | None) -> int:
    """Returns the number of training steps of the run.

    Args:
        config: the options of the run.
        epoch_prompts: number of prompts per epoch; None = no dataset, which requires trainer.total_training_steps.
    """
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    assert epoch_prompts is not None
    # the last batch of an epoch may be smaller
    steps_per_epoch = math.ceil(epoch_prompts / config.data.train_batch_size)
    return steps_per_epoch * config.trainer.total_epochs


class TrainingSteps(StepCounter):
    """The steps of a PPO run. The scheduler chooses the samples of each step, and its state is saved with the steps.

    Each step yields a batch without rows: meta_info `scheduler`, the state of the scheduler before the step, from which
    `restrict_to_step` can repeat it.
    """

    def __init__(self, config: PPOConfig, scheduler: RolloutScheduler, total: int) -> None:
        self.config = config
        self.scheduler = scheduler
        self.total = total

    def __iter__(self) -> Iterator[DataProto]:
        while self.global_step < self.total and not self.stopping:
            self.global_step += 1
            yield DataProto(meta_info={"scheduler": self.scheduler.snapshot()})

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """Epoch of the prompts that were drawn last, from 0."""
        return self.scheduler.source.epoch

    def update(self, batch: DataProto) -> dict[str, float]:
        """Passes the step's finished batch to the data sampler. Returns the sampler's metrics."""
        # called once per step and before its checkpoint, so that a resumed sampler has seen the same batches
        return self.scheduler.source.update(batch)

    def restrict_to_step(self, step: int, data: DataProto) -> None:
        """Restricts the iteration to one step with the data that it yielded."""
        self.scheduler.restore(data.meta_info["scheduler"])
        self.global_step = step - 1
        self.total = step

    def give_up_step(self, data: DataProto) -> None:
        """Ends the run after the previous step, in the state that this step, which yielded `data`, started from."""
        # running groups of this step would complete when the restored scheduler no longer knows them
        self.scheduler.finish()
        self.scheduler.restore(data.meta_info["scheduler"])
        self.global_step -= 1
        self.stopping = True

    @property
    def past_critic_warmup(self) -> bool:
        """True if the actor is updated in this step; during warmup only the critic is."""
        return self.global_step > self.config.trainer.critic_warmup

    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self.global_step, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.global_step = state["global_step"]
        self.scheduler.load_state_dict(state["scheduler"])
