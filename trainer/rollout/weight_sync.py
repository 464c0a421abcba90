"""Decides when the rollout engines receive the weights of the trained policy."""

from typing import Protocol

from trainer.loop.steps import StepCounter
from trainer.rollout.scheduler import RolloutScheduler
from verl_lite.config import PPOConfig
from verl_lite.metrics import Metric

Metrics = dict[str, Metric]


class TrainedPolicy(Protocol):
    """A policy with rollout engines, such as `trainer.ppo.roles.ActorRole`."""

    def update_weights(self, version: int) -> Metrics:
        """Copies the trained weights to the engines, whose new samples carry this version."""


class WeightSync:
    """Gives the weights of the policy to the rollout engines. A trainer makes these calls in this order, and each call
    gives weights only if it is its turn:

        start()                       before the first step: the model's weights, or those of the checkpoint
        for each step s:
            scheduler.get_batch(s)
            after_batch()             version s - 1    if every batch has one version
            scheduler.begin_ahead(s)
            ...                       rewards, advantages, update of the policy
            after_update()            version s        otherwise
            before_validation()       version s        if the step validates
            saver.save(...)
            after_checkpoint()        version s        if every batch has one version

    Version v denotes the weights after step v. Samples carry the version of the weights that sampled them. There are
    three modes, which follow from the options of `async_training`:

    - No batch is started ahead. After the update no sample is running, and the next batch needs the new weights.
    - Samples span weight updates (partial rollouts): running samples continue under the new weights.
    - Batches are started ahead, and every batch has one version. Weights may then change only while no sample is
      running. This is so between the batch of step s and the samples of later steps. Step s is not trained at that
      moment, so these samples get version s - 1.

    All calls except `start` and `before_validation` leave out versions that agentic.model_update_frequency does not
    divide.

    Args:
        scheduler: starts the samples; its attribute `version` is the version of the weights in the engines.
        actor: the policy and its engines.
        steps: the current step of the run.
    """

    def __init__(
        self, config: PPOConfig, scheduler: RolloutScheduler, actor: TrainedPolicy, steps: StepCounter
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.actor = actor
        self.steps = steps

    def start(self) -> Metrics:
        """Gives the weights with which the run starts."""
        return self._give(self.steps.global_step)

    def after_batch(self) -> Metrics:
        """Gives the weights of the previous step, with which the batches of later steps are sampled."""
        if self.steps.is_last or not self._batches_have_one_version:
            return {}
        return self.give_if_due(self.steps.global_step - 1)

    def after_update(self) -> Metrics:
        """Gives the weights that the current step has trained."""
        if self._batches_have_one_version:
            return {}
        return self.give_if_due(self.steps.global_step)

    def before_validation(self) -> Metrics:
        """Gives the newest weights."""
        return self._give(self.steps.global_step)

    def after_checkpoint(self) -> Metrics:
        """Gives the weights that the engines of a resumed run have."""
        # a group that replaces a dropped one is sampled with the same weights whether the run was interrupted or not
        ends = self.steps.is_last or self.steps.stopping
        if ends or not self._batches_have_one_version:
            return {}
        return self.give_if_due(self.steps.global_step)

    def give_if_due(self, version: int) -> Metrics:
        """Gives the weights of `version` if agentic.model_update_frequency divides it, or if the engines have none."""
        is_due = version % self.config.agentic.model_update_frequency == 0
        # engines without weights cannot sample; a run resumes from any step
        if not is_due and self.scheduler.version is not None:
            return {}
        return self._give(version)

    @property
    def _batches_have_one_version(self) -> bool:
        """True if batches are started ahead and the weights may not change under running samples."""
        return self.scheduler.batches_ahead > 0 and not self.scheduler.spans_updates

    def _give(self, version: int) -> Metrics:
        """Copies the weights to the engines unless they have this version. Returns the metrics of the copy."""
        if version == self.scheduler.version:
            return {}
        # without partial rollouts a sample has one version
        if not self.scheduler.spans_updates:
            self.scheduler.finish()
        self.scheduler.version = version
        return self.actor.update_weights(version=version)
