"""The plan of a run at its launch and after its end.

A launch decides what the options leave to the plan, and shows the expected memory in its table. The end of a run
compares the expected with the measured memory.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.loop.saving import most_checkpoints
from trainer.observe.tracking import METRICS, read_metrics
from trainer.planner.accelerators import ACCELERATORS, Accelerator
from trainer.planner.batch import PlanRow
from trainer.planner.fit import decide_sharding
from trainer.planner.memory import memory_plan
from trainer.planner.memory_table import GIB, MemoryPlan
from trainer.planner.model_shape import ModelShape, read_shape
from trainer.planner.networks import FP32, checkpoint_bytes, compute_size, read_networks
from trainer.planner.step_time import forward_flops
from trainer.ppo.step_metrics import UpdateWork
from verl_lite.config import PPOConfig, RunOptions, SupervisedConfig
from verl_lite.errors import UserError
from verl_lite.machine.device import device_type
from verl_lite.machine.host import available_memory

Steps = Sequence[Mapping[str, float]]
"""Metrics by name of each training step."""


def launch_device(config: RunOptions) -> Accelerator:
    """Returns an accelerator with the name and memory of this run's devices; its other numbers are an H100's."""
    if device_type(config.trainer.device) == "cpu":
        return ACCELERATORS["cpu"]

    import torch

    properties = torch.cuda.get_device_properties(0)
    memory_gib = properties.total_memory / GIB
    return replace(ACCELERATORS["h100"], name=properties.name, memory_gib=memory_gib)


def update_work(config: PPOConfig) -> UpdateWork | None:
    """Returns the operations of an update of the policy, and the bf16 FLOP/s of this run's devices.

    Returns None on a CPU, in fp32, and if the shape or the device is unknown.
    """
    # data sheets give the peak of bf16 for the GPUs of `ACCELERATORS`
    device = launch_device(config)
    size = compute_size(config.actor.fsdp_config.mixed_precision.param_dtype, device)
    if device.name == "cpu" or size == FP32:
        return None

    words = device.name.lower().replace("-", " ").split()
    # H100 PCIe and H100 NVL have other peaks than the SXM form
    if "pcie" in words or "nvl" in words:
        return None
    # `launch_device` has an H100's peak for every GPU, so the peak is looked up by the GPU's name
    peaks = [accelerator.flops for name, accelerator in ACCELERATORS.items() if name in words]
    if not peaks:
        return None

    try:
        shape = read_shape(config.model)
    except UserError:
        return None
    # a backward pass costs two forward passes, or one if it computes no gradients of the full weights
    passes_per_epoch = 2 if config.model.lora_rank else 3
    passes = config.actor.ppo_epochs * passes_per_epoch
    flops_of_update = partial(update_flops, shape, passes)
    return UpdateWork(flops_of_update, peaks[0])


def update_flops(shape: ModelShape, passes: int, lengths: Sequence[int]) -> float:
    """Returns the operations of an update of the policy.

    Args:
        shape: Sizes of the policy.
        passes: Cost of the update in forward passes.
        lengths: Number of tokens of each sequence.
    """
    flops_of_pass = sum(forward_flops(shape, length, length) for length in lengths)
    return passes * flops_of_pass


def device_memory_gib(device: Accelerator, slots_here: int) -> float:
    """Returns the memory of one of this machine's devices in GiB; for a CPU worker, its share of the free memory."""
    if device.memory_gib:
        return device.memory_gib
    return available_memory() / GIB / slots_here


def sharding_of_run(config: PPOConfig, slots: int) -> str:
    """Calls `decide_sharding` for this run's devices and returns its sentence. Does nothing if the model's shapes are
    unknown."""
    device = launch_device(config)
    slots_here = max(1, slots // config.trainer.nnodes)
    memory_gib = device_memory_gib(device, slots_here)
    # the plan only helps: a model of unknown shape runs with the options as they are
    with contextlib.suppress(UserError):
        networks = read_networks(config)
        return decide_sharding(config, networks, slots, device, memory_gib)
    return ""


# -- the rows of the launch table --------------------------------------------------------------------------------------


def expected_rows(config: PPOConfig, slots: int, total_steps: int | None) -> list[PlanRow]:
    """Returns the rows of the launch table with the memory of the fullest phase and the disk space."""

    def plan() -> MemoryPlan:
        networks = read_networks(config)
        return memory_plan(config, networks, slots, launch_device(config))

    return memory_rows(config, plan, total_steps, config.trainer.samples_max_mb)


def memory_rows(
    config: PPOConfig | SupervisedConfig,
    plan: Callable[[], MemoryPlan],
    total_steps: int | None,
    samples_max_mb: int,
) -> list[PlanRow]:
    """Returns the rows of the launch table with the memory of the fullest phase and the disk space.

    If the model's shapes are unknown, so that `plan` raises UserError, the only row gives the reason.

    Args:
        config: Options of the run.
        plan: Computes the memory.
        total_steps: Training steps of the run, if they are known.
        samples_max_mb: Limit of the samples folder in MiB.
    """
    try:
        expected = plan()
    except UserError as error:
        return [PlanRow("memory per device, expected", "?", str(error))]

    where = f"in {expected.worst}"
    if expected.base is None:
        where += ", not measured on a GPU"
    where += "; trainer.dry_run=true shows all phases"

    checkpoint_gib = checkpoint_bytes(config) / GIB
    samples_gib = samples_max_mb / 1024
    count = most_checkpoints(config.trainer, total_steps or 1)
    contents = "no checkpoints (trainer.save_freq)"
    if count:
        noun = "checkpoint" if count == 1 else "checkpoints"
        contents = f"{count} {noun} of {checkpoint_gib:.2f} (trainer.save_freq)"
    # supervised runs write no samples
    if isinstance(config, PPOConfig):
        contents += f", samples {samples_gib:.2f} (trainer.samples_max_mb)"

    disk_gib = count * checkpoint_gib + samples_gib
    device_gib = expected.device_bytes / GIB
    return [
        PlanRow("memory per device, expected", f"{device_gib:.2f} GiB", where),
        PlanRow("disk, at most", f"{disk_gib:.2f} GiB", contents),
    ]


# -- after the end -----------------------------------------------------------------------------------------------------


def measured_line(config: PPOConfig, slots: int, run_dir: Path) -> str:
    """Returns the sentence at the end of a run that compares the measured memory of the fullest worker with the plan.

    The plan is computed for the largest mean prompt and response lengths of all steps. Returns an empty string if
    nothing was measured or planned.
    """
    try:
        networks = read_networks(config)
        device = launch_device(config)
    except UserError:
        return ""

    steps = list(read_metrics(run_dir / METRICS).values())
    measured = measured_gib(steps, device, "actor")
    if measured is None:
        return ""

    observed = copy.deepcopy(config)
    # the cache of the engine was built for the maximum lengths
    observed.rollout.max_model_len = config.rollout.max_model_len or config.longest_sample
    data = observed.data
    data.max_prompt_length = _longest_mean(steps, "prompt_length/mean", data.max_prompt_length)
    data.max_response_length = _longest_mean(steps, "response_length/mean", data.max_response_length)

    observed_plan = memory_plan(observed, networks, slots, device)
    expected = _gib(observed_plan, device)
    longest_plan = memory_plan(config, networks, slots, device)
    at_most = _gib(longest_plan, device)
    return f"{_comparison(measured, expected)} for the lengths of this run, {at_most:.2f} for the maximum lengths"


def supervised_measured_line(plan: Callable[[], MemoryPlan], device: Accelerator, run_dir: Path) -> str:
    """Returns the sentence of `measured_line` for a supervised run, whose plan is computed for the rows of the run."""
    steps = list(read_metrics(run_dir / METRICS).values())
    measured = measured_gib(steps, device, "train")
    if measured is None:
        return ""
    try:
        expected = _gib(plan(), device)
    except UserError:
        return ""
    return f"{_comparison(measured, expected)} for the rows of this run"


def measured_gib(steps: Steps, device: Accelerator, role: str) -> float | None:
    """Returns the peak memory of the fullest worker in the metrics of all steps; None if it was not measured."""
    name = "host_peak_gb" if device.name == "cpu" else "max_memory_reserved_gb"
    return _maximum(steps, f"{role}/perf/{name}")


def _comparison(measured: float, expected: float) -> str:
    """Returns the beginning of a sentence with both values in GiB, and how far the expected one is off."""
    deviation = expected / measured - 1
    return f"Memory of the fullest worker: {measured:.2f} GiB measured, {expected:.2f} expected ({deviation:+.0%})"


def _gib(plan: MemoryPlan, device: Accelerator) -> float:
    """Returns the planned memory of what is measured: of the process on a CPU, of the tensors on a GPU."""
    if device.name == "cpu":
        return plan.device_bytes / GIB
    return plan.peak / GIB


def _longest_mean(steps: Steps, name: str, limit: int) -> int:
    """Returns the largest value of a metric, rounded up; `limit` if no step has it."""
    longest = _maximum(steps, name) or limit
    return max(1, math.ceil(longest))


def _maximum(steps: Steps, name: str) -> float | None:
    """Returns the largest value of a metric; None if no step has it."""
    values = [step[name] for step in steps if name in step]
    return max(values, default=None)
