"""One run from command line to final report."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from recipes.flow_grpo.checks import validate
from recipes.flow_grpo.picture import draw_before_after
from recipes.flow_grpo.rewards import load_reward
from recipes.flow_grpo.trainer import FitResult, FlowActor, FlowGRPOTrainer, PromptSteps
from trainer.cli import INTERRUPTED, stopping_on_signal
from trainer.console import Console
from trainer.final_report import final_report
from trainer.picture import draw_panels, draw_validation, series_panel, time_panel
from trainer.recipe import prepare_recipe, recipe_modules, recipe_overrides
from trainer.reports.terminal import closing_findings
from trainer.resources import join_ray, reserved_devices, start_workers
from trainer.resume import refuse_another_run
from trainer.run import (
    available_devices,
    how_to_continue,
    locked_folder,
    make_run_dir,
    run_folder,
    run_or_show,
)
from trainer.saving import Saver, require_room_for_checkpoints
from trainer.tracking import Tracking
from verl_lite.config import LoadedConfig, load_schema, save_config
from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.errors import UserError
from verl_lite.machine.claim import Wish
from verl_lite.random_state import seed_random_state
from verl_lite.single_controller import ClassWithInitArgs
from workers.diffusion.sde_actor import FlowActorWorker

COMMAND = ["python", "-m", "recipes.flow_grpo"]
NAME = "flow_grpo"
CLIPPED = {"actor/ppo_ratio_clipfrac": "all", "actor/pg_clipfrac": "those without gradient"}
STAGES = ("gen", "reward", "adv", "update_actor")


def run_flow_grpo(argv: list[str]) -> int:
    """Runs a whole training from its command line; returns the exit status."""
    loaded = load_schema(argv, FlowGRPOConfig, recipe_loader=recipe_overrides, default_recipe=NAME)
    return run_or_show(loaded, [*COMMAND, *argv], lambda slots, stack: train(loaded, slots, argv, stack))


def train(loaded: LoadedConfig[FlowGRPOConfig], slots: int, argv: list[str], stack: ExitStack) -> int:
    """A run from its prompts to its report; returns the exit status. What it holds meanwhile ends with `stack`."""
    config, console = loaded.config, Console(verbosity=loaded.verbosity)
    for note in loaded.notes:
        console.note(note)
    validate(config, count=slots, available=available_devices(config))
    prepare_recipe(config)
    prompts = read_prompts(config.data.train_files)
    val_prompts = read_prompts(config.data.val_files) if config.data.val_files else prompts
    reward = load_reward(config.reward)
    stack.enter_context(reserved_devices(config, wish_of(config, slots), console.note))
    run_dir = make_run_dir(config)
    stack.enter_context(locked_folder(run_dir, console.note))
    steps = PromptSteps(config, prompts)
    refuse_another_run(config, run_dir, steps.total, "see its curve.png")
    require_room_for_checkpoints(config.trainer, run_dir, steps.total, one=0)
    save_config(loaded, run_dir / "config.yaml")
    seed_random_state(config.trainer.seed)
    console.start(steps.total)
    tracking = stack.enter_context(Tracking(run_dir, config, console))
    join_ray(config, NAME, console.note, stack)
    roles = {"actor": ClassWithInitArgs(FlowActorWorker, config, steps.total)}
    actor = FlowActor(start_workers(config, roles, recipe_modules(config), run_dir, stack)["actor"], config)
    trainer = FlowGRPOTrainer(
        config,
        actor=actor,
        steps=steps,
        val_prompts=val_prompts,
        reward=reward,
        tracking=tracking,
        saver=Saver(run_dir, config.trainer, {"actor": actor}, 0, console.note),
        run_dir=run_dir,
    )
    with stopping_on_signal(steps.stop, console.note):
        result = trainer.fit()
    if result.checkpoint is not None:
        actor.export(str(run_dir / "model"))
    if (findings := closing_findings(run_dir)) is not None:
        console.print(findings)
    module, _, network = str(config.model.network).partition(":")
    use = {"use it": f'{network}.from_pretrained("{run_dir / "model"}")   # of {module}'}
    console.print(final_report(result, run_dir, pictures(result, val_prompts, run_dir), use))
    if result.stopped:
        console.print(how_to_continue([*COMMAND, *argv], run_dir))
        return INTERRUPTED
    return 0


def wish_of(config: FlowGRPOConfig, slots: int) -> Wish:
    """What the run takes of one machine; see `trainer.resources`."""
    trainer = config.trainer
    return Wish(slots // trainer.nnodes, str(run_folder(config)), shared=trainer.share_devices)


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


def pictures(result: FitResult, prompts: list[str], run_dir: Path) -> dict[str, Path | None]:
    """The curve, and the evaluation's samples before and after."""
    found = {
        "curve": draw_panels(
            run_dir,
            (
                series_panel("Reward in training, mean over the samples of a step", "score", {"critic/score/mean": ""}),
                draw_validation,
                series_panel("Denoising steps outside the clip range", "share", CLIPPED),
                time_panel(STAGES),
            ),
        )
    }
    before, after = result.frames_before, result.frames_after
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        scores = (result.scores_before, result.scores_after)
        found["samples"] = draw_before_after(run_dir / "before_after.png", prompts, (before, after), scores)
    return found
