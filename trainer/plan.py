"""`python -m trainer.plan [--like MODEL] [--device h100] [--memory_gb 80] [--mean_prompt 100] [--mean_response 700]
key=value ...`: what a run would take, from its options alone.

Takes the options of `trainer.main_ppo` and the config.json of `model.path` (no weights are read), or the sizes of a
published model; needs no device, no data and no cluster, whatever `trainer.n_gpus_per_node` and `trainer.nnodes` say.
Prints the batch arithmetic, memory by phase, whether it fits, and the time of a step. Exit status: 0 it fits, 1 it does
not, 2 wrong options. A run has two lines of it in its table at launch, and one after its end with what was measured.
"""

import argparse
import contextlib
import copy
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.cli import command
from trainer.planner.batch import PlanRow, launch_table
from trainer.planner.memory import (
    ACCELERATORS,
    FP32,
    GIB,
    Accelerator,
    Networks,
    compute_size,
    memory_plan,
    read_networks,
)
from trainer.planner.model_shape import LIKE, ModelShape, config_like, read_shape
from trainer.planner.step_time import Lengths, time_lines
from trainer.saving import checkpoint_bytes, most_checkpoints
from trainer.tracking import METRICS, read_metrics
from verl_lite.config import PPOConfig, load_schema
from verl_lite.config.checks import validate
from verl_lite.device import device_type, visible_devices
from verl_lite.errors import UserError
from verl_lite.machine.host import available_memory
from workers.rollout.base import engine_names, vllm_problem

_ANY_DATA = ["owner/name"]  # in place of files that need not be here


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    from trainer.recipe import recipe_overrides

    parser = argparse.ArgumentParser(prog="python -m trainer.plan", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--like", type=str.lower, choices=LIKE, help="sizes of a published model, in place of model.path")
    add("--device", type=str.lower, choices=ACCELERATORS, help="default: h100, and the plan says so")
    add("--memory_gb", type=float, help="GiB of one device; default: the device's")
    add("--mean_prompt", type=float, help="mean tokens of a prompt, for the time; default: the most")
    add("--mean_response", type=float, help="mean tokens of an answer, for the time; default: the most")
    given, rest = parser.parse_known_args(argv)
    device = ACCELERATORS[given.device or "h100"]
    config = load_schema(rest, PPOConfig, recipe_loader=recipe_overrides).config
    config.trainer.device = "cpu" if device.name == "cpu" else "cuda"  # of the plan, whatever this machine has
    longest = Lengths(config.data.max_prompt_length, config.data.max_response_length)
    limits = {"memory_gb": math.inf, "mean_prompt": longest.prompt, "mean_response": longest.response}
    for name, most in limits.items():
        if (value := getattr(given, name)) is not None and not 0 < value <= most:
            raise UserError(f"--{name} {value:g}: expected a number above 0 and at most {most}")
    path, recipe = config.model.path, config.recipe
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        if given.like is not None:
            if path is not None and recipe is None:
                raise UserError(f"--like and model.path={path!r} contradict each other: leave one out")
            Path(folder, "config.json").write_text(json.dumps(config_like(given.like)), encoding="utf-8")
            config.model.path = folder
        elif recipe is not None and path is not None and Path(path).is_absolute() and not Path(path).is_dir():
            raise UserError(
                f"model.path={path!r} is not there: recipe={recipe} makes it at its first run. Let it, and see its "
                f"plan: python -m trainer.main_ppo recipe={recipe} trainer.dry_run=true; or plan with --like NAME"
            )
        networks, slots = read_networks(config), _slots(config, device)
        _check(config, slots)
        is_auto_on_cpu = config.rollout.name == "auto" and device.name == "cpu"
        if is_auto_on_cpu and (problem := vllm_problem(config.model, config.rollout, "cpu")):
            config.rollout.name = "hf"
            print(f"rollout.name=auto chooses hf: {problem}")
        shape, memory, nodes = networks.policy, given.memory_gb or device.memory_gib, config.trainer.nnodes
        print(
            f"{shape.parameters / 1e9:.2f} B parameters ({shape.layers} layers of {shape.hidden}, vocabulary "
            f"{shape.vocab}), on {slots} x {device.name}" + (f" in {nodes} machines" if nodes > 1 else "")
        )
        if given.device is None:
            print(f"--device is not given: planned for {device.name}. For another: --device NAME, --memory_gb GIB")
        if told := decide_sharding(config, networks, slots, device, memory):
            print(told)
        print(f"\n{launch_table(config, slots, config.trainer.total_training_steps)}\n")
        plan = memory_plan(config, networks, slots, device)
        print("\n".join(plan.lines(device.name, memory)))
        mean = Lengths(given.mean_prompt or longest.prompt, given.mean_response or longest.response)
        print("", *time_lines(config, networks, slots, device, mean), sep="\n")
        return int(memory is not None and not plan.fits(memory * GIB))


def _slots(config: PPOConfig, device: Accelerator) -> int:
    """Devices of the run; trainer.n_gpus_per_node=null stands for 8, or on a CPU for 2."""
    trainer = config.trainer
    if trainer.n_gpus_per_node is None:
        trainer.n_gpus_per_node = min(2, visible_devices("cpu")) if device.name == "cpu" else 8
        if trainer.backend == "inline":
            trainer.n_gpus_per_node = 1
    return trainer.n_gpus_per_node * trainer.nnodes


def _check(config: PPOConfig, slots: int) -> None:
    """Whether the options fit each other; files and clusters that are elsewhere are not looked for."""
    checked = copy.deepcopy(config)
    checked.trainer.device = "cpu"
    checked.data.train_files = list(_ANY_DATA)
    checked.data.val_files = list(_ANY_DATA) if config.data.val_files else []
    ray_init = checked.ray_kwargs.ray_init
    if checked.trainer.nnodes > 1 and ray_init.address is None:
        ray_init.address, ray_init.num_cpus = "HOST:6379", None
    validate(checked, engines=engine_names(), slots=slots, available=None)


# -- at launch and after -----------------------------------------------------------------------------------------------


def launch_device(config: PPOConfig) -> Accelerator:
    """What this run's own devices are like, as far as memory goes."""
    if device_type(config.trainer.device) == "cpu":
        return ACCELERATORS["cpu"]
    import torch

    properties = torch.cuda.get_device_properties(0)
    return replace(ACCELERATORS["h100"], name=properties.name, memory_gib=properties.total_memory / GIB)


def policy_work(config: PPOConfig) -> tuple[ModelShape, float] | None:
    """The policy's shape, and FLOP/s of this run's devices in bf16; None on a CPU, in fp32, and where either is not
    known."""
    device = launch_device(config)
    words = device.name.lower().replace("-", " ").split()  # H100 PCIe and H100 NVL have other peaks than SXM's
    known = [peak for name, peak in ACCELERATORS.items() if name in words and not {"pcie", "nvl"} & {*words}]
    size = compute_size(config.actor.fsdp_config.mixed_precision.param_dtype, device)
    if device.name == "cpu" or not known or size == FP32:
        return None
    try:
        return read_shape(config.model), known[0].flops
    except UserError:
        return None


def device_memory_gib(device: Accelerator, slots_here: int) -> float:
    """Of one of this machine's devices; of a CPU worker its part of what is free."""
    return device.memory_gib or available_memory() / GIB / slots_here


def decide_sharding(
    config: PPOConfig, networks: Networks, slots: int, device: Accelerator, memory_gib: float | None
) -> str:
    """Decides `fsdp_size` (where the actor's is null) and `reduce_every_micro_batch`; returns what to tell of it.

    GPUs of several machines get a copy of the weights in each, whose layers are then gathered within it, if that fits;
    where whole gradients do not fit beside the rest, they are summed in each micro-batch.
    """
    actor, critic = config.actor.fsdp_config, config.critic.fsdp_config
    is_open = actor.fsdp_size is None
    sizes = [each for each in (actor, critic, config.ref.fsdp_config) if is_open and each.fsdp_size is None]
    sums = [each for each in (actor, critic) if each.reduce_every_micro_batch is None]
    ways = [(-1, False)]
    if device.name != "cpu":
        inside = [(slots // config.trainer.nnodes, False)] if config.trainer.nnodes > 1 and sizes else []
        ways = [*inside, (-1, False), (-1, True)]
    told = ""
    for size, each_time in ways:
        for fsdp in sizes:
            fsdp.fsdp_size = size
        for fsdp in sums:
            fsdp.reduce_every_micro_batch = each_time
        if size > 0:
            told = f"each machine has a copy of the weights: fsdp_config.fsdp_size={size}"
        else:
            told = "whole gradients do not fit: fsdp_config.reduce_every_micro_batch=true" if each_time and sums else ""
        if memory_gib is None or memory_plan(config, networks, slots, device).fits(memory_gib * GIB):
            break
    return told


def sharding_of_run(config: PPOConfig, slots: int) -> str:
    """`decide_sharding` for this run's GPUs, and what to tell of it; not where the model's shapes are not known."""
    device = launch_device(config)
    if device.name != "cpu":
        with contextlib.suppress(UserError):
            return decide_sharding(config, read_networks(config), slots, device, device.memory_gib)
    return ""


def expected_rows(config: PPOConfig, slots: int, total_steps: int | None) -> list[PlanRow]:
    """Lines for the table at launch: memory of the fullest phase, disk. Where the model's shapes are not known, why."""
    try:
        networks = read_networks(config)
    except UserError as error:
        return [PlanRow("memory per device, expected", "?", str(error))]
    plan = memory_plan(config, networks, slots, launch_device(config))
    one, count = checkpoint_bytes(config) / GIB, most_checkpoints(config.trainer, total_steps or 1)
    samples = config.trainer.samples_max_mb / 1024
    kept = f"{count} checkpoint{'s' * (count != 1)} of {one:.2f}" if count else "no checkpoints"
    phase = f"in {plan.worst}{', not measured on a GPU' * (plan.base is None)}; python -m trainer.plan shows all phases"
    disk = f"{kept} (trainer.save_freq), samples {samples:.2f} (trainer.samples_max_mb)"
    return [
        PlanRow("memory per device, expected", f"{plan.device_bytes / GIB:.2f} GiB", phase),
        PlanRow("disk, at most", f"{count * one + samples:.2f} GiB", disk),
    ]


def measured_line(config: PPOConfig, slots: int, run_dir: Path) -> str:
    """After a run: measured memory of the fullest worker, and what the plan expects for prompts and answers as long as
    those of the step whose mean was longest. Empty where nothing was measured or planned."""
    try:
        networks, device = read_networks(config), launch_device(config)
    except UserError:
        return ""
    steps, on_cpu = list(read_metrics(run_dir / METRICS).values()), device.name == "cpu"
    measured = _highest(steps, f"actor/perf/{'host_peak_gb' if on_cpu else 'max_memory_reserved_gb'}")
    if measured is None:
        return ""
    met = copy.deepcopy(config)  # with the greatest mean lengths that were logged in place of those allowed
    for key, name in (("max_prompt_length", "prompt_length/mean"), ("max_response_length", "response_length/mean")):
        setattr(met.data, key, max(1, math.ceil(_highest(steps, name) or getattr(met.data, key))))
    plans = (memory_plan(asked, networks, slots, device) for asked in (config, met))
    whole, expected = ((plan.device_bytes if on_cpu else plan.peak) / GIB for plan in plans)
    return (
        f"Memory of the fullest worker: {measured:.2f} GiB measured, {expected:.2f} expected "
        f"({expected / measured - 1:+.0%}) for rows as long as here, {whole:.2f} for the longest allowed"
    )


def _highest(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    return max((step[name] for step in steps if name in step), default=None)


if __name__ == "__main__":
    raise SystemExit(main())
