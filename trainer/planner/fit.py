"""Chooses options by memory: null options at launch, and the cheapest changes with which a run fits a device."""

import bisect
import copy
import itertools
import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from trainer.planner.accelerators import Accelerator
from trainer.planner.memory import memory_plan
from trainer.planner.memory_table import GIB, MemoryPlan
from trainer.planner.networks import Networks
from trainer.requirements import needs_reference_model
from verl_lite.config import NetworkConfig, PPOConfig
from verl_lite.config.option_table import value_of

SIZES_GIB = (8.0, 16.0, 24.0, 80.0)  # devices that the search reports besides the planned one
SPARE = 0.85  # share of the memory up to which layers keep their activations instead of being recomputed
LORA_RANK = 32  # of the proposed adapter
SHARES = (0.7, 0.85, 0.3)  # of the device's memory for the engine, besides the configured one
SEQUENCES = 16  # of an engine at a time, at least
BUDGET, RANKS = "actor.ppo_max_token_len_per_gpu", "actor.ulysses_sequence_parallel_size"
TENSOR = "rollout.tensor_model_parallel_size"
_DECIDED = [
    f"{role}.fsdp_config.{name}" for role in ("actor", "critic") for name in ("fsdp_size", "reduce_every_micro_batch")
] + ["ref.fsdp_config.fsdp_size"]
Changes = dict[str, Any]  # values by key


def decide_sharding(
    config: PPOConfig, networks: Networks, slots: int, device: Accelerator, memory_gib: float | None
) -> str:
    """Sets `fsdp_size` (if the actor's is null), `reduce_every_micro_batch` and `gradient_checkpointing_layers` where
    they are null. Returns a sentence about each decision, or an empty string.

    On several machines, each machine gets a full copy of the weights if that fits, so that layers are gathered within a
    machine. If full gradients do not fit, they are reduced after each micro-batch. Then as many layers keep their
    activations as fit in the share SPARE of the memory.
    """
    decisions = [_decide_reduction(config, networks, slots, device, memory_gib)]
    if memory_gib is not None:
        decisions += _decide_recomputed(config, networks, slots, device, memory_gib * SPARE * GIB)
    return "; ".join(filter(None, decisions))


def _decide_reduction(
    config: PPOConfig, networks: Networks, slots: int, device: Accelerator, memory_gib: float | None
) -> str:
    """Sets `fsdp_size` and `reduce_every_micro_batch` as in `decide_sharding`."""
    actor, critic = config.actor.fsdp_config, config.critic.fsdp_config
    is_undecided = actor.fsdp_size is None
    sizes = [each for each in (actor, critic, config.ref.fsdp_config) if is_undecided and each.fsdp_size is None]
    sums = [each for each in (actor, critic) if each.reduce_every_micro_batch is None]
    ways = [(-1, False)]
    if device.name != "cpu":
        inside = [(slots // config.trainer.nnodes, False)] if config.trainer.nnodes > 1 and sizes else []
        ways = [*inside, (-1, False), (-1, True)]
    decision = ""
    for size, every in ways:
        for fsdp in sizes:
            fsdp.fsdp_size = size
        for fsdp in sums:
            fsdp.reduce_every_micro_batch = every
        if size > 0:
            decision = f"each machine has a copy of the weights: fsdp_config.fsdp_size={size}"
        else:
            decision = "whole gradients do not fit: fsdp_config.reduce_every_micro_batch=true" if every and sums else ""
        if memory_gib is None or memory_plan(config, networks, slots, device).fits(memory_gib * GIB):
            break
    return decision


def _decide_recomputed(
    config: PPOConfig, networks: Networks, slots: int, device: Accelerator, memory_bytes: float
) -> Iterator[str]:
    """Sets `gradient_checkpointing_layers`, where null, to the smallest number that fits. Yields sentences."""
    for key, shape in (("model", networks.policy), ("critic.model", networks.critic)):
        model: NetworkConfig = value_of(config, key)
        is_decided = not model.enable_gradient_checkpointing or model.gradient_checkpointing_layers is not None
        if shape is None or is_decided or model.enable_activation_offload:  # offload would fill the host's memory
            continue

        def fits(number: int, model: NetworkConfig = model) -> bool:
            model.gradient_checkpointing_layers = number
            return memory_plan(config, networks, slots, device).fits(memory_bytes)

        number = bisect.bisect_left(range(shape.layers), True, key=fits)
        model.gradient_checkpointing_layers = number if number < shape.layers else None
        if number < shape.layers:
            kept = f"{shape.layers - number} of {shape.layers} layers keep their activations"
            yield f"{kept}: {key}.gradient_checkpointing_layers={number}"


def fewer_processes(config: PPOConfig, networks: Networks, slots: int, device: Accelerator, memory_gib: float) -> str:
    """Returns advice for a run on a CPU that does not fit: the largest smaller number of processes that fits the memory
    of all of them together. Returns an empty string if there is none.

    memory_gib: memory of each of the `slots` processes.
    """
    if device.name != "cpu" or config.trainer.nnodes > 1:
        return ""
    for number in range(slots - 1, 0, -1):
        share = memory_gib * slots / number
        plan = memory_plan(config, networks, number, device)
        if plan.fits(share * GIB):
            each = "the only process" if number == 1 else f"each of {number} processes"
            needed = f"needs {plan.device_bytes / GIB:.2f} GiB and has {share:.1f}"
            return f"trainer.n_gpus_per_node={number} fits: {each} {needed}"
    return ""


# -- search ------------------------------------------------------------------------------------------------------------


def find_fit(
    config: PPOConfig, networks: Networks, slots: int, device: Accelerator, memory_gib: float
) -> tuple[Changes | None, MemoryPlan]:
    """Returns the first set of changes that fits a GPU with this memory, and its plan; None and the plan that needs the
    least memory if no set fits. Sets are tried in the order of their most expensive change, so no part of the returned
    set is enough."""
    device, changed, plans = replace(device, memory_gib=memory_gib), copy.deepcopy(config), []
    levels = _levels(config, networks, slots)
    keys = {*_DECIDED, *(key for level in levels for changes in level for key in changes)}
    configured = {key: value_of(config, key) for key in keys}
    for chosen in itertools.product(*levels):
        changes = {key: value for change in reversed(chosen) for key, value in change.items()}
        for key, value in (configured | changes).items():
            section, _, name = key.rpartition(".")
            setattr(value_of(changed, section), name, value)
        _decide_reduction(changed, networks, slots, device, memory_gib)
        plans.append(memory_plan(changed, networks, slots, device))
        if plans[-1].fits(memory_gib * GIB):
            return {key: value for key, value in changes.items() if value != configured[key]}, plans[-1]
    return None, min(plans, key=lambda plan: (len(plan.notes), plan.device_bytes))


def _levels(config: PPOConfig, networks: Networks, slots: int) -> list[list[Changes]]:
    """Returns the changes from the most expensive in time to the cheapest, each as a list of alternatives that begins
    with no change. Only an adapter changes the result."""
    rollout, actor, shape = config.rollout, config.actor, networks.policy
    trained = {"actor": "model"} | ({} if networks.critic is None else {"critic": "critic.model"})
    frozen = ["ref"] * needs_reference_model(config) + ["reward_model"] * config.reward_model.enable
    longest = config.data.max_prompt_length + config.data.max_response_length
    ranks, parallel = actor.ulysses_sequence_parallel_size, rollout.tensor_model_parallel_size
    sizes = [size for size in range(2, slots + 1) if not slots % size and not shape.heads % size]
    shared = [size for size in sizes if size > ranks and (not shape.kv_heads % size or not size % shape.kv_heads)]
    is_packed = shape.is_packed and config.model.use_remove_padding
    row = {BUDGET: math.ceil(longest / ranks)} if actor.use_dynamic_bsz else {"actor.ppo_micro_batch_size_per_gpu": 1}
    recomputed = {
        f"{model}.{key}": value
        for model in trained.values()
        for key, value in (("enable_gradient_checkpointing", True), ("gradient_checkpointing_layers", None))
    }
    alternatives: list[list[Changes]] = [
        [{"model.lora_rank": LORA_RANK}] if not config.model.lora_rank else [],
        [recomputed | {f"{model}.enable_activation_offload": True for model in trained.values()}],
        [{f"{role}.fsdp_config.param_offload": True for role in (*trained, *frozen)}],
        [{f"{role}.fsdp_config.optimizer_offload": True for role in trained}],
        [{TENSOR: size} for size in sizes if size > parallel and size <= slots // config.trainer.nnodes],
        [row | {RANKS: size} | {BUDGET: math.ceil(longest / size)} for size in shared if is_packed],
        [recomputed],
        [row],
        [{"rollout.max_num_seqs": min(SEQUENCES, rollout.max_num_seqs)}],
        [{"rollout.gpu_memory_utilization": share} for share in SHARES],  # the engine sleeps during the update
    ]
    return [[{}, *(each for each in level if _is_change(config, each))] for level in alternatives]


def _is_change(config: PPOConfig, changes: Changes) -> bool:
    return any(value_of(config, key) != value for key, value in changes.items())


def fit_table(
    config: PPOConfig, networks: Networks, slots: int, device: Accelerator, memory_gib: float, given: Sequence[str]
) -> tuple[bool, list[str]]:
    """Returns True if a set of changes fits `memory_gib`, and lines with the changes for several device sizes and the
    command line for `memory_gib`. given: the options of the plan's command line."""
    sizes = sorted({memory_gib, *(size for size in SIZES_GIB if abs(size - memory_gib) > 1)})
    lines, command = [f"{'what fits':<26}{'GiB needed':>12}{'on the host':>13}   cheapest changes"], ""
    for size in sizes:
        changes, plan = find_fit(config, networks, slots, device, size)
        needed, host = max(plan.device_bytes, plan.engine_bytes) / GIB, sum(plan.host.values()) / GIB
        options = [f"{key}={json.dumps(value)}" for key, value in (changes or {}).items()]
        text = " ".join(options) or "none"
        if changes is None:
            text = "; ".join([f"nothing tried fits: the phase {plan.worst!r} needs the most", *plan.notes])
        elif size == memory_gib:
            devices = f"trainer.n_gpus_per_node={slots // config.trainer.nnodes}"
            last = {option.partition("=")[0]: option for option in (*given, devices, *options)}
            command = f"python -m trainer.main_ppo {shlex.join(last.values())}"
        lines.append(f"  {f'a device of {size:g} GiB':<24}{needed:>12.1f}{host:>13.1f}   {text}")
    return bool(command), [*lines, "", command]
