"""Base class of the workers that have a rollout engine: construction of the engine and of the runner of its samples.

The runner depends on the kind of samples of the run (`workers.rollout.specs`): answers, episodes in environments, or
episodes of a program. Environments and programs run in child processes of the first rank of each engine.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl_lite.config import PPOConfig
from verl_lite.envs import env_templates
from verl_lite.machine.device import compute_dtype
from verl_lite.protocol import DataProto
from verl_lite.rewards import RewardItem
from verl_lite.single_controller.decorator import Dispatch, register
from verl_lite.single_controller.resource_pool import ServiceHandle
from verl_lite.single_controller.worker import Worker
from workers.agents.conversation import ChatJoins
from workers.agents.endpoint.callers import Callers
from workers.agents.endpoint.trace import Trace
from workers.agents.env_pool import EnvPool
from workers.agents.episodes import EpisodeRunner, TokenLimits, Trajectory
from workers.agents.program_host import episodes_per_process, is_command, program_pool
from workers.agents.trajectories import trajectory_rows
from workers.engines.base import RolloutEngine, SamplingParams, build_rollout_engine
from workers.policy.loading import rollout_overrides
from workers.policy.tokenizer import stop_token_ids
from workers.pool.process_pool import ProcessPool
from workers.rollout.answers import AnswerRunner
from workers.rollout.group_run import GroupRun, SampleRunner
from workers.rollout.runner import Runner, group_of_engine


class SamplingWorker(Worker):
    """A worker with a rollout engine. The subclass sets all attributes except those that `build_rollout` sets.

    Attributes:
        rewards: Handle of the reward pool, to which finished samples are sent while others are still being generated;
            None if no reward function is called.
        engine_index: Number that distinguishes this worker from the others with an engine.
        num_engines: Number of engines of the run.
        env_modules: Modules that the environments' processes import because they register environments
            (`verl_lite.envs.env_modules()`).
        log_dir: Folder for the logs of environments and programs; None discards them.
    """

    config: PPOConfig
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    rewards: ServiceHandle | None
    engine_index: int
    num_engines: int
    env_modules: tuple[str, ...]
    log_dir: str | None
    # set by `build_rollout`
    rollout: RolloutEngine
    groups: GroupRun
    max_model_len: int

    def build_rollout(self) -> None:
        """Builds the engine with the remaining memory of the device, and the runner of its groups. Collective among the
        ranks of an engine."""
        config = self.config
        model = config.model
        assert model.path is not None
        self.max_model_len = config.rollout.max_model_len or config.longest_sample
        self.rollout = build_rollout_engine(
            config.rollout.name,
            model.path,
            config.rollout,
            max_model_len=self.max_model_len,
            device=self.device,
            dtype=compute_dtype(config.rollout.dtype, self.device),
            seed=config.trainer.seed,
            override_config=rollout_overrides(model),
            trust_remote_code=model.trust_remote_code,
        )
        # samples continue under newer weights, or end when enough groups are complete
        interrupts = config.spans_updates or config.rollout.oversample > 1
        tensor_parallel = config.rollout.tensor_model_parallel_size
        self.runner: Runner[Any] = Runner(self.rollout, group_of_engine(tensor_parallel), interrupts)
        self.groups = GroupRun(self.sample_runner())

    def sample_runner(self) -> SampleRunner:
        """Returns the runner of the run's kind of samples. Starts the processes of environments or programs."""
        # ranks that repeat the calls of their engine's first rank run no samples of their own
        if not (self.config.is_agentic and self.runner.leads):
            return self.answer_runner()
        if self.config.agentic.has_program:
            return self._program_runner()
        return self._episode_runner()

    def answer_runner(self) -> AnswerRunner:
        """Returns a runner of answers, whose rewards the pool computes meanwhile."""
        return AnswerRunner(
            self.runner,
            response_length=self.config.data.max_response_length,
            pad_token_id=self.tokenizer.pad_token_id,
            stop_token_ids=stop_token_ids(self.config.model, self.tokenizer),
            on_finished=self._send_rewards,
        )

    def _send_rewards(self, finished: list[tuple[RewardItem, list[int]]]) -> None:
        """Sends finished answers to the reward pool, as texts without special tokens."""
        if not self.rewards:
            return
        items = []
        for item, token_ids in finished:
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
            items.append(replace(item, solution_str=str(text)))
        self.rewards.send("submit", items)

    def _episode_runner(self) -> EpisodeRunner:
        """Starts the processes of the environments and returns the runner of their episodes."""
        agentic = self.config.agentic
        templates = env_templates(agentic.custom_envs)
        log_folder = self._log_folder("environments")
        pool = EnvPool(agentic.env_pool, templates, modules=self.env_modules, log_dir=log_folder)
        pool.start()

        # one limit for training and validation, which allows all episodes of the larger one
        managers = {"train": agentic.train_env_manager, "val": agentic.val_env_manager}
        num_episodes = []
        for manager in managers.values():
            if manager.tags:
                groups_per_engine = math.ceil(manager.num_env_groups / self.num_engines)
                episodes_per_group = manager.group_size + manager.group_size_redundancy
                num_episodes.append(groups_per_engine * episodes_per_group)
        format_penalty = {purpose: manager.format_penalty for purpose, manager in managers.items()}

        return EpisodeRunner(
            self.runner,
            pool,
            self.tokenizer,
            templates,
            self._token_limits,
            seed=self.config.trainer.seed,
            stop_token_ids=stop_token_ids(self.config.model, self.tokenizer),
            chat_template_kwargs=self.config.data.apply_chat_template_kwargs,
            format_penalty=format_penalty,
            max_live=max(num_episodes),
            rows=self._rows_of_episodes,
        )

    def _program_runner(self) -> SampleRunner:
        """Starts the endpoint and the processes of the programs, and returns the runner of their episodes."""
        # here and not above: aiohttp takes a second, which other runs skip
        from workers.agents.endpoint.server import Endpoint
        from workers.agents.programs import ProgramRunner

        config = self.config
        agentic = config.agentic
        rollout = config.rollout
        # a copy: the server's thread uses it while this thread uses the other one
        tokenizer = copy.deepcopy(self.tokenizer)
        template_kwargs = config.data.apply_chat_template_kwargs
        joins = ChatJoins(tokenizer, template_kwargs, most_tokens=self._token_limits.max_model_len)
        all_stop_tokens = {*stop_token_ids(config.model, self.tokenizer), *joins.ends_of_turn}
        stop_ids = sorted(all_stop_tokens)

        log_folder = self._log_folder("programs")
        # the pool needs the runner, and the runner the pool: the lambda reads the name only after it is set below
        spec = program_pool(agentic, log_folder, on_repeat=lambda number: runner.repeat(number))
        programs = ProcessPool(spec)
        port = agentic.endpoint.port
        # 0 is any free port; otherwise each engine has a port of its own
        if port:
            port += self.engine_index
        training = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)
        model_name = Path(str(config.model.path)).name
        endpoint = Endpoint(agentic.endpoint, port, model_name, programs.wake, training)
        # commands run as one user, and each can read the keys of the others
        if agentic.program is not None and is_command(agentic.program):
            endpoint.callers = Callers(lambda: programs.pids)

        runner = ProgramRunner(
            self.runner,
            endpoint,
            programs,
            new_trace=lambda: Trace(joins, tokenizer, self._token_limits, stop_ids),
            stop_token_ids=stop_ids,
            rewards=self.rewards,
            engine=self.engine_index,
            seed=config.trainer.seed,
            max_live=agentic.env_pool.num_workers * episodes_per_process(agentic),
            rows=self._rows_of_episodes,
        )
        return runner

    @property
    def _token_limits(self) -> TokenLimits:
        data = self.config.data
        return TokenLimits(data.max_prompt_length, data.max_response_length, self.max_model_len)

    def _log_folder(self, name: str) -> str | None:
        """Returns the folder of the logs of this engine's environments or programs."""
        if self.log_dir is None:
            return None
        return str(Path(self.log_dir) / f"{name}-{self.engine_index}")

    def _rows_of_episodes(self, trajectories: Sequence[Trajectory]) -> DataProto:
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
        """Ends environments or programs, closes the rollout engine and releases its resources."""
        # first the processes that send requests to the engine
        self.groups.close()
        self.rollout.close()
