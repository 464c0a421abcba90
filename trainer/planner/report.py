"""The plan of a run as text: memory by phase, whether it fits, and the time of a step.

`python -m trainer.plan` prints it, and `trainer.dry_run=true`; a run has two lines of it in its table at launch, and
one after its end that says what was measured.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.planner.batch import PlanRow
from trainer.planner.model_shape import ModelShape
from trainer.planner.run_memory import (
    MemoryPlan,
    Networks,
    compute_size,
    distinct_prompts,
    memory_plan,
    mini_batch_prompts,
    ranks_of_a_copy,
    read_networks,
    rows_per_step,
    trained_parameters,
)
from trainer.planner.step_time import (
    Accelerator,
    Efficiency,
    Generation,
    Spread,
    accelerator,
    generation_seconds,
    pass_seconds,
    reduction_seconds,
    sync_seconds,
    update_seconds,
)
from trainer.planner.table import CONTEXT_GIB, FRAGMENTATION, GIB, listed, part_lines, phase_lines
from trainer.reports.run_data import METRICS
from trainer.requirements import needs_old_log_prob, needs_reference
from trainer.saving import checkpoint_bytes, most_checkpoints
from trainer.tracking import read_metrics
from verl_lite.config import FSDPConfig, PPOConfig
from verl_lite.errors import UserError
from verl_lite.machine.host import HostLoad

# -- memory ------------------------------------------------------------------------------------------------------------


def memory_lines(
    config: PPOConfig, networks: Networks, slots: int, device: Accelerator, memory_gib: float | None
) -> Iterator[str]:
    """Memory by phase on one device, and the verdict. memory_gib: of one device; None = not compared."""
    plan = memory_plan(config, networks, slots, device)
    where = "process" if plan.on_cpu else f"device ({device.name})"
    yield f"always on each {where} (GiB, calculated)"
    yield from part_lines(plan.always)
    yield ""
    yield f"{'beside that, in the phase':<44}{'GiB':>8}"
    yield from phase_lines(plan.phases, plan.worst)
    yield ""
    yield f"{'peak of tensors':<44}{plan.peak / GIB:8.2f}   in the phase marked *"
    more = (
        f"with its libraries, {plan.base / GIB:.2f} GiB measured"
        if plan.on_cpu
        else f"with {CONTEXT_GIB:g} GiB of context and {FRAGMENTATION:.0%} fragmentation, both assumed"
    )
    yield f"{f'one {where}':<44}{plan.device_bytes / GIB:8.2f}   {more}"
    if plan.host:
        yield f"{'host memory of each rank, besides':<44}{sum(plan.host.values()) / GIB:8.2f}   {listed(plan.host)}"
    yield f"{'sequences that decode together':<44}{plan.sequences:8d}   rollout.max_num_seqs, and the KV cache"
    if memory_gib is None:
        return
    yield ""
    yield from plan.notes
    if plan.fits(memory_gib * GIB):
        yield f"fits {memory_gib:.1f} GiB"
    elif plan.device_bytes > memory_gib * GIB:
        yield (
            f"does not fit {memory_gib:.1f} GiB: {plan.device_bytes / GIB:.2f} are needed, in {plan.worst.name}. "
            "trainer/PLANNING.md says which options its parts depend on"
        )


# -- time --------------------------------------------------------------------------------------------------------------


def stage_seconds(
    config: PPOConfig,
    networks: Networks,
    slots: int,
    device: Accelerator,
    assumed: Efficiency,
    response_length: float | None = None,
) -> dict[str, float]:
    """Seconds of each stage of a step by name. response_length: mean tokens of an answer; None = all as long as
    allowed."""
    data, rollout, policy = config.data, config.rollout, networks.policy
    answer = float(data.max_response_length if response_length is None else response_length)
    length, rows = data.max_prompt_length + answer, rows_per_step(config)
    engines = max(1, slots // rollout.tensor_model_parallel_size)
    plan = memory_plan(config, networks, slots, device)
    size = compute_size(config.actor.fsdp_config.mixed_precision.param_dtype, device)
    prompts = rows if config.is_agentic else rows / rollout.n
    generation = Generation(
        sequences=rows / engines,
        prompts=max(1.0, prompts / engines),
        prompt_length=data.max_prompt_length,
        response_length=answer,
        at_once=max(1, plan.sequences),
        size=compute_size(rollout.dtype, device),
        devices=rollout.tensor_model_parallel_size,
    )
    prefill, decode = generation_seconds(policy, generation, device, assumed)
    tokens = _tokens_of_a_device(config, rows / slots, plan.micro_batches, answer)

    def forward(shape: ModelShape) -> float:
        return pass_seconds(shape, tokens, length, device, assumed)

    def update(shape: ModelShape, epochs: int, checkpointing: bool, adapter: int) -> float:
        return epochs * update_seconds(
            shape, tokens, length, device, assumed, checkpointing=checkpointing, has_adapter=adapter > 0
        )

    _, adapter = trained_parameters(config, policy)
    stages = {"generation: prompts": prefill, "generation: answers": decode}
    if networks.reward_model is not None:
        stages["reward model"] = forward(networks.reward_model)
    if needs_old_log_prob(config):
        stages["old log-probs"] = forward(policy)
    if needs_reference(config):
        stages["reference log-probs"] = forward(policy)
    epochs = config.actor.ppo_epochs
    if networks.critic is not None:
        stages["values"] = forward(networks.critic)
        checkpointing = config.critic.model.enable_gradient_checkpointing
        stages["critic update"] = update(networks.critic, config.critic.ppo_epochs or epochs, checkpointing, 0)
    own = update(policy, epochs, config.model.enable_gradient_checkpointing, adapter)
    spread = _spread(config.actor.fsdp_config, slots, slots // config.trainer.nnodes)
    stages["update"] = max(own, _on_the_wire(config, policy, spread, device, plan.micro_batches))
    stages["weight sync"] = sync_seconds(policy, spread, size, device)
    return stages


def _tokens_of_a_device(config: PPOConfig, rows: float, micro_batches: int, answer: float) -> float:
    """Tokens that go through the layers in a pass over `rows`; answers to one prompt in a micro-batch share its."""
    mini = mini_batch_prompts(config, config.actor.ppo_mini_batch_size)
    together = max(1, round(rows * mini / mini_batch_prompts(config, -1) / micro_batches))
    return rows * (answer + config.data.max_prompt_length * distinct_prompts(config, together, mini) / together)


def _on_the_wire(
    config: PPOConfig, policy: ModelShape, spread: Spread, device: Accelerator, micro_batches: int
) -> float:
    """Seconds of a step's update in which the policy's weights and gradients travel. micro_batches: of a mini-batch."""
    mini, fsdp = mini_batch_prompts(config, config.actor.ppo_mini_batch_size), config.actor.fsdp_config
    steps = config.actor.ppo_epochs * math.ceil(mini_batch_prompts(config, -1) / mini)
    return reduction_seconds(
        policy,
        trained_parameters(config, policy)[0],
        spread,
        compute_size(fsdp.mixed_precision.param_dtype, device),
        device,
        micro_batches=steps * micro_batches,
        reductions=steps * (micro_batches if fsdp.reduce_every_micro_batch else 1),
    )


def _spread(fsdp: FSDPConfig, slots: int, per_node: int) -> Spread:
    ranks = ranks_of_a_copy(fsdp, slots)
    return Spread(ranks, slots // ranks, per_node)


def time_lines(
    config: PPOConfig,
    networks: Networks,
    slots: int,
    device: Accelerator,
    assumed: Efficiency,
    response_length: float | None,
) -> Iterator[str]:
    """Seconds by stage, and what they assume."""
    stages = stage_seconds(config, networks, slots, device, assumed, response_length)
    whole = sum(stages.values())
    answer = config.data.max_response_length if response_length is None else response_length
    yield f"{'time of a step, by roofline':<44}{'s':>8}"
    for name, seconds in stages.items():
        yield f"  {name:<42}{seconds:8.1f}   {seconds / whole:4.0%}"
    tokens = rows_per_step(config) * (config.data.max_prompt_length + answer)
    yield f"{'a step':<44}{whole:8.1f}   {tokens / whole / slots:,.0f} tokens/s and device"
    yield (
        f"  peaks of {device.name}: {device.flops / 1e12:g} TFLOP/s, {device.bandwidth / 1e12:g} TB/s; assumed: "
        f"{assumed.training:.0%} of the first in training, {assumed.prefill:.0%} in prefill, {assumed.bandwidth:.0%} "
        f"of the second, answers of {answer:g} tokens (--mean_response)"
    )


# -- at launch and after -----------------------------------------------------------------------------------------------


def launch_device(config: PPOConfig) -> Accelerator:
    """What this run's own devices are like, as far as memory goes."""
    from verl_lite.device import device_type

    if device_type(config.trainer.device) == "cpu":
        return accelerator("cpu")
    import torch

    properties = torch.cuda.get_device_properties(0)
    rates = accelerator("h100")  # of no consequence for memory
    return replace(rates, name=properties.name, memory_gib=properties.total_memory / GIB)


def device_memory_gib(device: Accelerator, slots_here: int) -> float:
    """GiB of one of this machine's devices; of a CPU worker its part of what is free."""
    return device.memory_gib or HostLoad.now().available_bytes / GIB / slots_here


def expected_rows(config: PPOConfig, slots: int, total_steps: int | None) -> list[PlanRow]:
    """Lines for the table at launch: memory of the fullest phase, disk. Where the model's shapes are not known, why."""
    try:
        networks = read_networks(config)
    except UserError as error:
        return [PlanRow("memory per device, expected", "?", str(error))]
    plan = memory_plan(config, networks, slots, launch_device(config))
    one, count = checkpoint_bytes(config), most_checkpoints(config.trainer, total_steps or 1)
    samples = config.trainer.samples_max_mb / 1024
    checkpoints = f"{count} checkpoint{'s' * (count != 1)} of {one / GIB:.2f}" if count else "no checkpoints"
    return [
        PlanRow("memory per device, expected", f"{plan.device_bytes / GIB:.2f} GiB", _worst(plan)),
        PlanRow(
            "disk, at most",
            f"{count * one / GIB + samples:.2f} GiB",
            f"{checkpoints} (trainer.save_freq), samples {samples:.2f} (trainer.samples_max_mb)",
        ),
    ]


def _worst(plan: MemoryPlan) -> str:
    return f"in {plan.worst.name}; `python -m trainer.plan` with the same options shows all phases"


def measured_line(config: PPOConfig, slots: int, run_dir: Path) -> str:
    """After a run: measured memory of the fullest worker, and what the plan expects for prompts and answers as long as
    those of the step whose mean was longest. Empty where nothing was measured or planned."""
    file = run_dir / METRICS
    steps = list(read_metrics(file).values()) if file.is_file() else []
    try:
        networks, device = read_networks(config), launch_device(config)
    except UserError:
        return ""
    most = memory_plan(config, networks, slots, device)
    name = f"actor/perf/{'host_peak_gb' if most.on_cpu else 'max_memory_reserved_gb'}"
    values = [step[name] for step in steps if name in step]
    if not values:
        return ""
    met = memory_plan(_with_lengths_of(config, steps), networks, slots, device)
    whole, expected = ((plan.device_bytes if plan.on_cpu else plan.peak) / GIB for plan in (most, met))
    return (
        f"Memory of the fullest worker: {max(values):.2f} GiB measured, {expected:.2f} expected "
        f"({expected / max(values) - 1:+.0%}) for rows as long as here, {whole:.2f} for the longest allowed"
    )


def _with_lengths_of(config: PPOConfig, steps: Sequence[Mapping[str, float]]) -> PPOConfig:
    """The configuration with the greatest mean lengths that a run logged in place of those that it allows."""
    met = copy.deepcopy(config)
    for key, name in (("max_prompt_length", "prompt_length/mean"), ("max_response_length", "response_length/mean")):
        if means := [step[name] for step in steps if name in step]:
            setattr(met.data, key, max(1, math.ceil(max(means))))
    return met
