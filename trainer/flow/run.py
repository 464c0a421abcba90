"""One run of reward flow from command line to final report: what `trainer.main_reward_flow` does once it may import
heavy things.

The order is cheap before dear: the options are checked, the clips are read, the reward is tried, the plan is printed,
and only then are processes started.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from trainer.cli import INTERRUPTED, stopping_on_signal
from trainer.clips.dataset import VideoDataset, steps_per_epoch
from trainer.clips.writing import Strip, as_frames, draw_strips
from trainer.console import Console
from trainer.final_report import final_report
from trainer.flow.actor import LORA
from trainer.flow.reward_flow import FlowResult, RewardFlowTrainer
from trainer.flow.steps import count_steps, refuse_other_clips
from trainer.flow.trial import try_reward
from trainer.picture import draw_panels, draw_validation, series_panel, time_panel
from trainer.planner.diffusion import launch_plan
from trainer.recipe import prepare_recipe, recipe_overrides
from trainer.reports.terminal import closing_findings
from trainer.resources import reserved_devices
from trainer.resume import refuse_another_run
from trainer.run import (
    available_devices,
    how_to_continue,
    locked_folder,
    make_run_dir,
    run_folder,
    run_or_show,
)
from trainer.saving import require_room_for_checkpoints
from trainer.tracking import TRACKERS, Tracking
from verl_lite.config import LoadedConfig, load_schema, save_config
from verl_lite.config.checks.diffusion import validate
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.device import device_type
from verl_lite.random_state import seed_random_state

COMMAND = ["python", "-m", "trainer.main_reward_flow"]
DEFAULT_RECIPE = "reward_flow"
STAGES = ("data", "train", "videos")
"""In the order of the step."""
MOST_CLIPS = 3
"""That the picture of before and after shows."""


def run_reward_flow(argv: list[str]) -> int:
    """Runs a whole training from its command line; returns the exit status."""
    loaded = load_schema(argv, RewardFlowConfig, recipe_loader=recipe_overrides, default_recipe=DEFAULT_RECIPE)

    def attempt(slots: int, stack: ExitStack) -> int:
        return train(loaded, slots, argv, stack)

    return run_or_show(loaded, [*COMMAND, *argv], attempt)


def train(loaded: LoadedConfig[RewardFlowConfig], slots: int, argv: list[str], stack: ExitStack) -> int:
    """A run from its data to its report; returns the exit status. What it holds meanwhile ends with `stack`."""
    from trainer.flow.build import build_trainer, wish_of  # imports the model's libraries

    config, console = loaded.config, Console(verbosity=loaded.verbosity)
    for note in loaded.notes:
        console.note(note)
    available = available_devices(config)
    validate(config, count=slots, available=available, trackers=TRACKERS, files=config.recipe is None)
    prepare_recipe(config)
    validate(config, count=slots, available=available, trackers=TRACKERS)
    stack.enter_context(reserved_devices(config, wish_of(config, slots, run_folder(config)), console.note))
    data = VideoDataset(config.data)
    data.check()
    try_reward(config.reward, data, console.note)
    run_dir = make_run_dir(config)
    stack.enter_context(locked_folder(run_dir, console.note))
    total_steps = count_steps(config, steps_per_epoch(len(data), config.data))
    refuse_another_run(config, run_dir, total_steps, f"open {run_dir}")
    refuse_other_clips(config, run_dir, data.fingerprint())
    require_room_for_checkpoints(config.trainer, run_dir, total_steps, one=0)
    save_config(loaded, run_dir / "config.yaml")
    seed_random_state(config.trainer.seed)
    console.print(plan_table(config, slots, total_steps, len(data)))
    console.start(total_steps)
    with (
        Tracking(run_dir, config, console) as tracking,
        build_trainer(config, data, run_dir, tracking) as trainer,
        stopping_on_signal(trainer.steps.stop, console.note),
    ):
        result = trainer.fit()
    pictures = draw_pictures(trainer, result)
    if (findings := closing_findings(run_dir)) is not None:
        console.print(findings)
    console.print(final_report(result, run_dir, pictures, next_commands(result, config)))
    if result.stopped:
        console.print(how_to_continue([*COMMAND, *argv], run_dir))
        return INTERRUPTED
    return 0


def plan_table(config: RewardFlowConfig, slots: int, total_steps: int, clips: int) -> str:
    """The arithmetic of the run as aligned text: what is counted, how many, which options."""
    sampler, data, trainer = config.sampler, config.data, config.trainer
    first, last, micro = sampler.mid_timestep, sampler.final_timestep, config.actor.micro_batch_size_per_gpu
    limit = f"trainer.total_training_steps={trainer.total_training_steps}"
    if trainer.total_training_steps is None:
        limit = f"trainer.total_epochs={trainer.total_epochs}"
    rows = [
        ("clips", f"{clips}", "data.train_files"),
        ("samples per optimizer step", f"{data.train_batch_size}", "data.train_batch_size"),
        ("in micro-batches of", f"{micro}", f"actor.micro_batch_size_per_gpu, {slots} device{'s' * (slots > 1)}"),
        ("denoising steps", f"{last + 1}", f"sampler: 0 to {last} of {sampler.num_inference_steps}"),
        ("of them with gradient", f"{last - first + 1}", f"from sampler.mid_timestep={first} on"),
        ("training steps", f"{total_steps}", limit),
    ]
    if device_type(config.trainer.device) == "cuda" and (memory := launch_plan(config, slots)):
        rows.append(("memory of one device", memory, "python -m trainer.diffusion_plan"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{what:<{widths[0]}}  {value:>{widths[1]}}   {options}" for what, value, options in rows)


def draw_pictures(trainer: RewardFlowTrainer, result: FlowResult) -> Mapping[str, Path | None]:
    """Curves of the run, and the validation's clips before and after where both were sampled."""
    run_dir, name = trainer.run_dir, trainer.config.reward.name.rpartition(":")[2]
    pictures = {
        "picture": draw_panels(
            run_dir,
            (
                series_panel("Score in training, mean over the samples of a step", name, {"actor/face_score": ""}),
                draw_validation,
                series_panel("Divergence from the base model", "KL", {"actor/kl_loss": ""}),
                time_panel(STAGES),
            ),
        )
    }
    if result.first is None or result.last is None:
        return pictures
    first, last, shown = result.first.batch, result.last.batch, trainer.validation
    groups = []
    for row in range(min(len(shown), MOST_CLIPS)):
        before, after = (float(samples["face_score"][row]) for samples in (first, last))
        strips = (
            Strip("reference", as_frames(shown.batch["video"][row])),
            Strip(f"before\n{before:.2f}", as_frames(first["frames"][row])),
            Strip(f"after\n{after:.2f}", as_frames(last["frames"][row]), is_better=after > before),
        )
        groups.append((str(shown.non_tensor_batch["prompt"][row]), strips))
    pictures["frames"] = draw_strips(run_dir / "before_after.png", groups, run_dir.name)
    return pictures


def next_commands(result: FlowResult, config: RewardFlowConfig) -> dict[str, str]:
    """What a user may want to do when the run has ended. Of two experts the second has the adapter."""
    has_two = (Path(str(config.model.path)).expanduser() / "transformer_2").is_dir()
    where = ", load_into_transformer_2=True" * has_two
    return {"use it": f'pipeline.load_lora_weights("{result.checkpoint}/{LORA}"{where})   # in diffusers'}
