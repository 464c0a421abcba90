"""Trains agents that act in environments: `RayPPOTrainer` with batches of episodes.

`trainer.rollout_scheduler` chooses the episodes of a batch, and the ranks run them (`workers.agent_rollout`). All other
stages (log-probs, values, advantages, updates, checkpoints) are those of `RayPPOTrainer`.
"""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.advantage import ScalarMetrics
from trainer.agentic.agentic_advantage import OF_EPISODES, compute_response_level_rewards
from trainer.agentic.episode_log import readable, samples_of
from trainer.agentic.episode_metrics import compute_data_metrics, validation_metrics
from trainer.evaluate.chunks import val_samplings
from trainer.final_report import FitResult
from trainer.ray_trainer import RayPPOTrainer, training_sampling
from trainer.rewards.failures import Failures
from trainer.roles import ActorRole, AgentRole, Metrics
from trainer.rollout_scheduler import RolloutScheduler
from trainer.steps import EpisodeSteps
from verl_lite.config import PPOConfig
from verl_lite.config.spellings import ppo_keys
from verl_lite.envs.base import env_modules, env_templates
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from workers.envs.env_pool import EnvPool
from workers.rollout.conversation import ChatJoins
from workers.rollout.group_run import EpisodeCounts

EPISODES_SHOWN = 2


class EnvironmentFailure(RuntimeError):
    """Too many episodes failed. Carries the first failure of the batch."""


class EpisodeRewards:
    """Counts failed episodes in the reward stage, because the rows of episodes already contain their rewards. Writes
    the failures to env_failures.jsonl in `run_dir`.

    show: receives the text of the first failure of the run.
    """

    def __init__(self, max_error_rate: float, run_dir: Path, show: Callable[[str], None] = print) -> None:
        path, option = run_dir / "env_failures.jsonl", "agentic.env_pool.max_error_rate"
        self._failures = Failures("episode", option, max_error_rate, EnvironmentFailure, path, show)

    def score(self, batch: DataProto) -> DataProto:
        """Returns the metrics env/error_rate and env/timeout_rate of meta_info `episodes`.

        Raises EnvironmentFailure if more than `max_error_rate` of the episodes failed; see `Failures.note`.
        """
        counts: EpisodeCounts = batch.meta_info["episodes"]
        row = {name: getattr(counts, name) for name in ("failed", "timeouts", "episodes", "first_failure")}
        self._failures.note(counts.failed, counts.episodes, [row], counts.first_failure)
        metrics = {
            "env/error_rate": Metric.mean(counts.failed, counts.episodes),
            "env/timeout_rate": Metric.mean(counts.timeouts, counts.episodes),
        }
        return DataProto(meta_info={"metrics": metrics})


BasePipeline = RayPPOTrainer  # ROLL's name


class AgenticPipeline(BasePipeline):
    """Trains an agent in environments.

    train_rollout_scheduler, val_rollout_scheduler: choose the episodes; the latter is None without validation.

    For custom loops (recipes/agentic_frozen_lake/roll_loop.py), the attributes have ROLL's names: pipeline_config;
    actor_train and actor_infer, one worker with two engines; reference and critic, None if not configured; running;
    tracker.
    """

    def __init__(
        self,
        config: PPOConfig,
        *,
        train_rollout_scheduler: RolloutScheduler,
        val_rollout_scheduler: RolloutScheduler | None,
        **parts: Any,
    ) -> None:
        super().__init__(config, val_data=None, **parts)
        self.train_rollout_scheduler = train_rollout_scheduler
        self.val_rollout_scheduler = val_rollout_scheduler
        self.engine_version: int | None = None  # step after which the rollout engines received their weights
        self.pipeline_config: Any = RollConfig(config)
        self.actor_train = self.actor_infer = self.actor
        self.reference, self.running, self.tracker = self.ref, self.running_moments, self.tracking
        self.set_model_update_pair(self.actor_train, self.actor_infer, config.agentic.model_update_frequency)

    # -------------------------------------------------------------------------------------------------- the stages

    def sample(self, prompts: DataProto) -> DataProto:
        """Returns the episodes of this step. With agentic.async_generation_ratio, starts those of later steps."""
        scheduler, size = self.train_rollout_scheduler, self.config.agentic.rollout_batch_size
        batch = scheduler.get_batch(prompts, size)
        if scheduler.ratio and not self.steps.is_last:
            with self.timed("update_weights"):
                self.metrics |= self._give_weights(self.steps.global_step - 1)
            scheduler.begin_ahead(prompts, size)
        return batch

    def set_model_update_pair(self, src_cluster: ActorRole, tgt_cluster: ActorRole, frequency: int = 1) -> None:
        """Sets the number of steps between weight updates from actor_train to actor_infer."""
        if src_cluster is not self.actor_train or tgt_cluster is not self.actor_infer or frequency < 1:
            raise ValueError(
                f"set_model_update_pair: found {src_cluster=}, {tgt_cluster=}, {frequency=}; expected actor_train, "
                "actor_infer (two engines of one worker) and at least 1"
            )
        self.model_update_frequency = frequency

    def model_update(self, global_step: int | None = None) -> Metrics:
        """Copies the trained weights to the rollout engines every agentic.model_update_frequency steps. If episodes
        of later steps run ahead, `sample` does this instead, after the episodes of its step have ended.

        global_step: number of trained steps, for loops that start each step with this call. Running episodes are
        finished first.
        """
        if global_step is not None:
            return self._give_weights(global_step)
        if self.train_rollout_scheduler.ratio and self.engine_version is not None:
            return {}
        return self._give_weights(self.steps.global_step)

    def _give_weights(self, version: int, must: bool = False) -> Metrics:
        """Copies the weights. version: last step of their training. must: True to ignore the frequency."""
        is_due = must or self.engine_version is None or version % self.model_update_frequency == 0
        if version == self.engine_version or not is_due:
            return {}
        self.train_rollout_scheduler.finish()
        self.engine_version = version
        return self.actor.update_weights(version=version)

    def normalize_rewards(self, batch: DataProto) -> tuple[DataProto, ScalarMetrics]:
        """Adds response_level_rewards, computed from the rewards of episodes and their steps."""
        estimator = self.config.algorithm.adv_estimator
        batch, metrics = compute_response_level_rewards(batch, self.config.agentic, estimator)
        batch, more = super().normalize_rewards(batch)
        return batch, metrics | more

    @property
    def token_estimator(self) -> str:
        """REINFORCE for GiGPO and step_reinforce, whose part above tokens `normalize_rewards` has already computed."""
        chosen = self.config.algorithm.adv_estimator
        return "reinforce" if chosen in OF_EPISODES else chosen

    def do_checkpoint(self, global_step: int) -> None:
        """Ends a step of a custom loop, counted from 0: writes a checkpoint if one is due."""
        self.steps.global_step = global_step + 1
        if self.saver.is_due(self.steps):
            self.save()

    def run(self) -> FitResult:
        """`fit` under ROLL's name."""
        return self.fit()

    # -------------------------------------------------------------------------------------------------- validation

    @property
    def validates(self) -> bool:
        """True if there are environments for validation."""
        return self.val_rollout_scheduler is not None

    def validate(self, result: FitResult) -> dict[str, float]:
        """Runs the validation episodes with the newest weights, and stores some samples in `result`."""
        scheduler, metrics = self.val_rollout_scheduler, dict[str, float]()
        assert scheduler is not None
        self._give_weights(self.steps.global_step, must=True)
        for sampling in val_samplings(self.config):
            prefix = sampling.prefix
            scheduler.sampling = sampling.params
            data = DataProto(meta_info={"global_step": self.steps.global_step})
            batch = scheduler.get_batch(data, self.config.agentic.val_batch_size)
            self.rewards.score(batch)
            counts: EpisodeCounts = batch.meta_info["episodes"]
            metrics |= {f"val/{prefix}env/error_rate": counts.failed / max(1, counts.episodes)}
            metrics |= validation_metrics(batch, prefix)
            episodes = samples_of(batch, self.steps.global_step)
            self.samples.write_validation(episodes, self.steps.global_step, prefix.strip("/"))
            if not prefix:
                result.samples = episodes[: self.config.trainer.log_val_generations]
                self.tracking.log_samples(result.samples, step=self.steps.global_step)
        return metrics

    # --------------------------------------------------------------------------------------------- logging, the end

    def data_metrics(self, batch: DataProto) -> dict[str, float]:
        """Returns the metrics of the training batch, by row and by episode."""
        return {
            **compute_data_metrics(batch, use_critic=self.critic is not None),
            "system/samples": float(self.steps.global_step * self.config.agentic.rollout_batch_size),
            "system/tps": int(batch.batch["attention_mask"].sum()) / self.timing["step"],
        }

    def keep_samples(self, batch: DataProto) -> None:
        """Writes the episodes of this step to files and, every logging_steps steps, some of them to the log."""
        step, every = self.steps.global_step, self.config.agentic.logging_steps
        episodes = samples_of(batch, step)
        self.samples.write_training(episodes, step)
        if every and step % every == 0:
            for episode in episodes[:EPISODES_SHOWN]:
                self.tracking.show(readable(episode))


class RollConfig:
    """The options under ROLL's names, such as `pipeline_config.actor_train.model_update_frequency`, and under our own.
    Options whose values differ in ROLL are not included."""

    def __init__(self, config: PPOConfig, section: str = "") -> None:
        self._config, self._section = config, section

    def __getattr__(self, name: str) -> Any:
        key = f"{self._section}{name}"
        renamed = {known: of.renamed for known, of in ppo_keys().entries.items() if of.renamed and not of.values}
        if any(known.startswith(f"{key}.") for known in renamed):
            return RollConfig(self._config, f"{key}.")
        return attrgetter(renamed.get(key, key))(self._config)


# -------------------------------------------------------------------------------------------------------- construction


def try_environments(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Creates, resets and steps every used environment, and tests the chat template on two turns. Raises UserError
    with tag, key and remedy."""
    agentic, templates = config.agentic, env_templates(config.agentic.custom_envs)
    has_system = any(template.agent_system_template for template in templates.values())
    ChatJoins(tokenizer, config.data.apply_chat_template_kwargs, system=has_system)
    used = dict.fromkeys([*agentic.train_env_manager.tags, *agentic.val_env_manager.tags])
    pool = EnvPool(agentic.env_pool, templates, modules=env_modules())
    try:
        pool.dry_run(list(used))
    finally:
        pool.close()


def episode_parts(config: PPOConfig, agent: AgentRole, run_dir: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Returns the arguments of `AgenticPipeline` that define the episodes and count their failures."""
    agentic = config.agentic
    train = RolloutScheduler(config, agentic.train_env_manager, agent, training_sampling(config))
    val = None
    if config.validates:
        val = RolloutScheduler(config, agentic.val_env_manager, agent, val_samplings(config)[0].params, purpose="val")
    return {
        "rewards": EpisodeRewards(agentic.env_pool.max_error_rate, run_dir, tell),
        "steps": EpisodeSteps(config, train),
        "train_rollout_scheduler": train,
        "val_rollout_scheduler": val,
    }
