"""`python -m trainer.plan [--like MODEL] [--device h100] [--memory_gb 80] [--mean_prompt 100] [--mean_response 700]
[--fit] key=value ...`: predicts memory and time of a run from its options.

Reads the options of `trainer.main_ppo`, or of --command main_sft or main_rm, and the config.json of `model.path` (no
weights), or the sizes of a published model. Needs no device, data or cluster, whatever `trainer.n_gpus_per_node` and
`trainer.nnodes` are. Prints the batch arithmetic, the memory of each phase, whether the run fits, and for main_ppo the
time of a step. Exit status: 0 the run fits, 1 it does not fit, 2 invalid options. A run shows two lines of the plan in
its launch table, and after its end one line that compares them with the measured memory.
"""

import argparse
import contextlib
import copy
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.cli import command
from trainer.planner.accelerators import ACCELERATORS, Accelerator, with_measured_rate
from trainer.planner.batch import PlanRow, aligned, check_context, launch_table
from trainer.planner.fit import BUDGET, decide_sharding, fewer_processes, fit_table
from trainer.planner.memory import (
    FP32,
    GIB,
    MemoryPlan,
    compute_size,
    memory_plan,
    read_networks,
)
from trainer.planner.model_shape import LIKE, ModelShape, config_like, read_shape
from trainer.planner.step_time import Lengths, time_lines
from trainer.planner.supervised import longest_step, read_network, supervised_plan, supervised_rows
from trainer.saving import checkpoint_bytes, most_checkpoints
from trainer.tracking import METRICS, read_metrics
from verl_lite.config import (
    ConfigError,
    PPOConfig,
    RewardTrainingConfig,
    RunOptions,
    SFTConfig,
    SupervisedConfig,
    load_schema,
)
from verl_lite.config.checks import section_problems, validate
from verl_lite.device import device_type, visible_devices
from verl_lite.errors import UserError
from verl_lite.machine.host import available_memory
from workers.rollout.base import choose_engine, engine_names

_ANY_DATA = ["owner/name"]  # replaces data files, which need not exist for a plan


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    from trainer.recipe import recipe_overrides

    parser = argparse.ArgumentParser(prog="python -m trainer.plan", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--command", choices=("main_ppo", "main_sft", "main_rm"), default="main_ppo", help="command to plan")
    add("--like", type=str.lower, choices=LIKE, help="published model to plan for, instead of model.path")
    add("--device", type=str.lower, choices=ACCELERATORS, help="accelerator to plan for; default: h100")
    add("--memory_gb", type=float, help="memory of one device in GiB; default: that of --device")
    add("--mean_prompt", type=float, help="mean prompt tokens, for the time; default: data.max_prompt_length")
    add("--mean_response", type=float, help="mean response tokens, for the time; default: data.max_response_length")
    add("--placement", action="store_true", help=argparse.SUPPRESS)
    add("--fit", action="store_true", help="find the cheapest changes that fit 8, 16, 24, 80 GiB and the device")
    given, rest = parser.parse_known_args(argv)
    device = ACCELERATORS[given.device or "h100"]
    if given.placement:  # its last version was 0.1
        raise UserError(
            "--placement was removed, because its simulation was never compared with a GPU run: compare short runs "
            "with hybrid_engine=true and false, see trainer/ASYNC.md#engines-on-devices-of-their-own"
        )
    if given.command != "main_ppo":
        return _plan_supervised(SFTConfig if given.command == "main_sft" else RewardTrainingConfig, rest, given, device)
    config = load_schema(rest, PPOConfig, recipe_loader=recipe_overrides).config
    config.trainer.device = "cpu" if device.name == "cpu" else "cuda"  # the planned device, not this machine's
    longest = Lengths(config.data.max_prompt_length, config.data.max_response_length)
    limits = {"memory_gb": math.inf, "mean_prompt": longest.prompt, "mean_response": longest.response}
    for name, most in limits.items():
        if (value := getattr(given, name)) is not None and not 0 < value <= most:
            raise UserError(f"--{name} {value:g}: expected a number above 0 and at most {most}")
    path, recipe = config.model.path, config.recipe
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        if given.like is not None:
            _write_config_like(config, given.like, folder)
        elif recipe is not None and path is not None and Path(path).is_absolute() and not Path(path).is_dir():
            raise UserError(
                f"model.path={path!r} does not exist yet: recipe={recipe} creates it in its first run. To create it "
                f"and plan: python -m trainer.main_ppo recipe={recipe} trainer.dry_run=true; or plan with --like NAME"
            )
        if given.fit and device.name == "cpu":
            raise UserError("--fit with --device cpu: expected a GPU, such as --device h100 --memory_gb 24")
        networks, slots = read_networks(config), _slots(config, device)
        if given.fit and config.actor.use_dynamic_bsz:  # a micro-batch holds the longest row
            ranks, budget = config.actor.ulysses_sequence_parallel_size, config.actor.ppo_max_token_len_per_gpu
            config.actor.ppo_max_token_len_per_gpu = max(budget, math.ceil(sum(longest) / ranks))
            rest = [*rest, f"{BUDGET}={config.actor.ppo_max_token_len_per_gpu}"]
        _check(config, slots)
        if config.rollout.name == "auto" and device.name == "cpu":
            length = config.rollout.max_model_len or config.longest_sample
            config.rollout.name, reason = choose_engine(config.model, config.rollout, length, "cpu")
            print(f"rollout.name=auto chooses {config.rollout.name}: {reason}")
        memory = given.memory_gb or device.memory_gib
        if device.name != "cpu":
            device = replace(device, memory_gib=memory)  # the engine takes a share of it
        _print_model(networks.policy, config, slots, device, given)
        undecided = copy.deepcopy(config)
        if decision := decide_sharding(config, networks, slots, device, memory):
            print(decision)
        print(f"\n{launch_table(config, slots, config.trainer.total_training_steps)}\n")
        plan = memory_plan(config, networks, slots, device)
        print("\n".join(plan.lines(device.name, memory)))
        if memory is not None and not plan.fits(memory * GIB):
            print(fewer_processes(config, networks, slots, device, memory))
        mean = Lengths(given.mean_prompt or longest.prompt, given.mean_response or longest.response)
        print("", *time_lines(config, networks, slots, with_measured_rate(device), mean), sep="\n")
        fits = memory is None or plan.fits(memory * GIB)
        if given.fit and memory is not None:
            fits, lines = fit_table(undecided, networks, slots, device, memory, rest)
            print("", *lines, sep="\n")
        check_context(config)
        return int(not fits)


def _plan_supervised(
    options: type[SupervisedConfig], rest: list[str], given: argparse.Namespace, device: Accelerator
) -> int:
    """Prints the plan of a supervised command for rows of the maximum length. Returns the exit status."""
    for name in ("mean_prompt", "mean_response", "fit"):
        if getattr(given, name):
            raise UserError(f"--{name} with --command {given.command}: only main_ppo has it; leave it out")
    config = load_schema(rest, options).config
    config.trainer.device = "cpu" if device.name == "cpu" else "cuda"
    problems = list(section_problems(config))
    if config.data.max_token_len_per_gpu < (longest := longest_step(config)).longest:
        problems.append(
            f"data.max_token_len_per_gpu={config.data.max_token_len_per_gpu}: a row may have {longest.longest} tokens, "
            "which a micro-batch has to hold; raise it, or lower data.max_length"
        )
    if problems:
        raise ConfigError(problems)
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        if given.like is not None:
            _write_config_like(config, given.like, folder)
        slots, memory = _slots(config, device), given.memory_gb or device.memory_gib
        network = read_network(config, slots, device)
        _print_model(network.shape, config, slots, device, given)
        print(f"\n{aligned(supervised_rows(config, slots, config.trainer.total_training_steps, [longest]))}\n")
        plan = supervised_plan(config, network, slots, device, longest)
        print("\n".join(plan.lines(device.name, memory)))
        return int(memory is not None and not plan.fits(memory * GIB))


def _write_config_like(config: PPOConfig | SupervisedConfig, like: str, folder: str) -> None:
    """Sets model.path to a new folder with the config.json of a published model."""
    if config.model.path is not None and config.recipe is None:
        raise UserError(f"--like and model.path={config.model.path!r} contradict each other: leave one out")
    config.model.path = str(Path(folder, like))
    Path(config.model.path).mkdir()
    Path(config.model.path, "config.json").write_text(json.dumps(config_like(like)), encoding="utf-8")


def _print_model(
    shape: ModelShape, config: RunOptions, slots: int, device: Accelerator, given: argparse.Namespace
) -> None:
    nodes = config.trainer.nnodes
    print(
        f"{shape.parameters / 1e9:.2f} B parameters ({shape.layers} layers of {shape.hidden}, vocabulary "
        f"{shape.vocab}), on {slots} x {device.name}" + (f" in {nodes} machines" if nodes > 1 else "")
    )
    if given.device is None:
        print(f"--device is not given: planned for {device.name}. For another: --device NAME, --memory_gb GIB")


def _slots(config: RunOptions, device: Accelerator) -> int:
    """Returns the number of devices of the run. trainer.n_gpus_per_node=null becomes 8, or at most 2 on a CPU, or 1
    with the inline backend."""
    trainer = config.trainer
    if trainer.n_gpus_per_node is None:
        trainer.n_gpus_per_node = min(2, visible_devices("cpu")) if device.name == "cpu" else 8
        if trainer.backend == "inline":
            trainer.n_gpus_per_node = 1
    return trainer.n_gpus_per_node * trainer.nnodes


def _check(config: PPOConfig, slots: int) -> None:
    """Raises UserError if the options contradict each other. Data files and clusters need not exist."""
    checked = copy.deepcopy(config)
    checked.trainer.device = "cpu"
    checked.data.train_files = list(_ANY_DATA)
    checked.data.val_files = list(_ANY_DATA) if config.data.val_files else []
    ray_init = checked.ray_kwargs.ray_init
    if checked.trainer.nnodes > 1 and ray_init.address is None:
        ray_init.address, ray_init.num_cpus = "HOST:6379", None
    validate(checked, engines=engine_names(), slots=slots, available=None)


# -- at launch and after -----------------------------------------------------------------------------------------------


def launch_device(config: RunOptions) -> Accelerator:
    """Returns an accelerator with the name and memory of this run's devices; its other numbers are an H100's."""
    if device_type(config.trainer.device) == "cpu":
        return ACCELERATORS["cpu"]
    import torch

    properties = torch.cuda.get_device_properties(0)
    return replace(ACCELERATORS["h100"], name=properties.name, memory_gib=properties.total_memory / GIB)


def policy_work(config: PPOConfig) -> tuple[ModelShape, float] | None:
    """Returns the policy's shape and the bf16 FLOP/s of this run's devices. Returns None on a CPU, in fp32, and if the
    shape or the device is unknown."""
    device = launch_device(config)
    words = device.name.lower().replace("-", " ").split()  # H100 PCIe and H100 NVL have other peaks than the SXM form
    known = [peak for name, peak in ACCELERATORS.items() if name in words and not {"pcie", "nvl"} & {*words}]
    size = compute_size(config.actor.fsdp_config.mixed_precision.param_dtype, device)
    if device.name == "cpu" or not known or size == FP32:
        return None
    try:
        return read_shape(config.model), known[0].flops
    except UserError:
        return None


def device_memory_gib(device: Accelerator, slots_here: int) -> float:
    """Returns the memory of one of this machine's devices in GiB; for a CPU worker, its share of the free memory."""
    return device.memory_gib or available_memory() / GIB / slots_here


def sharding_of_run(config: PPOConfig, slots: int) -> str:
    """Calls `decide_sharding` for this run's devices and returns its sentence. Does nothing if the model's shapes are
    unknown."""
    device = launch_device(config)
    memory_gib = device_memory_gib(device, max(1, slots // config.trainer.nnodes))
    with contextlib.suppress(UserError):
        return decide_sharding(config, read_networks(config), slots, device, memory_gib)
    return ""


def expected_rows(config: PPOConfig, slots: int, total_steps: int | None) -> list[PlanRow]:
    """Returns the rows of the launch table with the memory of the fullest phase and the disk space."""

    def plan() -> MemoryPlan:
        return memory_plan(config, read_networks(config), slots, launch_device(config))

    return memory_rows(config, plan, total_steps, config.trainer.samples_max_mb)


def memory_rows(
    config: PPOConfig | SupervisedConfig, plan: Callable[[], MemoryPlan], total_steps: int | None, samples_max_mb: int
) -> list[PlanRow]:
    """Returns the rows of `expected_rows`. If the model's shapes are unknown, so that `plan` raises UserError, the only
    row gives the reason."""
    try:
        found = plan()
    except UserError as error:
        return [PlanRow("memory per device, expected", "?", str(error))]
    one, samples = checkpoint_bytes(config) / GIB, samples_max_mb / 1024
    count = most_checkpoints(config.trainer, total_steps or 1)
    kept = f"{count} checkpoint{'s' * (count != 1)} of {one:.2f}" if count else "no checkpoints"
    phase = f"in {found.worst}{', not measured on a GPU' * (found.base is None)}; trainer.dry_run=true shows all phases"
    disk = f"{kept} (trainer.save_freq)"
    disk += f", samples {samples:.2f} (trainer.samples_max_mb)" if isinstance(config, PPOConfig) else ""
    return [
        PlanRow("memory per device, expected", f"{found.device_bytes / GIB:.2f} GiB", phase),
        PlanRow("disk, at most", f"{count * one + samples:.2f} GiB", disk),
    ]


def measured_line(config: PPOConfig, slots: int, run_dir: Path) -> str:
    """Returns the sentence at the end of a run that compares the measured memory of the fullest worker with the plan.

    The plan is computed for the largest mean prompt and response lengths of all steps. Returns an empty string if
    nothing was measured or planned.
    """
    try:
        networks, device = read_networks(config), launch_device(config)
    except UserError:
        return ""
    steps, on_cpu = list(read_metrics(run_dir / METRICS).values()), device.name == "cpu"
    if (measured := measured_gib(steps, device, "actor")) is None:
        return ""
    observed = copy.deepcopy(config)  # with the largest logged mean lengths instead of the maximum lengths
    for key, name in (("max_prompt_length", "prompt_length/mean"), ("max_response_length", "response_length/mean")):
        setattr(observed.data, key, max(1, math.ceil(_maximum(steps, name) or getattr(observed.data, key))))
    # the cache of the engine was built for the maximum lengths
    observed.rollout.max_model_len = config.rollout.max_model_len or config.longest_sample
    plans = (memory_plan(planned, networks, slots, device) for planned in (config, observed))
    whole, expected = ((plan.device_bytes if on_cpu else plan.peak) / GIB for plan in plans)
    return (
        f"Memory of the fullest worker: {measured:.2f} GiB measured, {expected:.2f} expected "
        f"({expected / measured - 1:+.0%}) for the lengths of this run, {whole:.2f} for the maximum lengths"
    )


def measured_gib(steps: Sequence[Mapping[str, float]], device: Accelerator, role: str) -> float | None:
    """Returns the peak memory of the fullest worker in the metrics of all steps; None if it was not measured."""
    return _maximum(steps, f"{role}/perf/{'host_peak_gb' if device.name == 'cpu' else 'max_memory_reserved_gb'}")


def supervised_measured_line(plan: Callable[[], MemoryPlan], device: Accelerator, run_dir: Path) -> str:
    """Returns the sentence of `measured_line` for a supervised run, whose plan is computed for the rows of the run."""
    measured = measured_gib(list(read_metrics(run_dir / METRICS).values()), device, "train")
    with contextlib.suppress(UserError):
        if measured is not None:
            found = plan()
            expected = (found.device_bytes if device.name == "cpu" else found.peak) / GIB
            return (
                f"Memory of the fullest worker: {measured:.2f} GiB measured, {expected:.2f} expected "
                f"({expected / measured - 1:+.0%}) for the rows of this run"
            )
    return ""


def _maximum(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    return max((step[name] for step in steps if name in step), default=None)


if __name__ == "__main__":
    raise SystemExit(main())
