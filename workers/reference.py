"""The frozen reference model: its log-probs are what KL terms compare the policy with.

A policy that is trained as an adapter needs no such worker: with the adapter switched off it is the reference itself.
"""

from verl_lite.config import PPOConfig
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Dispatch, register
from workers.engine.fsdp import FSDPEngine
from workers.policy.causal_lm import causal_lm
from workers.policy.loading import token_network
from workers.training_worker import EngineWorker


class ReferenceWorker(EngineWorker):
    """Holds the initial policy and never changes it."""

    config: PPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the forward-only engine."""
        network = token_network(self.config.model, causal_lm(self.config.actor.log_prob_chunk_tokens))
        self.build_engine(network, self.config.ref.fsdp_config)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """ref_log_prob (n, R) of a planned batch; meta_info temperature."""
        self.phases.enter(self.engine)
        return ref_log_prob(self.engine, data)


def ref_log_prob(engine: FSDPEngine, data: DataProto) -> DataProto:
    """ref_log_prob (n, R) of a planned batch by an engine that is the reference now; meta_info temperature."""
    outputs = engine.infer(data, temperature=data.meta_info["temperature"], calculate_entropy=False)
    return DataProto.from_dict(tensors={"ref_log_prob": outputs["log_probs"]})
