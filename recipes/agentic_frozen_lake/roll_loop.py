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
        config, scheduler, result = self.pipeline_config, self.train_rollout_scheduler, self.result
        frequency = config.actor_train.model_update_frequency
        self.set_model_update_pair(src_cluster=self.actor_train, tgt_cluster=self.actor_infer, frequency=frequency)
        self.resume()
        for global_step in range(self.steps.global_step, config.max_steps):
            metrics = self.metrics = self.model_update(global_step)
            self._evaluate()
            batch = scheduler.get_batch(DataProto(meta_info={"global_step": global_step}), config.rollout_batch_size)
            metrics.update(batch.meta_info.pop("metrics"))
            scheduler.begin_ahead(batch, config.rollout_batch_size)  # with async_training.batches_ahead
            batch = self.score(batch)  # also counts and masks failed episodes
            bypassed = "old_log_probs" in batch  # algorithm.rollout_correction.bypass_mode
            old_log_probs = None if bypassed else self.actor_train.compute_log_probs(batch, blocking=False)
            if self.critic:
                batch.union(self.critic.compute_values(batch, blocking=False).get())
            if self.reference:
                batch.union(self.reference.compute_log_probs(batch))
            batch = self.compare_rollout(batch.union(old_log_probs.get())) if old_log_probs else batch
            batch = self.estimate_advantages(batch)
            critic = self.critic.train_step(batch, blocking=False) if self.critic else None
            if global_step >= config.critic_warmup:
                metrics.update(self.actor_train.train_step(batch).meta_info["metrics"])
            metrics.update(critic.get().meta_info["metrics"] if critic else {})
            done = global_step + 1
            counts = {"training/global_step": float(done), "system/samples": float(done * config.rollout_batch_size)}
            shown = compute_data_metrics(batch, use_critic=bool(critic)) | values(metrics)
            self.tracker.log(counts | shown, step=done)
            self.do_checkpoint(global_step)
            self.keep_samples(batch)
            if self.steps.stopping:
                break
        self._evaluate()
        result.checkpoint, result.stopped = self.saver.newest, self.steps.stopping
        return result

    def _evaluate(self) -> None:
        if self.validates and self.steps.due(self.pipeline_config.eval_steps):
            self.result.after = self.validate(self.result)
            self.result.before = self.result.before or self.result.after
            self.tracker.log(self.result.after, step=self.steps.global_step)


trainer_class = RollLoop
