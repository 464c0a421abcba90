"""Reward flow: trains an adapter of a video diffusion model with a differentiable reward.

This is the job that `trainer.main_reward_flow` runs in `trainer.launch.run`. There is no separate rollout, no advantage
and no old policy: a step is one call of the workers, which sample clips with gradient, score them and update the
adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.diffusion.clips.dataset import VideoDataset, batch_of_step, noise_seeds
from trainer.diffusion.clips.writing import require_encoder, write_clips
from trainer.diffusion.loop import DiffusionJob, DiffusionResult, DiffusionRole, DiffusionTrainer, draw_before_and_after
from trainer.launch.run import Report
from trainer.loop.saving import Saver
from trainer.loop.steps import EpochSteps
from trainer.observe.picture import draw_curve
from trainer.observe.tracking import Tracking
from trainer.planner.batch import slots_text
from trainer.planner.diffusion_memory import launch_plan
from trainer.recipe import recipe_modules
from verl_lite.config.diffusion import FlowRewardConfig, RewardFlowConfig
from verl_lite.config.diffusion_checks import validate_reward_flow as validate
from verl_lite.errors import UserError
from verl_lite.machine.device import device_type
from verl_lite.metrics import Metric, join, values
from verl_lite.protocol import DataProto
from verl_lite.registry import foreign_modules
from verl_lite.visual_rewards.base import VISUAL_REWARDS, build_visual_reward, score_frames
from workers.diffusion.reward_flow_worker import RewardFlowWorker

LORA = "lora"
"""Folder in a checkpoint that diffusers' `load_lora_weights` reads."""

SHOWN_CLIPS = 3
CURVES = (
    ("Score in training, mean over the samples of a step", "score", {"actor/face_score": ""}),
    ("Divergence from the base model", "KL", {"actor/kl_loss": ""}),
)


class RewardFlowTrainer(DiffusionTrainer):
    """The trainer of reward flow.

    Args:
        config: options of the run.
        actor: the policy on the workers.
        read_batch: returns the batch of a step number.
        validation: batch of clips and noise seeds for the validations.
        save_clips: called every trainer.video_freq steps with the step, and the rows and frames of its samples.
    """

    def __init__(
        self,
        config: RewardFlowConfig,
        *,
        actor: FlowActorRole,
        read_batch: Callable[[int], DataProto],
        validation: DataProto,
        save_clips: Callable[[int, Sequence[int], torch.Tensor], None],
        steps: EpochSteps,
        tracking: Tracking,
        saver: Saver,
    ) -> None:
        super().__init__(config.trainer, steps=steps, tracking=tracking, saver=saver)
        self.config = config
        self.actor = actor
        self.read_batch = read_batch
        self.validation = validation
        self.save_clips = save_clips

    def train_step(self, data: int) -> DataProto:
        """Reads the step's clips and trains on them; saves the sampled clips every `trainer.video_freq` steps."""
        with self.timed("data"):
            batch = self.read_batch(data)
        with self.timed("train"):
            metrics = self.actor.train_step(batch)
        self.metrics |= values(metrics)
        if self.steps.due(self.config.trainer.video_freq):
            with self.timed("videos"):
                samples = self.actor.last_frames()
                rows = samples.batch["row"].tolist()
                self.save_clips(data, rows, samples.batch["frames"])
        return batch

    def evaluate(self) -> tuple[dict[str, float], DataProto]:
        """Samples the validation clips.

        Returns:
            Metrics (mean score of the counted samples, and the share of the others) and the samples.
        """
        samples = self.actor.sample(self.validation)
        is_counted = samples.batch["counted"].bool()
        scores = samples.batch["face_score"][is_counted]
        # of a reward "module:function", the function
        name = self.config.reward.name.rpartition(":")[2]
        counted_frac = float(is_counted.float().mean())
        metrics = {f"val-aux/{name}/no_face_frac": 1.0 - counted_frac}
        # the mean of no scores would be NaN
        if len(scores):
            metrics[f"val-core/{name}/reward/mean@1"] = float(scores.mean())
        return metrics, samples


class FlowActorRole(DiffusionRole):
    """The driver's handle of the policy. Its checkpoints also contain the adapter in the format of diffusers."""

    def train_step(self, batch: DataProto) -> dict[str, Metric]:
        """Takes one optimizer step on the batch.

        A batch without the column noise_seed, as in ROLL, goes to every rank as a whole. The ranks add the column and
        plan the batch themselves.
        """
        if "noise_seed" not in batch:
            results = self.group.execute_all_sync("train_step", batch)
            # every rank returns the metrics of the whole step
            metrics_of_step = results[0].meta_info["metrics"]
            return {name: Metric.last(value) for name, value in metrics_of_step.items()}
        planned = self.plan_of(batch).apply(batch)
        result = self.group.train_step(planned)
        return join(result.meta_info["metrics"])

    def sample(self, batch: DataProto) -> DataProto:
        """Samples each row without training: frames (B, F, 3, H, W) in [0, 1], face_score (B,) and counted (B,)."""
        plan = self.plan_of(batch)
        planned = plan.apply(batch)
        samples = self.group.sample(planned)
        return plan.restore(samples)

    def last_frames(self) -> DataProto:
        """Returns frames, row and face_score of the last step's samples, without padding and in no fixed order."""
        # a rank whose rows were all padding has no samples
        samples_of_ranks = [samples for samples in self.group.last_frames() if len(samples)]
        return DataProto.concat(samples_of_ranks)

    def save(self, folder: str, background: bool = False) -> None:
        """Saves adapter, optimizer and random states in `folder`, and the adapter for diffusers in a sibling folder."""
        super().save(folder, background)
        adapter_folder = Path(folder).with_name(LORA)
        self.group.export_lora(str(adapter_folder))


class RewardFlowJob(DiffusionJob[RewardFlowConfig]):
    """The job of `trainer.main_reward_flow`."""

    module = "trainer.main_reward_flow"
    worker = RewardFlowWorker
    # True once the recipe has run and its files can be checked
    is_prepared = False

    def prepare(self) -> None:
        super().prepare()
        self.is_prepared = True

    def check(self, available: int | None) -> None:
        has_files = self.is_prepared or self.config.recipe is None
        validate(self.config, count=self.slots, available=available, files=has_files)

    def read_data(self) -> int:
        """Reads and checks the clips, tries the reward on one of them, and returns the number of steps."""
        self.data = VideoDataset(self.config.data)
        # the clips first, because the reward is tried on one of them
        config = self.config
        self.data.check(list_all=config.trainer.dry_run)
        try_reward(config.reward, self.data)
        dataset = self.data.fingerprint()
        return self.count_steps(len(self.data), dataset, config.data.repeat)

    def plan(self) -> str:
        """Returns the lines at launch: clips, steps, denoising steps and, on a GPU, the expected memory."""
        config = self.config
        sampler = config.sampler
        steps = sampler.final_timestep + 1
        trained_steps = steps - sampler.mid_timestep
        text = (
            f"{len(self.data)} clips; {self.steps.total} steps of {config.data.train_batch_size} samples on "
            f"{slots_text(config.trainer, self.slots)}; {steps} of {sampler.num_inference_steps} denoising steps, "
            f"{trained_steps} with gradient"
        )
        if device_type(config.trainer.device) != "cuda":
            return text
        memory = launch_plan(config, self.slots)
        if memory:
            text += f"\nmemory of one device: {memory}   (python -m trainer.plan --command main_reward_flow)"
        return text

    def full_plan(self) -> tuple[str, bool]:
        return f"{self.plan()}\n{self.data.table()}", True

    @contextmanager
    def build(self, tracking: Tracking) -> Iterator[RewardFlowTrainer]:
        """Starts the workers and yields the trainer. Ends the workers with the context."""
        config = self.config
        data = self.data
        # workers must also import the modules that register the reward
        reward = VISUAL_REWARDS.get_fn(config.reward.name)
        modules = [*recipe_modules(config), *foreign_modules([reward])]
        # before the workers start, instead of after the first video_freq steps
        if config.trainer.video_freq != 0:
            require_encoder()

        def read_batch(step: int) -> DataProto:
            return batch_of_step(data, self.steps, step, config.sampler.noise_seed)

        def save_clips(step: int, rows: Sequence[int], clips: torch.Tensor) -> None:
            folder = self.run_dir / "videos" / f"step_{step}"
            write_clips(folder, rows, clips, tracking.note)

        with self.workers(tracking, modules) as group:
            rows = data.validation[: config.trainer.val_clips]
            # step 0 is never trained, so no training sample has the noise of a validation
            seeds = noise_seeds(0, rows, config.trainer.seed, config.sampler.noise_seed)
            actor = FlowActorRole(group, config.actor.micro_batch_size_per_gpu)
            yield RewardFlowTrainer(
                config,
                actor=actor,
                read_batch=read_batch,
                validation=data.batch(rows, seeds),
                save_clips=save_clips,
                steps=self.steps,
                tracking=tracking,
                saver=Saver(self.run_dir, config, {"actor": actor}, expected_bytes=0, log=tracking.note),
            )

    def report(self, trainer: Any, result: DiffusionResult) -> Report:
        """Draws the pictures, and returns them with the line of Python that loads the adapter."""
        # one sample for each validation clip, drawn below the clip itself
        clips = trainer.validation[:SHOWN_CLIPS]
        groups = []
        for row, prompt in enumerate(clips.non_tensor_batch["prompt"]):
            groups.append((str(prompt), slice(row, row + 1)))
        pictures = {
            "picture": draw_curve(self.run_dir, *CURVES),
            "frames": draw_before_and_after(self.run_dir, result, groups, clips.batch["video"]),
        }
        if not result.checkpoint:
            return Report(pictures=pictures)

        arguments = f'"{result.checkpoint}/{LORA}"'
        model_folder = Path(str(self.config.model.path)).expanduser()
        # the second of two experts has the adapter
        if (model_folder / "transformer_2").is_dir():
            arguments += ", load_into_transformer_2=True"
        use = f"pipeline.load_lora_weights({arguments})   # in diffusers"
        return Report(pictures=pictures, commands={"use it": use})


_NOISE = 0.02
"""Noise added to the reference frames of the trial, because at the best score the gradient can be 0."""


def try_reward(options: FlowRewardConfig, data: VideoDataset) -> None:
    """Tries the reward on the first clip before the workers start, which check the other clips during training.

    Raises:
        UserError: the reward cannot be built, has no gradient, or cannot use the clip as a reference.
    """
    reward = build_visual_reward(options)
    first_clip = data.batch([0], [0])
    frames = first_clip.batch["video"][0]
    try:
        with torch.no_grad():
            reference = reward.prepare(frames)
    except ValueError as error:
        raise UserError(f"{data.sentence(0, error)}. Take this clip out, or choose another reward.name") from error

    # NumPy's generator, so that the trial leaves torch's random state as it is
    generator = np.random.default_rng(0)
    noise = torch.from_numpy(generator.standard_normal(frames.shape, dtype=np.float32))
    # rewards score frames in [-1, 1], as the decoder returns them
    noisy = (2 * frames - 1 + _NOISE * noise).clamp(-1, 1)
    noisy.requires_grad_()
    score = score_frames(reward, noisy, reference)
    # nothing to score in the noisy frames, and so no gradient to check
    if not score.counted:
        return
    [gradient] = torch.autograd.grad(score.value, noisy, allow_unused=True)
    is_usable = gradient is not None and gradient.isfinite().all() and gradient.any()
    if not is_usable:
        raise UserError(
            f"reward.name={options.name!r} cannot be trained with: the score of the first clip has no gradient with "
            "respect to the frames, or the gradient is 0 or not finite. Compute the score by differentiable torch "
            "operations on the frames; for a reward without a gradient use recipes/flow_grpo"
        )
