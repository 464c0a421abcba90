"""The worker of reward flow: samples clips with the policy and trains its adapter through the score of their frames.

Takes and gives `DataProto`; the network is in `reward_policy.py`, its loss in `verl_lite.flow_match`.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.device import device_memory
from verl_lite.metrics import Metric, combine, values
from verl_lite.protocol import DataProto
from verl_lite.schema import check
from verl_lite.seqlen_balance import plan_samples
from verl_lite.single_controller.decorator import Dispatch, register
from workers.diffusion.lora import write_lora
from workers.diffusion.reward_policy import reward_flow_network
from workers.engine.parameters import gather_full
from workers.rollout.base import derive_seed
from workers.training_worker import TrainingWorker

EXPORT_BUCKET_BYTES = 256 << 20


class RewardFlowWorker(TrainingWorker):
    """Samples and learns."""

    config: RewardFlowConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine and the frozen parts of the pipeline."""
        actor = self.config.actor
        self.build_engine(reward_flow_network(self.config), actor.fsdp_config, actor.optim)

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, clear_cache=False)
    def train_step(self, data: DataProto) -> DataProto:
        """One optimizer step on the batch. Gives metrics in meta_info; `last_frames` has what was sampled.

        Reads video (B, F, 3, H, W) in [0, 1] and prompt (B,). As the driver plans it (`BatchPlan.apply`), with
        noise_seed and row (B,), a rank gets its part, and gives a `Metric` for what it saw. A batch that nobody planned
        goes whole to every rank, `execute_all_sync("train_step", batch)`: each takes its part, and gives the numbers of
        the whole step. Metrics: actor/loss, which is what the step minimises; actor/face_score, the mean over the
        samples that count; actor/kl_loss, over all; actor/no_face_frac, the share of those that do not count;
        actor/grad_norm, actor/lr.
        """
        if "schedule" in data.meta_info:
            return DataProto(meta_info={"metrics": self._train(data)})
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self._train(self._own_part(data)))
        return DataProto(meta_info={"metrics": values(combine(parts))})

    def _train(self, data: DataProto) -> dict[str, Metric]:
        self.phases.enter(self.engine)
        self._frames: list[DataProto] = []
        metrics = self.engine.train(data, self._loss)
        result = {name if "/" in name else f"actor/{name}": metric for name, metric in metrics.items()}
        result |= {f"actor/perf/{name}": Metric.max(value) for name, value in device_memory(self.device).items()}
        return result

    def _own_part(self, data: DataProto) -> DataProto:
        """This rank's part of a whole batch, planned, with the noise of each sample and a name for each clip where the
        batch does not say them. Raises ValueError for what is no such batch."""
        check(data, ["video", "prompt"], "train_step")
        video, seed = data.batch["video"], self.config.sampler.noise_seed
        if not (video.is_floating_point() and 0 <= video.min() and video.max() <= 1):
            raise ValueError(
                f"train_step: column 'video' has {video.dtype} from {video.min()} to {video.max()}; expected frames as "
                "floats in [0, 1]"
            )
        clips = [hashlib.blake2b(clip.float().cpu().numpy().tobytes(), digest_size=8).digest() for clip in video]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, clips)
        if "is_padding" in data or any(others != clips for others in of_ranks):
            raise ValueError(
                "train_step: a batch that was not planned was cut over the ranks; give each the whole of it, by "
                'execute_all_sync("train_step", batch) or by `FlowActorRole.train_step`'
            )
        step, root = self.engine.scheduler_step + 1, self.config.trainer.seed
        made = {
            "noise_seed": [derive_seed(root, step, k, 0) if seed is None else seed for k in range(len(clips))],
            "row": [int.from_bytes(clip, "big") >> 1 for clip in clips],
        }
        missing = {name: torch.tensor(column) for name, column in made.items() if name not in data}
        whole = data.select(meta_info_keys=[]) | DataProto.from_dict(missing)
        plan = plan_samples(len(whole), len(of_ranks), self.config.actor.micro_batch_size_per_gpu)
        return plan.apply(whole).chunk(len(of_ranks))[dist.get_rank()]

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
        self, data: DataProto, loss: torch.Tensor | None, face_score: torch.Tensor, kl_loss: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """ROLL's one loss entry: passes the loss of a micro-batch through, with its metrics.

        loss: scalar, this micro-batch's part of the step's loss; None = the mean of `RewardFlowPolicy.loss`.
        face_score: (n,) of the samples that count, or a scalar. kl_loss: (m,) of those that are no padding, or a
        scalar. Metrics: actor/loss, the sum of the parts; actor/face_score and actor/kl_loss, means.
        """
        face_score, kl_loss = torch.atleast_1d(face_score), torch.atleast_1d(kl_loss)
        if loss is None:
            policy: Any = self.engine.policy
            loss = policy.loss(face_score, kl_loss).mean()
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
        self.phases.enter(self.engine)
        return DataProto.from_dict(dict(self.engine.infer(data, is_scored=False)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def last_frames(self) -> DataProto:
        """What this rank sampled in the last train step: frames (n, F, 3, H, W) in [0, 1], row and face_score (n,)."""
        return DataProto.concat(self._frames)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_lora(self, path: str) -> None:
        """Writes the adapter, fp32, into the folder `path` as diffusers' `load_lora_weights` reads it."""
        self.phases.enter(self.engine)
        engine = self.engine
        gathered = gather_full(engine.trained, torch.float32, engine.shard_group, EXPORT_BUCKET_BYTES)
        whole = {name: value.cpu() for name, value in gathered}
        adapter = engine.policy.adapter
        assert adapter is not None
        if dist.get_rank() == 0:
            write_lora(path, whole, adapter)
        dist.barrier()
