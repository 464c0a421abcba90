"""The critic's worker, with a training engine whose network computes the expected return at each token.

Its methods take and return `DataProto`. The network is in `policy/value_head.py`, the loss in `losses.py`.
"""

from dataclasses import replace

import torch

from verl_lite.config import NetworkConfig, PPOConfig
from verl_lite.core_algos import LossResult
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Dispatch, register
from workers.losses import critic_loss
from workers.policy.loading import token_network
from workers.policy.value_head import value_head
from workers.roles.training_worker import COMPUTE_METRIC, COMPUTE_PROTO, TrainingWorker


class CriticWorker(TrainingWorker):
    """Computes values and trains the critic."""

    config: PPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine."""
        config = self.config
        network = token_network(
            critic_network(config),
            value_head,
            config.sequence_parallel_size("critic"),
            # written to the critic's checkpoints, which have a tokenizer as the policy's have
            chat_template=config.data.chat_template,
        )
        self.build_engine(network, config.critic.fsdp_config, config.critic.optim)

    @register(dispatch_mode=COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """Computes values (n, R) of the states before the policy's tokens in a planned batch, 0 at other tokens."""
        self.phases.enter(self.engine)
        outputs = self.engine.infer(data)
        return DataProto.from_dict(tensors={"values": outputs["values"]})

    @register(dispatch_mode=COMPUTE_METRIC)
    def update_critic(self, data: DataProto) -> DataProto:
        """Trains on a planned batch, one optimizer step per mini-batch and epoch. Returns metrics in meta_info."""
        self.phases.enter(self.engine)
        metrics = self.engine.train(data, self.loss_func)
        prefixed = {f"critic/{name}": metric for name, metric in metrics.items()}
        return DataProto(meta_info={"metrics": prefixed})

    def loss_func(self, data: DataProto, output_tensor: dict[str, torch.Tensor]) -> LossResult:
        """Computes (loss, metrics) of a micro-batch; see `workers.losses.critic_loss`."""
        return critic_loss(data, output_tensor, self.config.critic, self.config.actor)


def critic_network(config: PPOConfig) -> NetworkConfig:
    """Returns `critic.model`. If its path is null, fills in the policy's path and the policy's override_config."""
    network = config.critic.model
    policy = config.model
    if network.path is not None:
        return network
    return replace(
        network,
        path=policy.path,
        # the user trusts the code in the policy's folder, which is the critic's folder here
        trust_remote_code=network.trust_remote_code or policy.trust_remote_code,
        override_config=policy.override_config | network.override_config,
    )
