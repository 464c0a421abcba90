"""The workers of agentic runs, whose samples are episodes in environments or of programs.

Environments and programs run in child processes of the first rank of each rollout engine.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_lite.config import PPOConfig
from verl_lite.envs import env_templates
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Dispatch, register
from verl_lite.single_controller.resource_pool import ServiceHandle
from workers.actor_rollout import ActorWorker
from workers.endpoint.callers import Callers
from workers.endpoint.program_host import episodes_per_process, is_command, program_pool
from workers.endpoint.server import Endpoint
from workers.endpoint.trace import Trace
from workers.envs.env_pool import EnvPool
from workers.policy.tokenizer import stop_token_ids
from workers.pool.process_pool import ProcessPool
from workers.rollout.base import SamplingParams
from workers.rollout.conversation import ChatJoins
from workers.rollout.episodes import EpisodeRunner, TokenLimits, Trajectory
from workers.rollout.programs import ProgramRunner
from workers.rollout.trajectories import trajectory_rows
from workers.rollout_worker import RolloutWorker
from workers.sampling_worker import SamplingWorker


class AgentSampling(SamplingWorker):
    """A worker with a rollout engine whose samples are episodes.

    modules: modules that the environments' processes import because they register environments
        (`verl_lite.envs.env_modules()`).
    log_dir: folder for the logs of environments and programs; None discards them. parts: what `close` closes.
    """

    modules: tuple[str, ...]
    log_dir: str | None
    parts: list[Any]

    def sample_runner(self) -> EpisodeRunner | ProgramRunner:
        """Starts the processes of environments or programs. Returns the runner of the episodes."""
        return self._program_runner() if self.config.agentic.has_program else self._episode_runner()

    def _episode_runner(self) -> EpisodeRunner:
        agentic, data = self.config.agentic, self.config.data
        templates = env_templates(agentic.custom_envs)
        log_dir = None if self.log_dir is None else str(Path(self.log_dir) / f"environments-{self.engine_index}")
        pool = EnvPool(agentic.env_pool, templates, modules=self.modules, log_dir=log_dir)
        self.parts.append(pool)
        if self.runner.leads:
            pool.start()
        managers = {"train": agentic.train_env_manager, "val": agentic.val_env_manager}
        return EpisodeRunner(
            self.runner,
            pool,
            self.tokenizer,
            templates,
            self._limits,
            seed=self.config.trainer.seed,
            stop_token_ids=stop_token_ids(self.config.model, self.tokenizer),
            chat_template_kwargs=data.apply_chat_template_kwargs,
            format_penalty={purpose: manager.format_penalty for purpose, manager in managers.items()},
            max_live=max(  # this engine's share of num_env_groups
                -(-manager.num_env_groups // self.num_engines) * (manager.group_size + manager.group_size_redundancy)
                for manager in managers.values()
                if manager.tags
            ),
            rows=self._rows,
        )

    def _program_runner(self) -> ProgramRunner:
        """Starts the endpoint and the processes of the programs on the first rank of the engine."""
        config, data, limits = self.config.agentic, self.config.data, self._limits
        tokenizer = copy.deepcopy(self.tokenizer)  # the server's thread uses it
        joins = ChatJoins(tokenizer, data.apply_chat_template_kwargs, most_tokens=limits.max_model_len)
        stops = sorted({*stop_token_ids(self.config.model, self.tokenizer), *joins.ends_of_turn})
        endpoint = programs = None
        if self.runner.leads:
            log_dir = None if self.log_dir is None else str(Path(self.log_dir) / f"programs-{self.engine_index}")
            programs = ProcessPool(program_pool(config, log_dir, lambda number: runner.repeat(number)))
            port, name = config.endpoint.port, Path(str(self.config.model.path)).name
            rollout = self.config.rollout
            training = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)
            endpoint = Endpoint(config.endpoint, port and port + self.engine_index, name, programs.wake, training)
            if config.program is not None and is_command(config.program):
                endpoint.callers = Callers(lambda: programs.pids)
            self.parts += [endpoint, programs]
        runner = ProgramRunner(
            self.runner,
            endpoint,  # type: ignore[arg-type]  # other ranks run no episodes
            programs,  # type: ignore[arg-type]
            new_trace=lambda: Trace(joins, tokenizer, limits, stops),
            stop_token_ids=stops,
            rewards=self.rewards,
            engine=self.engine_index,
            seed=self.config.trainer.seed,
            max_live=config.env_pool.num_workers * episodes_per_process(config),
            rows=self._rows,
        )
        return runner

    @property
    def _limits(self) -> TokenLimits:
        data = self.config.data
        return TokenLimits(data.max_prompt_length, data.max_response_length, self.max_model_len)

    def _rows(self, trajectories: Sequence[Trajectory]) -> DataProto:
        data = self.config.data
        return trajectory_rows(
            trajectories,
            pad_token_id=self.tokenizer.pad_token_id,
            prompt_length=data.max_prompt_length,
            response_length=data.max_response_length,
            extra_outputs=self.rollout.extra_outputs,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Closes the environments or programs and the rollout engine."""
        for part in self.parts:
            part.close()
        super().close()


class AgentRolloutWorker(AgentSampling, ActorWorker):
    """Runs episodes with the policy and trains it. For `modules` and `log_dir` see `AgentSampling`. rewards: handle of
    the reward pool, for programs that return no score."""

    def __init__(
        self,
        config: PPOConfig,
        total_training_steps: int,
        modules: Sequence[str] = (),
        log_dir: str | None = None,
        rewards: ServiceHandle | None = None,
    ) -> None:
        super().__init__(config, total_training_steps, rewards)
        self.modules, self.log_dir, self.parts = tuple(modules), log_dir, []


class AgentEngineWorker(AgentSampling, RolloutWorker):
    """Runs episodes with an engine in a separate pool. For `modules`, `log_dir` and `rewards` see `AgentRolloutWorker`,
    for the other arguments `RolloutWorker`."""

    def __init__(
        self,
        config: PPOConfig,
        groups_queue: ServiceHandle,
        engine: int,
        num_engines: int,
        modules: Sequence[str] = (),
        log_dir: str | None = None,
        rewards: ServiceHandle | None = None,
    ) -> None:
        super().__init__(config, rewards, groups_queue, engine, num_engines)
        self.modules, self.log_dir, self.parts = tuple(modules), log_dir, []
