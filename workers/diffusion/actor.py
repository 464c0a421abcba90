"""The worker of reward flow: samples clips with the policy and trains its adapter through the score of their frames.

Takes and gives `DataProto`; the network is in `reward_policy.py`, its loss in `verl_lite.flow_match`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.device import device_memory
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Dispatch, register
from workers.diffusion.lora import write_lora
from workers.diffusion.reward_policy import reward_flow_network
from workers.engine.parameters import gather_full
from workers.phase import Phase
from workers.training_worker import TrainingWorker

EXPORT_BUCKET_BYTES = 256 << 20


class ActorWorker(TrainingWorker):
    """Samples and learns."""

    config: RewardFlowConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine and the frozen parts of the pipeline."""
        actor = self.config.actor
        self.build_engine(reward_flow_network(self.config), actor.fsdp_config, actor.optim)

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, clear_cache=False)
    def train_step(self, data: DataProto) -> DataProto:
        """One optimizer step on a planned batch. Gives metrics in meta_info; `last_frames` has what was sampled.

        Reads video (B, F, 3, H, W) in [0, 1], noise_seed, row (B,), prompt (B,). Metrics: actor/loss, which is what
        the step minimises; actor/face_score, the mean over the samples that count; actor/kl_loss, over all;
        actor/no_face_frac, the share of those that do not count; actor/grad_norm, actor/lr.
        """
        self.phases.enter(Phase.TRAIN, self.engine)
        self._frames: list[DataProto] = []
        metrics = self.engine.train(data, self._loss, epochs=1)
        result = {name if "/" in name else f"actor/{name}": metric for name, metric in metrics.items()}
        result |= {f"actor/perf/{name}": Metric.max(value) for name, value in device_memory(self.device).items()}
        return DataProto(meta_info={"metrics": result})

    def _loss(self, data: DataProto, output_tensor: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The loss of a micro-batch from the network's outputs, divided by the samples of the whole optimizer step.

        A sample that does not count has weight 0 there and stays in the divisor, which is known before sampling; so
        the gradient does not depend on how the batch was cut.
        """
        is_real, row = ~data.batch["is_padding"], data.batch["row"]
        frames = {"frames": output_tensor["frames"], "row": row, "face_score": output_tensor["face_score"].detach()}
        self._frames.append(DataProto.from_dict({name: value[is_real].cpu() for name, value in frames.items()}))
        loss = output_tensor["loss"].sum() / data.meta_info["num_tokens"]
        counts, scores, kl = (output_tensor[name].cpu() for name in ("counted", "face_score", "kl_loss"))
        loss, metrics = self.loss_func(data, loss, scores[counts > 0], kl[is_real])
        samples = int(is_real.sum())
        metrics["actor/no_face_frac"] = Metric.mean(samples - float(counts.sum()), samples)
        return loss, metrics

    def loss_func(
        self, data: DataProto, loss: torch.Tensor, face_score: torch.Tensor, kl_loss: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """ROLL's one loss entry: passes the loss of a micro-batch through, with its metrics.

        loss: scalar, this micro-batch's part of the step's loss. face_score: (n,) of the samples that count. kl_loss:
        (m,) of those that are no padding. Metrics: actor/loss, the sum of the parts; actor/face_score and
        actor/kl_loss, means.
        """
        return loss, {
            "actor/loss": Metric.sum(float(loss.detach())),
            "actor/face_score": Metric.mean(float(face_score.detach().sum()), len(face_score)),
            "actor/kl_loss": Metric.mean(float(kl_loss.detach().sum()), len(kl_loss)),
        }

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def sample(self, data: DataProto) -> DataProto:
        """Clips of a planned batch without training: frames (n, F, 3, H, W) in [0, 1], face_score and counted (n,).

        The same as a train step samples with the same weights; zero in padding rows.
        """
        self.phases.enter(Phase.TRAIN, self.engine)
        return DataProto.from_dict(dict(self.engine.infer(data, is_scored=False)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def last_frames(self) -> DataProto:
        """What this rank sampled in the last train step: frames (n, F, 3, H, W) in [0, 1], row and face_score (n,)."""
        return DataProto.concat(self._frames)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_lora(self, path: str) -> None:
        """Writes the adapter, fp32, into the folder `path` as diffusers' `load_lora_weights` reads it."""
        self.phases.enter(Phase.TRAIN, self.engine)
        engine = self.engine
        gathered = gather_full(engine.trained, torch.float32, engine.shard_group, EXPORT_BUCKET_BYTES)
        whole = {name: value.cpu() for name, value in gathered}
        adapter = engine.policy.adapter
        assert adapter is not None
        if dist.get_rank() == 0:
            write_lora(path, whole, adapter)
        dist.barrier()
