"""One run from command line to final report: what `trainer.main_ppo` does once it may import heavy things.

The order is cheap before dear: the configuration is checked, the data and the reward are tried, the plan is printed,
and only then are processes started.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from trainer.build import RunData, build_trainer, load_data
from trainer.cli import stopping_on_signal
from trainer.console import Console
from trainer.crash_dump import capsule_on_failure
from trainer.final_report import final_report
from trainer.launch import (
    INTERRUPTED,
    available_devices,
    held_folder,
    how_to_continue,
    make_run_dir,
    run_folder,
    run_or_show,
)
from trainer.picture import draw_curve
from trainer.planner.batch import launch_table
from trainer.planner.report import device_memory_gib, expected_rows, launch_device, measured_line, memory_lines
from trainer.planner.run_memory import read_networks
from trainer.ray_trainer import RayPPOTrainer
from trainer.recipe import prepare_recipe, recipe_overrides, trainer_of
from trainer.reports.terminal import closing_findings
from trainer.resources import claimed_devices, wish_of
from trainer.resume import refuse_another_run
from trainer.saving import checkpoint_bytes, require_room_for_checkpoints
from trainer.steps import count_steps
from trainer.tracking import Tracking
from verl_lite.config import LoadedConfig, PPOConfig, load_config, save_config
from verl_lite.config.checks import validate
from verl_lite.random_state import seed_random_state

COMMAND = ["python", "-m", "trainer.main_ppo"]


def run_ppo(argv: list[str], trainer_class: type[RayPPOTrainer] | None = None) -> int:
    """Runs a whole training from its command line; returns the exit status.

    trainer_class: one that replaces a stage of the trainer; None = the recipe's, or the one that the
    configuration asks for.
    """
    loaded = load_config(argv, recipe_loader=recipe_overrides)

    def attempt(slots: int, stack: ExitStack) -> int:
        return train(loaded, slots, argv, trainer_class or trainer_of(loaded.config), stack)

    return run_or_show(loaded, [*COMMAND, *argv], attempt)


def train(
    loaded: LoadedConfig[PPOConfig],
    slots: int,
    argv: list[str],
    trainer_class: type[RayPPOTrainer],
    stack: ExitStack,
) -> int:
    """A run from its data to its report; returns the exit status. What it holds meanwhile ends with `stack`."""
    config, console = loaded.config, Console(verbosity=loaded.verbosity)
    available = available_devices(config)
    for note in loaded.notes:
        console.note(note)
    prepare_recipe(config)
    if config.trainer.dry_run:
        return dry_run(loaded, slots, trainer_class, console)
    validate(config, slots=slots, available=available)
    stack.enter_context(claimed_devices(config, wish_of(config, slots, run_folder(config)), console.note))
    data = read_data(config, trainer_class, console)
    run_dir = make_run_dir(config)
    stack.enter_context(held_folder(run_dir, console.note))
    total_steps = count_steps(config, data.epoch_prompts)
    check_folder(config, run_dir, total_steps)
    trainer_class.claim(config, data.val, run_dir)
    save_config(loaded, run_dir / "config.yaml")
    seed_random_state(config.trainer.seed)
    if trainer_class.trains:
        console.print(launch_table(config, slots, total_steps, expected_rows(config, slots, total_steps)))
        console.start(total_steps)
    with (
        Tracking(run_dir, config, console) as tracking,
        build_trainer(config, data, run_dir, tracking, trainer_class) as trainer,
        stopping_on_signal(trainer.steps.stop, console.note),
        capsule_on_failure(trainer),
    ):
        result = trainer.fit()
    if trainer_class.trains and (line := measured_line(config, slots, run_dir)):
        console.print(line)
    if trainer_class.trains and (findings := closing_findings(run_dir)) is not None:
        console.print(findings)
    console.print(final_report(result, run_dir, {"picture": draw_curve(run_dir)}, next_commands(config, run_dir)))
    if result.stopped:
        console.print(how_to_continue([*COMMAND, *argv], run_dir))
        return INTERRUPTED
    return 0


def read_data(config: PPOConfig, trainer_class: type[RayPPOTrainer], console: Console) -> RunData:
    """The data, checked, with a line about each part."""
    data = load_data(config, trains=trainer_class.trains, scores=trainer_class.scores)
    for part in dict.fromkeys((data.train, data.val)):
        if part is not None:
            console.print(part.report)
    return data


def check_folder(config: PPOConfig, run_dir: Path, total_steps: int) -> None:
    """Raises UserError where the run cannot continue from what the folder has, or its checkpoints find no room."""
    if not config.trainer.val_only:  # it continues nothing, and may validate with other settings
        refuse_another_run(config, run_dir, total_steps, "trainer.val_only=true or `python -m trainer.main_eval`")
        require_room_for_checkpoints(config.trainer, run_dir, total_steps, checkpoint_bytes(config))


def dry_run(loaded: LoadedConfig[PPOConfig], slots: int, trainer_class: type[RayPPOTrainer], console: Console) -> int:
    """`trainer.dry_run=true`: all that can be checked without workers and devices, the plan, and the resolved
    configuration as RUN/dry_run.yaml. Returns the exit status."""
    config = loaded.config
    validate(config, slots=slots, available=None)
    data = read_data(config, trainer_class, console)
    total_steps = count_steps(config, data.epoch_prompts)
    run_dir = run_folder(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    check_folder(config, run_dir, total_steps)
    save_config(loaded, run_dir / "dry_run.yaml")
    console.print(launch_table(config, slots, total_steps, expected_rows(config, slots, total_steps)))
    networks, device = read_networks(config), launch_device(config)
    memory = device_memory_gib(device, max(1, slots // config.trainer.nnodes))
    console.print("\n".join(memory_lines(config, networks, slots, device, memory)))
    console.print(f"Nothing was started (trainer.dry_run=true). All options: {run_dir / 'dry_run.yaml'}")
    return 0


def next_commands(config: PPOConfig, run_dir: Path) -> dict[str, str]:
    """What a user may want to type when the run has ended."""
    more = "rollout.val_kwargs.n=8"
    if config.is_agentic and config.agentic.val_batch_size > 0:
        more = f"agentic.val_batch_size={4 * config.agentic.val_batch_size}"
    return {
        "look": f"python -m trainer.report {run_dir}",
        "evaluate": f"python -m trainer.main_eval {run_dir} {more}",
        "export": f"python -m trainer.export {run_dir} --to {run_dir / 'hf'}",
    }
