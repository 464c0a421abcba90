"""The frozen reference model: its log-probs are what KL terms compare the policy with.

A policy that is trained as an adapter needs no such worker: with the adapter switched off it is the reference itself.
"""

from __future__ import annotations

from verl_lite.config import PPOConfig
from verl_lite.device import dist_backend, get_device
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Dispatch, register
from verl_lite.single_controller.worker import Worker
from workers.engine.fsdp import FSDPEngine
from workers.phase import Phase, process_phases
from workers.policy.causal_lm import causal_lm
from workers.policy.loading import token_network


class ReferenceWorker(Worker):
    """Holds the initial policy and never changes it."""

    def __init__(self, config: PPOConfig) -> None:
        super().__init__()
        self.config = config
        self.phases = process_phases()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the forward-only engine."""
        device = get_device(self.config.trainer.device)
        self.init_process_group(dist_backend(device))
        self.engine = FSDPEngine(
            token_network(self.config.model, causal_lm(self.config.actor.log_prob_chunk_tokens)),
            self.config.ref.fsdp_config,
            None,
            device=device,
            total_training_steps=0,
            seed=self.config.trainer.seed,
            forward_only=True,
        )
        self.phases.add(self.engine)
        self.engine.move_out()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """ref_log_prob (n, R) of a planned batch; meta_info temperature."""
        self.phases.enter(Phase.TRAIN, self.engine)
        return ref_log_prob(self.engine, data)


def ref_log_prob(engine: FSDPEngine, data: DataProto) -> DataProto:
    """ref_log_prob (n, R) of a planned batch by an engine that is the reference now; meta_info temperature."""
    outputs = engine.infer(data, temperature=data.meta_info["temperature"], calculate_entropy=False)
    return DataProto.from_dict(tensors={"ref_log_prob": outputs["log_probs"]})
