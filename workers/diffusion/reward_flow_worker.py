"""The worker of reward flow: samples clips and trains the policy's adapter with the gradient of their score.

Inputs and outputs are `DataProto`. The network is in `reward_policy.py`, its loss in `verl_lite.diffusion.flow_match`.
"""

import hashlib
from typing import TypeVar

import torch
import torch.distributed as dist

from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.core_algos import LossResult
from verl_lite.metrics import Metric, combine, values
from verl_lite.protocol import DataProto
from verl_lite.schema import check
from verl_lite.seqlen_balance import plan_samples
from verl_lite.single_controller.decorator import Dispatch, register
from workers.diffusion.lora import write_lora
from workers.diffusion.reward_policy import RewardFlowPolicy, reward_flow_network
from workers.engine.parameters import gather_full
from workers.engines.base import derive_seed
from workers.roles.training_worker import TrainingWorker, with_prefix

EXPORT_BUCKET_BYTES = 256 << 20

T = TypeVar("T")


class RewardFlowWorker(TrainingWorker):
    """One rank of the reward-flow policy: samples clips and trains the adapter."""

    config: RewardFlowConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine and the frozen parts of the pipeline."""
        actor = self.config.actor
        network = reward_flow_network(self.config)
        self.build_engine(network, actor.fsdp_config, actor.optim)

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, clear_cache=False)
    def train_step(self, data: DataProto) -> DataProto:
        """Takes one optimizer step on the batch and returns its metrics in meta_info.

        `last_frames` returns the clips that this step sampled. Metrics: actor/loss (the minimised loss),
        actor/face_score (mean over the counted samples), actor/kl_loss (mean over all samples), actor/no_face_frac
        (share of samples that are not counted), actor/grad_norm, actor/lr.

        Args:
            data: columns video (B, F, 3, H, W) in [0, 1] and prompt (B,). Either this rank's part of a batch that the
                driver planned (`BatchPlan.apply`), with columns noise_seed and row (B,); metrics are then `Metric`
                objects of this rank. Or the whole unplanned batch, passed to every rank by
                `execute_all_sync("train_step", batch)`; each rank then trains on its part and returns the metrics of
                the whole step as numbers.
        """
        # `BatchPlan.apply` puts the schedule there, so this is a part of a planned batch
        if "schedule" in data.meta_info:
            return DataProto(meta_info={"metrics": self._train(data)})

        own_part = self._own_part(data)
        own_metrics = self._train(own_part)
        metrics = combine(_gather_object(own_metrics))
        return DataProto(meta_info={"metrics": values(metrics)})

    def _train(self, data: DataProto) -> dict[str, Metric]:
        """Takes one optimizer step on this rank's planned part of a batch. Returns the metrics of this rank."""
        self.phases.enter(self.engine)
        # `_loss` appends the clips of each micro-batch
        self._frames: list[DataProto] = []
        metrics = self.engine.train(data, self._loss)
        return with_prefix(metrics) | self.memory_metrics("actor/perf/")

    def _own_part(self, data: DataProto) -> DataProto:
        """Returns this rank's planned part of a whole batch; adds the columns noise_seed and row if they are missing.

        Raises:
            ValueError: a column is missing or out of range, or the ranks received different batches.
        """
        check(data, ["video", "prompt"], "train_step")
        video = data.batch["video"]
        _check_frames(video)

        digests = [_digest_of(clip) for clip in video]
        digests_of_ranks = _gather_object(digests)
        # `train_step` called as a method of the group splits the batch and pads it; each rank then has other clips
        has_other_clips = any(others != digests for others in digests_of_ranks)
        if "is_padding" in data or has_other_clips:
            raise ValueError(
                "train_step: an unplanned batch was split over the ranks; pass the whole batch to every rank with "
                'execute_all_sync("train_step", batch), or call `FlowActorRole.train_step`'
            )

        missing = {}
        if "noise_seed" not in data:
            missing["noise_seed"] = torch.tensor(self._noise_seeds(len(digests)))
        if "row" not in data:
            # the row is only a name for the clip, by which its reference is cached; the shift makes it fit into int64
            names = [int.from_bytes(digest, "big") >> 1 for digest in digests]
            missing["row"] = torch.tensor(names)
        whole_batch = data.select(meta_info_keys=[]) | DataProto.from_dict(missing)

        # every rank computes the same plan, as the driver would, and takes its part
        world_size = dist.get_world_size()
        plan = plan_samples(len(whole_batch), world_size, self.config.actor.micro_batch_size_per_gpu)
        parts = plan.apply(whole_batch).chunk(world_size)
        return parts[dist.get_rank()]

    def _noise_seeds(self, number: int) -> list[int]:
        """Returns sampler.noise_seed for each sample, or seeds derived from trainer.seed, the step and the sample."""
        constant = self.config.sampler.noise_seed
        if constant is not None:
            return [constant] * number
        # the step that begins: the schedule has counted those that are done
        step = self.engine.scheduler_step + 1
        seed = self.config.trainer.seed
        return [derive_seed(seed, step, sample, 0) for sample in range(number)]

    def _loss(self, data: DataProto, output_tensor: dict[str, torch.Tensor]) -> LossResult:
        """Computes the loss and metrics of a micro-batch from the network's outputs.

        The divisor is the number of samples in the whole optimizer step, so the gradient does not depend on how the
        batch is split. Samples that are not counted have loss 0 and are part of the divisor, which is fixed before
        sampling.
        """
        is_real = ~data.batch["is_padding"]
        face_score = output_tensor["face_score"]
        # on the CPU, so that the clips of a step's micro-batches do not accumulate on the device
        samples = {
            "frames": output_tensor["frames"][is_real].cpu(),
            "row": data.batch["row"][is_real].cpu(),
            "face_score": face_score.detach()[is_real].cpu(),
        }
        self._frames.append(DataProto.from_dict(samples))

        # num_tokens is the number of samples in the whole optimizer step, and the engine adds up all micro-batches
        part_of_loss = output_tensor["loss"].sum() / data.meta_info["num_tokens"]
        counted = output_tensor["counted"].cpu()
        counted_scores = face_score.cpu()[counted > 0]
        kl = output_tensor["kl_loss"].cpu()[is_real]
        loss, metrics = self.loss_func(data, part_of_loss, counted_scores, kl)

        num_samples = int(is_real.sum())
        metrics["actor/no_face_frac"] = Metric.mean(num_samples - float(counted.sum()), num_samples)
        return loss, metrics

    def loss_func(
        self,
        data: DataProto,
        loss: torch.Tensor | None,
        face_score: torch.Tensor,
        kl_loss: torch.Tensor,
    ) -> LossResult:
        """Returns the loss of a micro-batch and its metrics; the counterpart of ROLL's `loss_func`.

        Args:
            data: the micro-batch, not used here.
            loss: scalar, this micro-batch's part of the step's loss; None computes the mean of `RewardFlowPolicy.loss`.
            face_score: (n,) scores of the counted samples, or a scalar.
            kl_loss: (m,) divergences of the samples that are not padding, or a scalar.

        Returns:
            The loss, and the metrics actor/loss (sum over micro-batches), actor/face_score and actor/kl_loss (means).
        """
        face_score = torch.atleast_1d(face_score)
        kl_loss = torch.atleast_1d(kl_loss)
        if loss is None:
            policy = self.engine.policy
            assert isinstance(policy, RewardFlowPolicy)
            loss = policy.loss(face_score, kl_loss).mean()
        total_score = float(face_score.detach().sum())
        total_kl = float(kl_loss.detach().sum())
        metrics = {
            "actor/loss": Metric.sum(float(loss.detach())),
            "actor/face_score": Metric.mean(total_score, len(face_score)),
            "actor/kl_loss": Metric.mean(total_kl, len(kl_loss)),
        }
        return loss, metrics

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def sample(self, data: DataProto) -> DataProto:
        """Samples the clips of a planned batch without training; with equal weights they equal those of a train step.

        Returns:
            frames (n, F, 3, H, W) in [0, 1], face_score and counted (n,); zero in padding rows.
        """
        self.phases.enter(self.engine)
        outputs = self.engine.infer(data, is_scored=False)
        return DataProto.from_dict(dict(outputs))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def last_frames(self) -> DataProto:
        """Returns this rank's samples of the last step: frames (n, F, 3, H, W) in [0, 1], row and face_score (n,)."""
        return DataProto.concat(self._frames)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_lora(self, path: str) -> None:
        """Writes the adapter in fp32 into the folder `path`, in the format of diffusers' `load_lora_weights`."""
        self.phases.enter(self.engine)
        engine = self.engine
        # gathering is collective, so every rank iterates, although only rank 0 writes
        gathered = gather_full(engine.trained, torch.float32, engine.shard_group, EXPORT_BUCKET_BYTES)
        weights = {name: value.cpu() for name, value in gathered}
        adapter = engine.policy.adapter
        assert adapter is not None
        if dist.get_rank() == 0:
            write_lora(path, weights, adapter)
        dist.barrier()


def _check_frames(video: torch.Tensor) -> None:
    """Raises ValueError unless the frames are floats in [0, 1]."""
    lowest = video.min()
    highest = video.max()
    if not (video.is_floating_point() and 0 <= lowest and highest <= 1):
        raise ValueError(
            f"train_step: column 'video' has {video.dtype} from {lowest} to {highest}; expected frames as floats "
            "in [0, 1]"
        )


def _digest_of(clip: torch.Tensor) -> bytes:
    """Returns a hash of the frames of a clip."""
    content = clip.float().cpu().numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).digest()


def _gather_object(value: T) -> list[T]:
    """Returns the value of every rank, in the order of the ranks. Every rank must call it."""
    gathered = [value] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
