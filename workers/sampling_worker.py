"""Base class of the workers that have a rollout engine: construction of the engine and of the runner of its samples."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl_lite.config import PPOConfig
from verl_lite.device import compute_dtype
from verl_lite.single_controller.decorator import Dispatch, register
from verl_lite.single_controller.worker import Worker
from workers.policy.loading import rollout_overrides
from workers.policy.tokenizer import stop_token_ids
from workers.rewards.reward_pool import RewardItem
from workers.rollout.answers import AnswerRunner
from workers.rollout.base import RolloutEngine, build_rollout_engine
from workers.rollout.group_run import GroupRun, SampleRunner
from workers.rollout.runner import Runner, group_of_engine


class SamplingWorker(Worker):
    """A worker with a rollout engine. The subclass sets all attributes except those that `build_rollout` sets.

    rewards: handle of the reward pool, to which finished samples are sent while others are still being generated;
        None = no reward function is called.
    engine_index: number that distinguishes this worker from the others with an engine.
    num_engines: number of engines of the run.
    """

    config: PPOConfig
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    rewards: Any
    engine_index: int
    num_engines: int
    rollout: RolloutEngine

    def build_rollout(self) -> None:
        """Builds the engine with the remaining memory of the device, and sets rollout, runner and groups. Collective
        among the ranks of an engine."""
        config, model = self.config, self.config.model
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
        interrupts = config.spans_updates or config.rollout.oversample > 1
        tensor_parallel = config.rollout.tensor_model_parallel_size
        self.runner: Runner[Any] = Runner(self.rollout, group_of_engine(tensor_parallel), interrupts)
        self.groups = GroupRun(self.sample_runner())

    def sample_runner(self) -> SampleRunner:
        """Returns the runner of this worker's kind of samples: answers, whose rewards the pool computes meanwhile."""
        return AnswerRunner(
            self.runner,
            response_length=self.config.data.max_response_length,
            pad_token_id=self.tokenizer.pad_token_id,
            stop_token_ids=stop_token_ids(self.config.model, self.tokenizer),
            on_finished=self._send_rewards,
        )

    def _send_rewards(self, finished: list[tuple[RewardItem, list[int]]]) -> None:
        """Sends finished answers to the reward pool."""
        if self.rewards:
            decode = partial(self.tokenizer.decode, skip_special_tokens=True)
            self.rewards.send("submit", [replace(item, solution_str=str(decode(ids))) for item, ids in finished])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Closes the rollout engine and releases its resources."""
        self.rollout.close()
