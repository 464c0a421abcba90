"""The worker of policy gradients on denoising steps: it samples paths and learns from those that were judged better.

Losses, metrics, optimizer steps and checkpoints are those of language models (`workers.losses`, `workers.update`,
`workers.engine`): the batch has columns (B, T) with T denoising steps, and response_mask is 1 on all of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Dispatch, register
from workers.diffusion.sde_policy import load_network, network_weights, sde_policy
from workers.losses import actor_loss
from workers.phase import Phase
from workers.training_worker import TrainingWorker


class FlowActorWorker(TrainingWorker):
    """One rank of the policy. The engine that learns is the one that samples, so nothing is ever out of date."""

    config: FlowGRPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine."""
        self.build_engine(sde_policy(self.config), self.config.actor.fsdp_config, self.config.actor.optim)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, data: DataProto) -> DataProto:
        """One sample for each row of a planned batch: frames (B, F, 3, H, W) in [0, 1] and, with noise on the way,
        latents (B, T + 1, ...) and old_log_probs (B, T).

        Reads prompt, first_seed, path_seed; meta_info steps and noise_level.
        """
        self.phases.enter(Phase.ROLLOUT, self.engine)
        outputs = self.engine.infer(data, steps=data.meta_info["steps"], noise_level=data.meta_info["noise_level"])
        if "log_probs" in outputs:
            outputs["old_log_probs"] = outputs.pop("log_probs")
        return DataProto.from_dict(tensors=outputs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, data: DataProto) -> DataProto:
        """Trains on a planned batch of paths, one optimizer step per mini-batch. Gives actor/* metrics in meta_info.

        Reads what `generate` read and latents, response_mask, advantages; old_log_probs where there are several
        optimizer steps.
        """
        self.phases.enter(Phase.TRAIN, self.engine)
        metrics = self.engine.train(
            data,
            self.loss_func,
            epochs=self.config.actor.ppo_epochs,
            steps=self.config.sampler.num_train_steps,
            noise_level=self.config.sampler.noise_level,
            with_kl=self.config.actor.use_kl_loss,
        )
        return DataProto(meta_info={"metrics": {f"actor/{name}": metric for name, metric in metrics.items()}})

    def loss_func(self, data: DataProto, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The loss of language models, over steps: see `workers.losses.actor_loss`."""
        return actor_loss(data, outputs, self.config.actor)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, path: str) -> None:
        """Writes the network of now, an adapter merged into it, by its own save_pretrained into the folder `path`."""
        weights = network_weights(self.engine)
        if dist.get_rank() == 0:
            network = load_network(self.config.model)
            network.load_state_dict({name: value.cpu() for name, value in weights.items()})
            network.save_pretrained(path)  # type: ignore[operator]
        dist.barrier()
