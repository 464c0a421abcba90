"""`trainer.main_reward_flow` for the frame of all commands (`trainer.run`): its data, its trainer, its report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from trainer.clips.dataset import VideoDataset, VideoLoader, collate, noise_seeds
from trainer.clips.writing import Strip, VideoWriter, as_frames, draw_strips
from trainer.diffusion.loop import EpochSteps, FitResult, refuse_other_data
from trainer.diffusion.reward_flow import LORA, AdapterExport, FlowActorRole, RewardFlowTrainer
from trainer.diffusion.trial import try_reward
from trainer.picture import draw_panels, draw_time, draw_validation, series_panel
from trainer.planner.diffusion import launch_plan
from trainer.recipe import recipe_modules
from trainer.resources import join_ray, start_workers
from trainer.run import Job, Report
from trainer.saving import Checkpointable, Saver
from trainer.tracking import TRACKERS, Tracking
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.config.diffusion_checks import validate_reward_flow as validate
from verl_lite.device import device_type
from verl_lite.protocol import DataProto
from verl_lite.registry import foreign_modules
from verl_lite.single_controller import ClassWithInitArgs
from verl_lite.visual_rewards.base import VISUAL_REWARDS
from workers.diffusion.actor import ActorWorker

SHOWN_CLIPS = 3
PANELS = (
    series_panel("Score in training, mean over the samples of a step", "score", {"actor/face_score": ""}),
    draw_validation,
    series_panel("Divergence from the base model", "KL", {"actor/kl_loss": ""}),
    draw_time,
)


class RewardFlowJob(Job[RewardFlowConfig]):
    """Reward flow."""

    module, options, default_recipe = "trainer.main_reward_flow", RewardFlowConfig, "reward_flow"

    def prepare(self) -> None:
        """Options are checked first: what the recipe makes takes minutes."""
        validate(self.config, count=self.slots, trackers=TRACKERS, files=self.config.recipe is None)
        super().prepare()

    def check(self, available: int | None) -> None:
        validate(self.config, count=self.slots, available=available, trackers=TRACKERS)

    def read_data(self) -> int:
        config = self.config
        self.data = VideoDataset(config.data)
        self.data.check()
        try_reward(config.reward, self.data, self.console.note)
        self.steps = steps_of(config, self.data)
        return self.steps.total

    def check_folder(self) -> None:
        refuse_other_data(self.config.trainer, self.run_dir, self.steps.dataset)

    def plan(self) -> str:
        config = self.config
        sampler, trainer, micro = config.sampler, config.trainer, config.actor.micro_batch_size_per_gpu
        first, last = sampler.mid_timestep, sampler.final_timestep
        limit = f"trainer.total_training_steps={trainer.total_training_steps}"
        if trainer.total_training_steps is None:
            limit = f"trainer.total_epochs={trainer.total_epochs}"
        slots = f"{self.slots} device{'s' * (self.slots > 1)}"
        rows = [
            ("clips", f"{len(self.data)}", "data.train_files"),
            ("samples per optimizer step", f"{config.data.train_batch_size}", "data.train_batch_size"),
            ("in micro-batches of", f"{micro}", f"actor.micro_batch_size_per_gpu, {slots}"),
            ("denoising steps", f"{last + 1}", f"sampler: 0 to {last} of {sampler.num_inference_steps}"),
            ("of them with gradient", f"{last - first + 1}", f"from sampler.mid_timestep={first} on"),
            ("training steps", f"{self.steps.total}", limit),
        ]
        if device_type(trainer.device) == "cuda" and (memory := launch_plan(config, self.slots)):
            rows.append(("memory of one device", memory, "python -m trainer.diffusion_plan"))
        width = max(len(number) for _, number, _ in rows)
        return "\n".join(f"{what:<26}  {number:>{width}}   {options}" for what, number, options in rows)

    @contextmanager
    def build(self, tracking: Tracking) -> Iterator[RewardFlowTrainer]:
        config, data, run_dir = self.config, self.data, self.run_dir
        with ExitStack() as stack:
            videos = None
            if config.trainer.video_freq != 0:
                videos = stack.enter_context(VideoWriter(run_dir / "videos", tracking.note))
            loader = stack.enter_context(VideoLoader(data, self.steps, config.sampler.noise_seed))
            join_ray(config, run_dir.name, tracking.note, stack)
            roles = {"actor": ClassWithInitArgs(ActorWorker, config, self.steps.total)}
            group = start_workers(config, roles, worker_modules(config), run_dir / "logs", stack)["actor"]
            actor = FlowActorRole(group, config)
            learners: dict[str, Checkpointable] = {"actor": actor, LORA: AdapterExport(group)}
            yield RewardFlowTrainer(
                config,
                actor=actor,
                steps=self.steps,
                read_batch=loader.batch,
                validation=validation_batch(config, data),
                videos=videos,
                tracking=tracking,
                saver=Saver(run_dir, config, learners, 0, tracking.note),
            )

    def report(self, trainer: Any, result: FitResult) -> Report:
        pictures = {"picture": draw_panels(self.run_dir, PANELS)}
        if result.first is not None and result.last is not None:
            groups = before_and_after(trainer.validation, result.first, result.last)
            pictures["frames"] = draw_strips(self.run_dir / "before_after.png", groups, self.run_dir.name)
        has_two = (Path(str(self.config.model.path)).expanduser() / "transformer_2").is_dir()
        where = ", load_into_transformer_2=True" * has_two  # of two experts the second has the adapter
        use = f'pipeline.load_lora_weights("{result.checkpoint}/{LORA}"{where})   # in diffusers'
        return Report(pictures=pictures, commands={"use it": use})


def steps_of(config: RewardFlowConfig, data: VideoDataset) -> EpochSteps:
    """The steps of a run over these clips."""
    options, trainer = config.data, config.trainer
    return EpochSteps(
        len(data),
        options.train_batch_size,
        epochs=trainer.total_epochs,
        limit=trainer.total_training_steps,
        seed=trainer.seed,
        shuffle=options.shuffle,
        repeat=options.repeat,
        dataset=data.fingerprint(),
    )


def worker_modules(config: RewardFlowConfig) -> list[str]:
    """What a worker process imports before it begins: the recipe, and where the reward is registered."""
    reward = foreign_modules([VISUAL_REWARDS.get_fn(config.reward.name)])
    return list(dict.fromkeys([*recipe_modules(config), *reward]))


def validation_batch(config: RewardFlowConfig, data: VideoDataset) -> DataProto:
    """The first trainer.val_clips clips of the validation; their noise is that of step 0, which is never trained."""
    rows = data.validation[: config.trainer.val_clips]
    seeds = noise_seeds(0, rows, config.trainer.seed, config.sampler.noise_seed)
    batch = collate([data[row] for row in rows], seeds)
    batch.meta_info["global_step"] = 0
    return batch


def before_and_after(clips: DataProto, first: DataProto, last: DataProto) -> list[tuple[str, list[Strip]]]:
    """The first few clips of the validation with their samples, to draw."""
    groups = []
    for row in range(min(len(clips), SHOWN_CLIPS)):
        before, after = (float(samples.batch["face_score"][row]) for samples in (first, last))
        strips = [
            Strip("reference", as_frames(clips.batch["video"][row])),
            Strip(f"before\n{before:.2f}", as_frames(first.batch["frames"][row])),
            Strip(f"after\n{after:.2f}", as_frames(last.batch["frames"][row]), is_better=after > before),
        ]
        groups.append((str(clips.non_tensor_batch["prompt"][row]), strips))
    return groups
