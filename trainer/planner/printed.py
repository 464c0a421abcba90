"""Prints the plan of `python -m trainer.plan`: one function for each kind of training."""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

from trainer.cli import MOST_DEFAULT_CPU_SLOTS
from trainer.planner.accelerators import ACCELERATORS, Accelerator, with_measured_rate
from trainer.planner.batch import aligned, check_context, launch_table
from trainer.planner.fit import BUDGET, decide_sharding, fewer_processes, fit_table
from trainer.planner.memory import memory_plan
from trainer.planner.memory_table import GIB, MemoryPlan
from trainer.planner.model_shape import ModelShape, config_like
from trainer.planner.networks import BF16, FP32, Networks, read_networks
from trainer.planner.step_time import Lengths, time_lines
from trainer.planner.supervised import longest_step, read_network, supervised_plan, supervised_rows
from trainer.recipe import prepare_recipe, recipe_overrides
from verl_lite.config import ConfigError, PPOConfig, RunOptions, SupervisedConfig, load_schema
from verl_lite.config.checks import section_problems, validate
from verl_lite.errors import UserError
from verl_lite.machine.device import visible_devices
from workers.engines.base import choose_engine, engine_names

# replaces data files, which need not exist for a plan
_ANY_DATA = ["owner/name"]


def print_ppo_plan(arguments: argparse.Namespace, words: list[str]) -> int:
    """Prints the plan of `trainer.main_ppo` and returns the exit status.

    Args:
        arguments: Options of the command `trainer.plan`.
        words: `key=value` options of the training.
    """
    device = _device(arguments)
    if arguments.fit and device.name == "cpu":
        raise UserError("--fit with --device cpu: expected a GPU, such as --device h100 --memory_gb 24")
    config = load_schema(words, PPOConfig, recipe_loader=recipe_overrides).config
    _set_device(config, device)
    longest = Lengths(config.data.max_prompt_length, config.data.max_response_length)
    _check_numbers(arguments, longest)

    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        _choose_model(config, arguments.like, folder)
        networks = read_networks(config)
        slots = _slots(config, device)
        # the options that --fit prints must hold the longest row, whatever the user's budget is
        words_of_fit = list(words)
        if arguments.fit and config.actor.use_dynamic_bsz:
            words_of_fit += _make_room_for_longest_row(config, longest)
        _check(config, slots)

        if config.rollout.name == "auto" and device.name == "cpu":
            _choose_engine(config)
        memory_gib = arguments.memory_gb or device.memory_gib
        if device.name != "cpu":
            # the engine takes a share of the planned device's memory
            device = replace(device, memory_gib=memory_gib)

        _print_model(networks.policy, config, slots, device, arguments)
        # for --fit, which makes the decisions of `decide_sharding` again for each size of a device
        undecided = copy.deepcopy(config)
        decision = decide_sharding(config, networks, slots, device, memory_gib)
        if decision:
            print(decision)
        print(f"\n{launch_table(config, slots, config.trainer.total_training_steps)}\n")
        fits = _print_memory(config, networks, slots, device, memory_gib)

        mean_prompt = arguments.mean_prompt or longest.prompt
        mean_response = arguments.mean_response or longest.response
        mean = Lengths(mean_prompt, mean_response)
        # only the times need the rate, whose measurement takes time
        measured_device = with_measured_rate(device)
        lines_of_times = time_lines(config, networks, slots, measured_device, mean)
        print("", *lines_of_times, sep="\n")
        if arguments.fit and memory_gib is not None:
            fits, lines = fit_table(undecided, networks, slots, device, memory_gib, words_of_fit)
            print("", *lines, sep="\n")
        check_context(config)
        return int(not fits)


def print_supervised_plan(arguments: argparse.Namespace, words: list[str], options: type[SupervisedConfig]) -> int:
    """Prints the plan of a supervised command for rows of the maximum length, and returns the exit status.

    Args:
        arguments: Options of the command `trainer.plan`.
        words: `key=value` options of the training.
        options: Schema of the command.
    """
    _refuse(arguments, "mean_prompt", "mean_response", "fit")
    device = _device(arguments)
    config = load_schema(words, options).config
    _set_device(config, device)
    longest = longest_step(config)

    problems = list(section_problems(config))
    # a run compares its longest row, which a plan does not know
    if config.data.max_token_len_per_gpu < longest.longest:
        problems.append(
            f"data.max_token_len_per_gpu={config.data.max_token_len_per_gpu}: a row may have {longest.longest} tokens, "
            "which a micro-batch has to hold; raise it, or lower data.max_length"
        )
    if problems:
        raise ConfigError(problems)

    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        if arguments.like is not None:
            _write_config_like(config, arguments.like, folder)
        slots = _slots(config, device)
        memory_gib = arguments.memory_gb or device.memory_gib
        network = read_network(config, slots, device)
        _print_model(network.shape, config, slots, device, arguments)
        rows = supervised_rows(config, slots, config.trainer.total_training_steps, [longest])
        print(f"\n{aligned(rows)}\n")
        plan = supervised_plan(config, network, slots, device, longest)
        fits = _print_lines(plan, device.name, memory_gib)
        return int(not fits)


def print_reward_flow_plan(arguments: argparse.Namespace, words: list[str]) -> int:
    """Prints the memory of a step of `trainer.main_reward_flow` on one device, and returns the exit status.

    Args:
        arguments: Options of the command `trainer.plan`.
        words: `key=value` options of the training.
    """
    from trainer.planner.diffusion_memory import PUBLISHED, clip_of, plan, published_shape, read_shape
    from verl_lite.config.diffusion import RewardFlowConfig

    _refuse(arguments, "mean_prompt", "mean_response", "fit")
    if arguments.like is not None and arguments.like not in PUBLISHED:
        raise UserError(f"--like {arguments.like}: expected {' or '.join(PUBLISHED)} with --command main_reward_flow")
    config = load_schema(words, RewardFlowConfig, recipe_loader=recipe_overrides).config
    if arguments.like is not None:
        shape = published_shape(arguments.like)
    else:
        # creates the model of a recipe that makes one
        prepare_recipe(config)
        if config.model.path is None:
            raise UserError(f"model.path=null: expected the folder of a pipeline, or --like {' | '.join(PUBLISHED)}")
        shape = read_shape(str(config.model.path))

    slots = config.trainer.n_gpus_per_node or 1
    element_bytes = FP32 if arguments.device == "cpu" else BF16
    expected = plan(config, shape, slots, size=element_bytes)
    frames, height, width = clip_of(config)
    clip = f"{frames} x {height} x {width}"
    memory_gib = arguments.memory_gb
    if memory_gib is None and arguments.device is not None:
        memory_gib = ACCELERATORS[arguments.device].memory_gib
    devices = "device" if slots == 1 else "devices"
    print(f"clip {clip}; {slots} {devices}\n")
    fits = _print_lines(expected, arguments.device or "GPU", memory_gib)
    return int(not fits)


def _device(arguments: argparse.Namespace) -> Accelerator:
    """Returns the accelerator to plan for."""
    name = arguments.device or "h100"
    return ACCELERATORS[name]


def _set_device(config: RunOptions, device: Accelerator) -> None:
    """Sets the kind of the planned device, which is not this machine's."""
    config.trainer.device = "cuda"
    if device.name == "cpu":
        config.trainer.device = "cpu"


def _refuse(arguments: argparse.Namespace, *names: str) -> None:
    """Raises UserError for options that only the plan of main_ppo has."""
    for name in names:
        if getattr(arguments, name):
            raise UserError(f"--{name} with --command {arguments.command}: only main_ppo has it; leave it out")


def _check_numbers(arguments: argparse.Namespace, longest: Lengths) -> None:
    """Raises UserError for mean lengths that are not positive or exceed the maximum lengths."""
    limits = {"mean_prompt": longest.prompt, "mean_response": longest.response}
    for name, most in limits.items():
        value = getattr(arguments, name)
        is_valid = value is None or 0 < value <= most
        if not is_valid:
            raise UserError(f"--{name} {value:g}: expected a number above 0 and at most {most}")


def _choose_model(config: PPOConfig, like: str | None, folder: str) -> None:
    """Sets model.path for `--like`. Raises UserError if a recipe has not made its model yet."""
    if like is not None:
        _write_config_like(config, like, folder)
        return
    path = config.model.path
    recipe = config.recipe
    if recipe is None or path is None:
        return
    # recipes write their models to absolute paths; a relative path or a hub name is the user's
    folder_of_model = Path(path)
    if folder_of_model.is_absolute() and not folder_of_model.is_dir():
        raise UserError(
            f"model.path={path!r} does not exist yet: recipe={recipe} creates it in its first run. To create it "
            f"and plan: python -m trainer.main_ppo recipe={recipe} trainer.dry_run=true; or plan with --like NAME"
        )


def _choose_engine(config: PPOConfig) -> None:
    """Sets the rollout engine that `rollout.name=auto` chooses on a CPU, and prints the reason."""
    longest_sample = config.rollout.max_model_len or config.longest_sample
    engine, reason = choose_engine(config.model, config.rollout, longest_sample, "cpu")
    config.rollout.name = engine
    print(f"rollout.name=auto chooses {engine}: {reason}")


def _make_room_for_longest_row(config: PPOConfig, longest: Lengths) -> list[str]:
    """Raises the token budget of a micro-batch to the longest row. Returns the option that does the same."""
    actor = config.actor
    tokens_of_a_rank = math.ceil(sum(longest) / actor.ulysses_sequence_parallel_size)
    actor.ppo_max_token_len_per_gpu = max(actor.ppo_max_token_len_per_gpu, tokens_of_a_rank)
    return [f"{BUDGET}={actor.ppo_max_token_len_per_gpu}"]


def _print_memory(
    config: PPOConfig,
    networks: Networks,
    slots: int,
    device: Accelerator,
    memory_gib: float | None,
) -> bool:
    """Prints the memory of each phase. Returns True if the run fits, or if the memory is unknown."""
    plan = memory_plan(config, networks, slots, device)
    fits = _print_lines(plan, device.name, memory_gib)
    if memory_gib is not None and not fits:
        print(fewer_processes(config, networks, slots, device, memory_gib))
    return fits


def _print_lines(plan: MemoryPlan, device: str, memory_gib: float | None) -> bool:
    """Prints a plan for a device of this name. Returns True if the run fits, or if the memory is unknown."""
    print("\n".join(plan.lines(device, memory_gib)))
    return memory_gib is None or plan.fits(memory_gib * GIB)


def _write_config_like(config: PPOConfig | SupervisedConfig, like: str, folder: str) -> None:
    """Sets model.path to a new folder with the config.json of a published model."""
    if config.model.path is not None and config.recipe is None:
        raise UserError(f"--like and model.path={config.model.path!r} contradict each other: leave one out")
    model_folder = Path(folder, like)
    model_folder.mkdir()
    model_config = json.dumps(config_like(like))
    (model_folder / "config.json").write_text(model_config, encoding="utf-8")
    config.model.path = str(model_folder)


def _print_model(
    shape: ModelShape,
    config: RunOptions,
    slots: int,
    device: Accelerator,
    arguments: argparse.Namespace,
) -> None:
    """Prints the size of the model and the devices that the plan is for."""
    nodes = config.trainer.nnodes
    machines = f" in {nodes} machines" if nodes > 1 else ""
    billions = shape.parameters / 1e9
    print(
        f"{billions:.2f} B parameters ({shape.layers} layers of {shape.hidden}, vocabulary "
        f"{shape.vocab}), on {slots} x {device.name}{machines}"
    )
    if arguments.device is None:
        print(f"--device is not given: planned for {device.name}. For another: --device NAME, --memory_gb GIB")


def _slots(config: RunOptions, device: Accelerator) -> int:
    """Returns the number of devices of the run.

    trainer.n_gpus_per_node=null becomes 8, on a CPU at most 2, and with the inline backend 1.
    """
    trainer = config.trainer
    if trainer.n_gpus_per_node is None:
        trainer.n_gpus_per_node = 8
        if device.name == "cpu":
            # as many as a run starts on this machine
            trainer.n_gpus_per_node = min(MOST_DEFAULT_CPU_SLOTS, visible_devices("cpu"))
        # this backend runs everything in one process
        if trainer.backend == "inline":
            trainer.n_gpus_per_node = 1
    return trainer.n_gpus_per_node * trainer.nnodes


def _check(config: PPOConfig, slots: int) -> None:
    """Raises UserError if the options contradict each other. Data files and clusters need not exist."""
    # a copy, because the checks are made with other values for what this machine does not have
    checked = copy.deepcopy(config)
    # this machine may have no GPU
    checked.trainer.device = "cpu"
    checked.data.train_files = list(_ANY_DATA)
    if config.data.val_files:
        checked.data.val_files = list(_ANY_DATA)
    ray_init = checked.ray_kwargs.ray_init
    if checked.trainer.nnodes > 1 and ray_init.address is None:
        # a run on several machines needs a cluster, which need not exist for a plan
        ray_init.address = "HOST:6379"
        ray_init.num_cpus = None
    validate(checked, engines=engine_names(), slots=slots, available=None)
