"""`python -m recipes.flow_grpo` for the frame of all commands (`trainer.run`): its data, its trainer, its report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from recipes.flow_grpo.checks import validate
from recipes.flow_grpo.rewards import load_reward
from recipes.flow_grpo.trainer import FlowActor, FlowGRPOTrainer
from trainer.clips.writing import Strip, as_frames, draw_strips
from trainer.diffusion.loop import EpochSteps, FitResult, fingerprint, refuse_other_data
from trainer.picture import draw_panels, draw_time, draw_validation, series_panel
from trainer.recipe import recipe_modules
from trainer.resources import join_ray, start_workers
from trainer.run import Job, Report
from trainer.saving import Saver
from trainer.tracking import Tracking
from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from verl_lite.single_controller import ClassWithInitArgs
from workers.diffusion.sde_actor import FlowActorWorker

NAME = "flow_grpo"
SHOWN_PROMPTS = 6
"""That the picture of before and after shows."""
PANELS = (
    series_panel("Reward in training, mean over the samples of a step", "score", {"critic/score/mean": ""}),
    draw_validation,
    series_panel(
        "Denoising steps outside the clip range",
        "share",
        {"actor/ppo_ratio_clipfrac": "all", "actor/pg_clipfrac": "those without gradient"},
    ),
    draw_time,
)


class FlowGRPOJob(Job[FlowGRPOConfig]):
    """Policy gradients for a flow-matching model."""

    config: FlowGRPOConfig
    module, options, default_recipe = "recipes.flow_grpo", FlowGRPOConfig, NAME

    def prepare(self) -> None:
        """Options are checked first: what the recipe makes takes a while."""
        validate(self.config, count=self.slots)
        super().prepare()

    def check(self, available: int | None) -> None:
        validate(self.config, count=self.slots, available=available)

    def read_data(self) -> int:
        data, trainer = self.config.data, self.config.trainer
        self.prompts = read_prompts(data.train_files)
        self.val_prompts = read_prompts(data.val_files) if data.val_files else self.prompts
        self.reward = load_reward(self.config.reward)
        self.steps = EpochSteps(
            len(self.prompts),
            data.train_batch_size,
            epochs=trainer.total_epochs,
            limit=trainer.total_training_steps,
            seed=trainer.seed,
            shuffle=data.shuffle,
            dataset=fingerprint(self.prompts),
        )
        return self.steps.total

    def check_folder(self) -> None:
        refuse_other_data(self.config.trainer, self.run_dir, self.steps.dataset)

    def plan(self) -> str:
        data, n, steps = self.config.data, self.config.rollout.n, self.config.sampler.num_train_steps
        return f"{len(self.prompts)} prompts; a step: {data.train_batch_size} of them x {n} samples of {steps} steps"

    @contextmanager
    def build(self, tracking: Tracking) -> Iterator[FlowGRPOTrainer]:
        config = self.config
        with ExitStack() as stack:
            join_ray(config, NAME, tracking.note, stack)
            roles = {"actor": ClassWithInitArgs(FlowActorWorker, config, self.steps.total)}
            group = start_workers(config, roles, recipe_modules(config), self.run_dir / "logs", stack)["actor"]
            actor = FlowActor(group, config)
            yield FlowGRPOTrainer(
                config,
                actor=actor,
                steps=self.steps,
                prompts=self.prompts,
                val_prompts=self.val_prompts,
                reward=self.reward,
                tracking=tracking,
                saver=Saver(self.run_dir, config, {"actor": actor}, 0, tracking.note),
            )
            if config.trainer.save_freq != 0:
                actor.export(str(self.run_dir / "model"))

    def report(self, trainer: Any, result: FitResult) -> Report:
        pictures = {"curve": draw_panels(self.run_dir, PANELS)}
        if result.first is not None and result.last is not None:
            groups = before_and_after(self.val_prompts, result.first, result.last)
            pictures["samples"] = draw_strips(self.run_dir / "before_after.png", groups, self.run_dir.name, columns=8)
        module, _, network = str(self.config.model.network).partition(":")
        use = f'{network}.from_pretrained("{self.run_dir / "model"}")   # of {module}'
        return Report(pictures=pictures, commands={"use it": use})


def read_prompts(files: list[str]) -> list[str]:
    """The lines of all files that are not empty, in order. UserError if a file is missing or there is none."""
    lines: list[str] = []
    for file in files:
        try:
            lines += Path(file).expanduser().read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UserError(f"data.train_files, data.val_files: {file} cannot be read: {error.strerror}") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"data.train_files={files}: no prompts in there; one in each line is expected")
    return prompts


def before_and_after(prompts: list[str], first: DataProto, last: DataProto) -> list[tuple[str, list[Strip]]]:
    """Of the first few prompts the first frames of their samples, with the mean of those that were scored, to draw."""
    groups = []
    halves = (samples.chunk(len(prompts)) for samples in (first, last))
    for prompt, *sampled in zip(prompts, *halves, strict=True):
        before, after = (float(samples.batch["face_score"].nanmean()) for samples in sampled)
        strips = [
            Strip(f"before\n{before:.2f}", as_frames(sampled[0].batch["frames"][:, 0])),
            Strip(f"after\n{after:.2f}", as_frames(sampled[1].batch["frames"][:, 0]), is_better=after > before),
        ]
        groups.append((prompt, strips))
    return groups[:SHOWN_PROMPTS]
