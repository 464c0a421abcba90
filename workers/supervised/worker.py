"""The worker of a training without a rollout, which supervised fine-tuning, DPO and reward models share."""

from __future__ import annotations

from collections.abc import Collection

from verl_lite.config import SFTConfig, SupervisedConfig
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Dispatch, register
from workers.agents.conversation import end_of_turn
from workers.engine.network import NetworkBuilder
from workers.engine.phase import PhaseManager
from workers.engine.update import LossFunction
from workers.policy.loading import PolicyBuilder, token_network
from workers.policy.tokenizer import load_tokenizer
from workers.roles.training_worker import COMPUTE_METRIC, TrainingWorker


class SupervisedWorker(TrainingWorker):
    """The training engine of one rank. A subclass chooses the policy, the options of its forward pass, and the loss.

    Args:
        config: configuration of the run.
        total_training_steps: number of steps, for the schedule of the learning rate.
        build_policy: builds the network with its outputs.
        loss: the loss of a micro-batch.
        options: options of the policy's forward pass.
    """

    config: SupervisedConfig

    def __init__(
        self,
        config: SupervisedConfig,
        total_training_steps: int,
        build_policy: PolicyBuilder,
        loss: LossFunction,
        **options: float | bool,
    ) -> None:
        super().__init__(config, total_training_steps)
        self.build_policy = build_policy
        self.loss = loss
        self.options = options
        # not shared: the worker may train in the process of another run, before that run starts
        self.phases = PhaseManager()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine."""
        self.build_engine(self.network(), self.config.fsdp_config, self.config.optim)

    def network(self) -> NetworkBuilder:
        """Returns the builder of the network."""
        config = self.config
        return token_network(
            config.model,
            self.build_policy,
            config.ulysses_sequence_parallel_size,
            chat_template=config.data.chat_template,
            answer_ends=self.answer_ends,
        )

    def answer_ends(self) -> Collection[int]:
        """Returns the tokens with which the network learns to end its answers; none for a network without answers."""
        return ()

    @register(dispatch_mode=COMPUTE_METRIC)
    def train(self, data: DataProto) -> DataProto:
        """Takes one optimizer step on a planned batch. Returns metrics in meta_info, among them `loss`."""
        rows = self.rows(data)
        self.phases.enter(self.engine)
        metrics = self.engine.train(rows, self.loss, **self.options)
        return DataProto(meta_info={"metrics": metrics | self.memory_metrics("perf/")})

    @register(dispatch_mode=COMPUTE_METRIC)
    def measure(self, data: DataProto) -> DataProto:
        """Returns the loss metrics of `train` for a planned batch, without training."""
        rows = self.rows(data)
        self.phases.enter(self.engine)
        outputs = self.engine.infer(rows, **self.options)
        # the loss divides by it, but only the metrics are used, which count their own rows
        rows.meta_info["num_tokens"] = 1
        _, metrics = self.loss(rows, outputs)
        return DataProto(meta_info={"metrics": metrics})

    def rows(self, data: DataProto) -> DataProto:
        """Returns a planned batch in the form that policy and loss read. The engine may be off the device."""
        return data


def learnt_ends(config: SFTConfig) -> Collection[int]:
    """Returns the token with which the chat template of a run ends answers, or none without such a token."""
    tokenizer = load_tokenizer(config.model, config.data.chat_template)
    end = end_of_turn(tokenizer, config.data.apply_chat_template_kwargs)
    return () if end is None else (end,)
