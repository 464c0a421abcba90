"""The workers of agentic runs, whose samples are episodes in environments.

The environments run in child processes of the first rank of each rollout engine.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from verl_lite.config import PPOConfig
from verl_lite.envs import env_templates
from verl_lite.single_controller.decorator import Dispatch, register
from verl_lite.single_controller.resource_pool import ServiceHandle
from workers.actor_rollout import ActorWorker
from workers.envs.env_pool import EnvPool
from workers.policy.tokenizer import stop_token_ids
from workers.rollout.episodes import EpisodeRunner, TokenLimits
from workers.rollout.trajectories import trajectory_rows
from workers.rollout_worker import RolloutWorker
from workers.sampling_worker import SamplingWorker


class AgentSampling(SamplingWorker):
    """A worker with a rollout engine whose samples are episodes.

    modules: modules that the environments' processes import because they register environments
        (`verl_lite.envs.env_modules()`).
    log_dir: folder for the logs of the environments; None discards them.
    """

    modules: tuple[str, ...]
    log_dir: str | None

    def sample_runner(self) -> EpisodeRunner:
        """Starts the processes of the environments. Returns the runner of the episodes."""
        agentic, data = self.config.agentic, self.config.data
        templates = env_templates(agentic.custom_envs)
        log_dir = None if self.log_dir is None else str(Path(self.log_dir) / f"environments-{self.engine_index}")
        self.pool = EnvPool(agentic.env_pool, templates, modules=self.modules, log_dir=log_dir)
        if self.runner.leads:
            self.pool.start()
        managers = {"train": agentic.train_env_manager, "val": agentic.val_env_manager}
        return EpisodeRunner(
            self.runner,
            self.pool,
            self.tokenizer,
            templates,
            TokenLimits(data.max_prompt_length, data.max_response_length, self.max_model_len),
            seed=self.config.trainer.seed,
            stop_token_ids=stop_token_ids(self.config.model, self.tokenizer),
            chat_template_kwargs=data.apply_chat_template_kwargs,
            format_penalty={purpose: manager.format_penalty for purpose, manager in managers.items()},
            max_live=max(  # this engine's share of num_env_groups
                -(-manager.num_env_groups // self.num_engines) * (manager.group_size + manager.group_size_redundancy)
                for manager in managers.values()
                if manager.tags
            ),
            rows=partial(
                trajectory_rows,
                pad_token_id=self.tokenizer.pad_token_id,
                prompt_length=data.max_prompt_length,
                response_length=data.max_response_length,
                extra_outputs=self.rollout.extra_outputs,
            ),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Closes the environments and the rollout engine."""
        self.pool.close()
        super().close()


class AgentRolloutWorker(AgentSampling, ActorWorker):
    """Runs episodes with the policy and trains it. For `modules` and `log_dir` see `AgentSampling`."""

    def __init__(
        self, config: PPOConfig, total_training_steps: int, modules: Sequence[str] = (), log_dir: str | None = None
    ) -> None:
        super().__init__(config, total_training_steps, rewards=None)
        self.modules, self.log_dir = tuple(modules), log_dir


class AgentEngineWorker(AgentSampling, RolloutWorker):
    """Runs episodes with an engine in a separate pool. For `modules` and `log_dir` see `AgentSampling`, for the other
    arguments `RolloutWorker`."""

    def __init__(
        self,
        config: PPOConfig,
        groups_queue: ServiceHandle,
        engine: int,
        num_engines: int,
        modules: Sequence[str] = (),
        log_dir: str | None = None,
    ) -> None:
        super().__init__(config, None, groups_queue, engine, num_engines)
        self.modules, self.log_dir = tuple(modules), log_dir
