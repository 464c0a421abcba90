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
        config = self.pipeline_config
        frequency = config.actor_train.model_update_frequency
        self.set_model_update_pair(src_cluster=self.actor_train, tgt_cluster=self.actor_infer, frequency=frequency)
        self.resume()
        for global_step in range(self.steps.global_step, config.max_steps):
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
        batch = self.train_rollout_scheduler.get_batch(DataProto(meta_info={"global_step": global_step}), size)
        self.metrics.update(batch.meta_info.pop("metrics"))
        self.train_rollout_scheduler.begin_ahead(batch, size)  # with async_training.batches_ahead
        return self.score(batch)  # also counts and masks failed episodes

    def _add_model_outputs(self, batch: DataProto) -> DataProto:
        """Adds the actor's log-probs, the critic's values and the reference's log-probs."""
        old_log_probs = None
        if "old_log_probs" not in batch:  # present with algorithm.rollout_correction.bypass_mode
            old_log_probs = self.actor_train.compute_log_probs(batch, blocking=False)
        if self.critic:
            batch.union(self.critic.compute_values(batch, blocking=False).get())
        if self.reference:
            batch.union(self.reference.compute_log_probs(batch))
        if old_log_probs is None:
            return batch
        return self.compare_rollout(batch.union(old_log_probs.get()))

    def _train(self, global_step: int, batch: DataProto) -> None:
        """Trains the critic and the actor at the same time; the actor from step `critic_warmup` on."""
        critic = None
        if self.critic:
            critic = self.critic.train_step(batch, blocking=False)
        if global_step >= self.pipeline_config.critic_warmup:
            self.metrics.update(self.actor_train.train_step(batch).meta_info["metrics"])
        if critic:
            self.metrics.update(critic.get().meta_info["metrics"])

    def _log(self, global_step: int, batch: DataProto) -> None:
        completed = global_step + 1
        metrics = {
            "training/global_step": float(completed),
            "system/samples": float(completed * self.pipeline_config.rollout_batch_size),
        }
        metrics |= compute_data_metrics(batch, use_critic=self.critic is not None)
        metrics |= values(self.metrics)
        self.tracker.log(metrics, step=completed)

    def _evaluate(self) -> None:
        if not self.validates or not self.steps.due(self.pipeline_config.eval_steps):
            return
        self.result.after = self.validate(self.result)
        self.result.before = self.result.before or self.result.after
        self.tracker.log(self.result.after, step=self.steps.global_step)


trainer_class = RollLoop
