"""`python -m trainer.plan [--like MODEL] [--device h100] [--memory_gb 80] [--mean_response 700] key=value ...`: what a
run would take, from its options alone.

Takes the options of `trainer.main_ppo` and the config.json of `model.path` (no weights are read), or the sizes of a
published model; needs no device, no data and no cluster, whatever `trainer.n_gpus_per_node` and `trainer.nnodes` say.
Prints the batch arithmetic, memory by phase, whether it fits, and the time of a step. Exit status:
0 it fits, 1 it does not, 2 wrong options.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path

from trainer.planner.batch import launch_table
from trainer.planner.model_shape import LIKE, config_like
from trainer.planner.report import memory_lines, time_lines
from trainer.planner.run_memory import Networks, memory_plan, read_networks
from trainer.planner.step_time import ACCELERATORS, Accelerator, Efficiency, accelerator
from trainer.planner.table import GIB
from verl_lite.config import PPOConfig, load_schema
from verl_lite.config.checks import validate
from verl_lite.device import visible_devices
from verl_lite.errors import UserError

ASSUMED_DEVICE = "h100"
ANY_DATA = ["owner/name"]  # in place of files that need not be here


def run(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from trainer.recipe import recipe_overrides

    parser = argparse.ArgumentParser(prog="python -m trainer.plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("--like", help="sizes of a published model, in place of model.path")
    parser.add_argument("--device", help=f"{' | '.join(ACCELERATORS)}; default: {ASSUMED_DEVICE}, and the plan says so")
    parser.add_argument("--memory_gb", type=float, help="GiB of one device; default: the device's")
    parser.add_argument("--mean_response", type=float, help="mean tokens of an answer, for the time; default: the most")
    parser.add_argument("--compute", type=float, default=Efficiency.training, help="share of the peak in training")
    parser.add_argument("--bandwidth", type=float, default=Efficiency.bandwidth, help="share of the peak in decoding")
    given, rest = parser.parse_known_args(argv)
    device = accelerator(given.device or ASSUMED_DEVICE)
    assumed = Efficiency(training=given.compute, bandwidth=given.bandwidth)
    _check_numbers(given.memory_gb, given.mean_response, assumed)
    config = load_schema(rest, PPOConfig, recipe_loader=recipe_overrides).config
    longest = config.data.max_response_length
    if given.mean_response is not None and given.mean_response > longest:
        raise UserError(f"--mean_response {given.mean_response:g} is more than data.max_response_length={longest}")
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        if given.like is not None:
            _take_like(config, given.like, Path(folder))
        _require_made_model(config)
        networks = read_networks(config)
        slots = slots_of(config, device)
        check(config, slots, device)
        if given.device is None:
            print(f"--device is not given: planned for {device.name}. For another: --device NAME, --memory_gb GIB\n")
        return show(config, networks, slots, device, assumed, given.memory_gb, given.mean_response)


def show(
    config: PPOConfig,
    networks: Networks,
    slots: int,
    device: Accelerator,
    assumed: Efficiency,
    memory_gib: float | None,
    response_length: float | None,
) -> int:
    """Prints the plan; 1 where it does not fit."""
    shape, memory = networks.policy, memory_gib or device.memory_gib
    nodes = config.trainer.nnodes
    print(
        f"{shape.parameters / 1e9:.2f} B parameters ({shape.layers} layers of {shape.hidden}, vocabulary "
        f"{shape.vocab}), on {slots} x {device.name}" + (f" in {nodes} machines" if nodes > 1 else "")
    )
    print(f"\n{launch_table(config, slots, config.trainer.total_training_steps)}\n")
    print("\n".join(memory_lines(config, networks, slots, device, memory)))
    if device.name != "cpu":
        print("Calculated from shapes; the formulas are measured on a CPU, not on a GPU.")
    print()
    print("\n".join(time_lines(config, networks, slots, device, assumed, response_length)))
    return 0 if memory is None else int(not memory_plan(config, networks, slots, device).fits(memory * GIB))


def _check_numbers(memory: float | None, response: float | None, assumed: Efficiency) -> None:
    for name, value in (("--memory_gb", memory), ("--mean_response", response)):
        if value is not None and not value > 0:
            raise UserError(f"{name} {value:g}: expected a number above 0")
    for name, value in (("--compute", assumed.training), ("--bandwidth", assumed.bandwidth)):
        if not 0 < value <= 1:
            raise UserError(f"{name} {value:g}: expected a share of the device's peak, above 0 and at most 1")


def _take_like(config: PPOConfig, name: str, folder: Path) -> None:
    """Puts a published model's config.json in place of the policy's folder."""
    if config.model.path is not None and config.recipe is None:
        raise UserError(f"--like {name} and model.path={config.model.path!r} contradict each other: leave one out")
    (folder / "config.json").write_text(json.dumps(config_like(name)), encoding="utf-8")
    config.model.path = str(folder)


def _require_made_model(config: PPOConfig) -> None:
    """A recipe may name a model that it makes itself when it is run: the message says how to get it."""
    path = config.model.path
    if config.recipe is not None and path is not None and Path(path).is_absolute() and not Path(path).is_dir():
        raise UserError(
            f"model.path={path!r} is not there: recipe={config.recipe} makes it at its first run. Let it, and see its "
            f"plan: python -m trainer.main_ppo recipe={config.recipe} trainer.dry_run=true; or plan with other sizes: "
            f"--like {' | '.join(LIKE)}"
        )


def slots_of(config: PPOConfig, device: Accelerator) -> int:
    """Devices of the run; trainer.n_gpus_per_node=null stands for 8, or on a CPU for 2."""
    trainer = config.trainer
    if trainer.n_gpus_per_node is None:
        trainer.n_gpus_per_node = min(2, visible_devices("cpu")) if device.name == "cpu" else 8
        if trainer.backend == "inline":
            trainer.n_gpus_per_node = 1
    return trainer.n_gpus_per_node * trainer.nnodes


def check(config: PPOConfig, slots: int, device: Accelerator) -> None:
    """Whether the options fit each other; files and clusters that are elsewhere are not looked for."""
    checked = copy.deepcopy(config)
    checked.trainer.device = "cpu"
    checked.data.train_files = list(ANY_DATA)
    checked.data.val_files = list(ANY_DATA) if config.data.val_files else []
    ray_init = checked.ray_kwargs.ray_init
    if checked.trainer.nnodes > 1 and ray_init.address is None:
        ray_init.address, ray_init.num_cpus = "HOST:6379", None
    validate(checked, slots=slots, available=None)
