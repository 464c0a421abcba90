"""The recipe with an explicit training loop in the calls of ROLL's AgenticPipeline, as a start for custom loops:

python -m trainer.main_ppo recipe=recipes.agentic_frozen_lake.roll_loop
"""

from recipes.agentic_frozen_lake.recipe import overrides, prepare  # noqa: F401  required in every recipe
from trainer.agentic.episode_metrics import compute_data_metrics
from trainer.agentic.roll import AgenticPipeline
from trainer.observe.final_report import FitResult
from verl_lite.metrics import values
from verl_lite.protocol import DataProto


class RollLoop(AgenticPipeline):
    """A training loop with steps counted from 0, as in ROLL. Logs and checkpoints count completed steps."""

    def fit(self) -> FitResult:
        """Runs the remaining steps. Validates before the first step, during the training and at its end."""
        config = self.pipeline_config
        self.set_model_update_pair(
            src_cluster=self.actor_train,
            tgt_cluster=self.actor_infer,
            frequency=config.actor_train.model_update_frequency,
        )
        self.resume()
        for global_step in range(self.steps.global_step, config.max_steps):
            # first, because the engine starts without weights, or with those of the step before
            self.metrics = self.model_update(global_step)
            self._evaluate()

            batch = self._sample(global_step)
            batch = self._add_model_outputs(batch)
            batch = self.estimate_advantages(batch)
            self._train(global_step, batch)

            self._log(global_step, batch)
            self.do_checkpoint(global_step)
            self.keep_samples(batch)
            if self.steps.stopping:
                break
        self._evaluate()
        self.result.checkpoint = self.saver.newest
        self.result.stopped = self.steps.stopping
        return self.result

    def _sample(self, global_step: int) -> DataProto:
        """Returns a batch of scored episodes."""
        size = self.pipeline_config.rollout_batch_size
        request = DataProto(meta_info={"global_step": global_step})
        batch = self.train_rollout_scheduler.get_batch(request, size)
        self.metrics.update(batch.meta_info.pop("metrics"))
        # before the update, so that the next episodes overlap with it; only with async_training.batches_ahead
        self.train_rollout_scheduler.begin_ahead(batch, size)
        # `score` also counts and masks failed episodes
        return self.score(batch)

    def _add_model_outputs(self, batch: DataProto) -> DataProto:
        """Adds the actor's log-probs, the critic's values and the reference's log-probs."""
        old_log_probs = None
        # present with algorithm.rollout_correction.bypass_mode
        if "old_log_probs" not in batch:
            # as in ROLL, where critic and actor compute at the same time; here the future has its result already
            old_log_probs = self.actor_train.compute_log_probs(batch, blocking=False)
        if self.critic:
            values_of_critic = self.critic.compute_values(batch, blocking=False)
            batch.union(values_of_critic.get())
        if self.reference:
            log_probs_of_reference = self.reference.compute_log_probs(batch)
            batch.union(log_probs_of_reference)
        if old_log_probs is None:
            return batch

        batch.union(old_log_probs.get())
        return self.compare_rollout(batch)

    def _train(self, global_step: int, batch: DataProto) -> None:
        """Trains the critic, and from step `critic_warmup` on also the actor."""
        critic_update = None
        if self.critic:
            critic_update = self.critic.train_step(batch, blocking=False)
        if global_step >= self.pipeline_config.critic_warmup:
            actor_result = self.actor_train.train_step(batch)
            self.metrics.update(actor_result.meta_info["metrics"])
        if critic_update:
            critic_result = critic_update.get()
            self.metrics.update(critic_result.meta_info["metrics"])

    def _log(self, global_step: int, batch: DataProto) -> None:
        """Sends the metrics of a step to the trackers."""
        completed = global_step + 1
        metrics = {
            "training/global_step": float(completed),
            "system/samples": float(completed * self.pipeline_config.rollout_batch_size),
        }
        metrics |= compute_data_metrics(batch, use_critic=self.critic is not None)
        metrics |= values(self.metrics)
        self.tracker.log(metrics, step=completed)

    def _evaluate(self) -> None:
        """Validates if that is due after the completed steps."""
        result = self.result
        is_due = self.validates and self.steps.due(self.pipeline_config.eval_steps)
        if not is_due:
            return
        result.after = self.validate(result)
        # the first validation is the one before training
        if not result.before:
            result.before = result.after
        self.tracker.log(result.after, step=self.steps.global_step)


trainer_class = RollLoop
