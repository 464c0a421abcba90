"""One run from command line to final report: what `trainer.main_ppo` does once it may import heavy things.

The order is cheap before dear: the configuration is checked, the data and the reward are tried, the plan is printed,
and only then are processes started.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trainer.build import build_trainer, load_data
from trainer.capsule import capsule_on_failure
from trainer.checkpoint import saved_steps
from trainer.console import Console
from trainer.ending import failure_text
from trainer.picture import draw_curve
from trainer.plan import launch_table
from trainer.ray_trainer import RayPPOTrainer
from trainer.recipe import prepare_recipe, recipe_overrides, trainer_of
from trainer.report import final_report
from trainer.resume import refuse_another_run
from trainer.saving import require_room_for_checkpoints
from trainer.steps import count_steps
from trainer.stopping import stopping_on_signal
from trainer.tracking import Tracking
from trainer.wish import claimed_devices
from verl_lite.agentic_config import is_agentic
from verl_lite.config import PPOConfig
from verl_lite.config_loader import LoadedConfig, help_config, load_config, print_config, save_config, validate
from verl_lite.device import device_type, visible_devices
from verl_lite.device_lease import Holder, LeaseTaken, leased_file
from verl_lite.errors import ClusterLostError, NoRoomError, StalledError, UserError, WorkerDiedError
from verl_lite.random_state import seed_random_state
from verl_lite.single_controller.guard import guarded

MOST_DEFAULT_CPU_SLOTS = 2
INTERRUPTED = 130  # exit status of a run that its user stopped, as shells have it


def run_ppo(argv: list[str], trainer_class: type[RayPPOTrainer] | None = None) -> int:
    """Runs a whole training from its command line; returns the exit status.

    trainer_class: one that replaces a stage of the trainer; None = the recipe's, or the one that the
    configuration asks for.
    """
    loaded = load_config(argv, recipe_loader=recipe_overrides)
    if loaded.action == "help":
        print(help_config())
        return 0
    config = loaded.config
    slots = resolve_slots(config)
    if loaded.action == "print":
        print(print_config(loaded))
        return 0
    lost: WorkerDiedError | StalledError | None = None
    for retries_left in range(config.trainer.max_retries, -1, -1):
        try:
            with ExitStack() as stack:
                stack.enter_context(guarded())
                return train(loaded, slots, argv, trainer_class or trainer_of(config), stack)
        except (WorkerDiedError, StalledError) as error:
            if not retries_left or isinstance(error, ClusterLostError):  # which cannot be joined anew by this process
                raise
            lost = error
            print(failure_text(error), file=sys.stderr)
            print(f"Starting again from the last checkpoint; trainer.max_retries leaves {retries_left - 1} more.")
        except NoRoomError as error:
            if lost is None:
                raise
            lost.add_note(f"Starting again failed: {error}\n{how_to_continue(argv, run_folder(config))}")
            raise lost from None
        config.trainer.resume_mode, config.trainer.resume_from_path = "auto", None
    raise AssertionError("the last try returns or raises")


def train(
    loaded: LoadedConfig[PPOConfig],
    slots: int,
    argv: list[str],
    trainer_class: type[RayPPOTrainer],
    stack: ExitStack,
) -> int:
    """A run from its data to its report; returns the exit status. What it holds meanwhile ends with `stack`."""
    config, console = loaded.config, Console()
    available = available_devices(config)
    for note in loaded.notes:
        console.note(note)
    prepare_recipe(config)
    validate(config, slots=slots, available=available)
    stack.enter_context(claimed_devices(config, slots, run_folder(config), console.note))
    data = load_data(config, trains=trainer_class.trains, scores=trainer_class.scores)
    for part in dict.fromkeys((data.train, data.val)):
        if part is not None:
            console.print(part.report)
    run_dir = make_run_dir(config)
    stack.enter_context(held_folder(run_dir, console.note))
    total_steps = count_steps(config, data.epoch_prompts)
    refuse_another_run(config, run_dir, total_steps)
    require_room_for_checkpoints(config, run_dir, total_steps)
    trainer_class.claim(config, data.val, run_dir)
    save_config(loaded, run_dir / "config.yaml")
    seed_random_state(config.trainer.seed)
    if trainer_class.trains:
        console.print(launch_table(config, slots, total_steps))
        console.start(total_steps)
    with (
        Tracking(run_dir, config, console) as tracking,
        build_trainer(config, data, run_dir, tracking, trainer_class) as trainer,
        stopping_on_signal(trainer.steps.stop, console.note),
        capsule_on_failure(trainer),
    ):
        result = trainer.fit()
    more = "rollout.val_kwargs.n=8"
    if is_agentic(config) and config.agentic.val_batch_size > 0:
        more = f"agentic.val_batch_size={4 * config.agentic.val_batch_size}"
    console.print(final_report(result, run_dir, draw_curve(run_dir), more))
    if result.stopped:
        console.print(how_to_continue(argv, run_dir))
        return INTERRUPTED
    return 0


def how_to_continue(argv: list[str], run_dir: Path) -> str:
    """The command that goes on where a stopped run ended."""
    folder = f"trainer.default_local_dir={run_dir}"
    return "Stopped. To go on:\n  " + shlex.join(
        ["python", "-m", "trainer.main_ppo", *argv, folder, "trainer.resume_mode=auto"]
    )


def available_devices(config: PPOConfig) -> int:
    """GPUs that this process sees, or its CPU cores."""
    return visible_devices(device_type(config.trainer.device))


def resolve_slots(config: PPOConfig) -> int:
    """Fills in trainer.n_gpus_per_node and gives the number of slots of the run."""
    trainer = config.trainer
    if trainer.n_gpus_per_node is None:
        available = available_devices(config)
        on_cpu = device_type(trainer.device) == "cpu"
        trainer.n_gpus_per_node = min(MOST_DEFAULT_CPU_SLOTS, available) if on_cpu else available
        if trainer.backend == "inline":
            trainer.n_gpus_per_node = 1
    return trainer.n_gpus_per_node * trainer.nnodes


def run_folder(config: PPOConfig) -> Path:
    """Where the run folder is, or will be."""
    return Path(config.trainer.default_local_dir).absolute()


@contextmanager
def held_folder(run_dir: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, no other run can write to this run folder. Raises UserError if one does already."""
    with ExitStack() as stack:
        try:
            stack.enter_context(leased_file(run_dir / "in_use", Holder.this_process(str(run_dir))))
        except LeaseTaken as error:
            raise UserError(
                f"trainer.default_local_dir={run_dir} is in use by {error}: choose another trainer.experiment_name, "
                "or wait"
            ) from None
        except OSError as error:
            tell(f"{run_dir} cannot be locked ({error.strerror}): a second run in it would not be noticed")
        yield


def make_run_dir(config: PPOConfig) -> Path:
    """Makes the run folder. A folder that holds another run is refused unless the run is to be resumed."""
    run_dir = run_folder(config)
    taken = (run_dir / "metrics.jsonl").exists() or saved_steps(run_dir)
    if taken and config.trainer.resume_mode == "disable":
        raise UserError(
            f"trainer.default_local_dir={run_dir} holds a run already, and trainer.resume_mode=disable. Choose another "
            "trainer.experiment_name, or continue that run with trainer.resume_mode=auto"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir
