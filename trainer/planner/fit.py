"""Chooses options by memory: null options at launch, and the cheapest changes with which a run fits a device."""

import bisect
import copy
import itertools
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from trainer.planner.accelerators import Accelerator
from trainer.planner.memory import memory_plan
from trainer.planner.memory_table import GIB, MemoryPlan
from trainer.planner.model_shape import ModelShape
from trainer.planner.networks import Networks
from trainer.ppo.requirements import needs_reference_model
from verl_lite.config import NetworkConfig, PPOConfig, written_value
from verl_lite.config.option_table import value_of

# devices that the search reports besides the planned one
SIZES_GIB = (8.0, 16.0, 24.0, 80.0)
# share of the memory up to which layers keep their activations instead of being recomputed
SPARE = 0.85
# rank of the adapter that the search proposes
LORA_RANK = 32
# shares of the device's memory for the engine that the search tries besides the configured one
SHARES = (0.7, 0.85, 0.3)
# sequences of an engine at a time, if the search lowers their number
SEQUENCES = 16
BUDGET = "actor.ppo_max_token_len_per_gpu"
RANKS = "actor.ulysses_sequence_parallel_size"
TENSOR = "rollout.tensor_model_parallel_size"
_DECIDED = (
    "actor.fsdp_config.fsdp_size",
    "actor.fsdp_config.reduce_every_micro_batch",
    "critic.fsdp_config.fsdp_size",
    "critic.fsdp_config.reduce_every_micro_batch",
    "ref.fsdp_config.fsdp_size",
)
"""Options that `_decide_reduction` may set."""
Changes = dict[str, object]  # values by key


def decide_sharding(
    config: PPOConfig,
    networks: Networks,
    slots: int,
    device: Accelerator,
    memory_gib: float | None,
) -> str:
    """Sets `fsdp_size` (if the actor's is null), `reduce_every_micro_batch` and `gradient_checkpointing_layers` where
    they are null. Returns a sentence about each decision, or an empty string.

    On several machines, each machine gets a full copy of the weights if that fits, so that layers are gathered within a
    machine. If full gradients do not fit, they are reduced after each micro-batch. Then as many layers keep their
    activations as fit in the share SPARE of the memory.
    """
    decisions = [_decide_reduction(config, networks, slots, device, memory_gib)]
    if memory_gib is not None:
        usable_bytes = memory_gib * SPARE * GIB
        decisions += _decide_recomputed(config, networks, slots, device, usable_bytes)
    return "; ".join(decision for decision in decisions if decision)


def _decide_reduction(
    config: PPOConfig,
    networks: Networks,
    slots: int,
    device: Accelerator,
    memory_gib: float | None,
) -> str:
    """Sets `fsdp_size` and `reduce_every_micro_batch` as in `decide_sharding`."""
    actor = config.actor.fsdp_config
    critic = config.critic.fsdp_config
    undecided_sizes = []
    # the actor's decides: a configured size leaves null sizes of the others as they are
    if actor.fsdp_size is None:
        sections = (actor, critic, config.ref.fsdp_config)
        undecided_sizes = [fsdp for fsdp in sections if fsdp.fsdp_size is None]
    undecided_reductions = [fsdp for fsdp in (actor, critic) if fsdp.reduce_every_micro_batch is None]

    # values of fsdp_size and reduce_every_micro_batch, the fastest first: a copy of the weights on each machine gathers
    # layers within the machine, and a reduction for each micro-batch costs time
    candidates = [(-1, False)]
    if device.name != "cpu":
        candidates.append((-1, True))
        devices_per_machine = slots // config.trainer.nnodes
        if config.trainer.nnodes > 1 and undecided_sizes:
            candidates.insert(0, (devices_per_machine, False))

    for size, reduces_every in candidates:
        for fsdp in undecided_sizes:
            fsdp.fsdp_size = size
        for fsdp in undecided_reductions:
            fsdp.reduce_every_micro_batch = reduces_every
        if memory_gib is None:
            break
        plan = memory_plan(config, networks, slots, device)
        if plan.fits(memory_gib * GIB):
            break

    # of the first candidate that fits; if none does, the options keep the last one, which needs the least memory
    if size > 0:
        return f"each machine has a copy of the weights: fsdp_config.fsdp_size={size}"
    if reduces_every and undecided_reductions:
        return "whole gradients do not fit: fsdp_config.reduce_every_micro_batch=true"
    return ""


def _decide_recomputed(
    config: PPOConfig,
    networks: Networks,
    slots: int,
    device: Accelerator,
    memory_bytes: float,
) -> list[str]:
    """Sets `gradient_checkpointing_layers`, where null, to the smallest number that fits. Returns sentences."""

    def fits(model: NetworkConfig, number: int) -> bool:
        model.gradient_checkpointing_layers = number
        plan = memory_plan(config, networks, slots, device)
        return plan.fits(memory_bytes)

    sentences = []
    trained_networks: list[tuple[str, NetworkConfig, ModelShape | None]] = [
        ("model", config.model, networks.policy),
        ("critic.model", config.critic.model, networks.critic),
    ]
    for key, model, shape in trained_networks:
        has_number = model.gradient_checkpointing_layers is not None
        is_decided = has_number or not model.enable_gradient_checkpointing
        # offload would fill the host's memory
        if shape is None or is_decided or model.enable_activation_offload:
            continue
        # more recomputed layers never need more memory, so the smallest number can be searched by bisection
        number = bisect.bisect_left(range(shape.layers), True, key=partial(fits, model))
        # no smaller number fits: null again, which recomputes all layers
        if number == shape.layers:
            model.gradient_checkpointing_layers = None
            continue
        model.gradient_checkpointing_layers = number
        sentences.append(
            f"{shape.layers - number} of {shape.layers} layers keep their activations: "
            f"{key}.gradient_checkpointing_layers={number}"
        )
    return sentences


def fewer_processes(config: PPOConfig, networks: Networks, slots: int, device: Accelerator, memory_gib: float) -> str:
    """Returns advice for a run on a CPU that does not fit: the largest smaller number of processes that fits the memory
    of all of them together. Returns an empty string if there is none.

    Args:
        config: Options of the run.
        networks: Networks of the run.
        slots: Configured number of processes.
        device: Kind of the device.
        memory_gib: Memory of each of the `slots` processes.
    """
    if device.name != "cpu" or config.trainer.nnodes > 1:
        return ""
    for number in range(slots - 1, 0, -1):
        # fewer processes share the memory of all of them
        share = memory_gib * slots / number
        plan = memory_plan(config, networks, number, device)
        if plan.fits(share * GIB):
            processes = "the only process" if number == 1 else f"each of {number} processes"
            needed_gib = plan.device_bytes / GIB
            return f"trainer.n_gpus_per_node={number} fits: {processes} needs {needed_gib:.2f} GiB and has {share:.1f}"
    return ""


# -- search ------------------------------------------------------------------------------------------------------------


def find_fit(
    config: PPOConfig,
    networks: Networks,
    slots: int,
    device: Accelerator,
    memory_gib: float,
) -> tuple[Changes | None, MemoryPlan]:
    """Finds the cheapest changes with which a run fits a GPU.

    Sets of changes are tried in the order of their most expensive change, so no part of the returned set is enough.

    Args:
        config: Options of the run, which are not changed.
        networks: Networks of the run.
        slots: Number of devices.
        device: The GPU.
        memory_gib: Memory of each GPU, in place of that of `device`.

    Returns:
        The first set of changes that fits, and its plan. If no set fits, None and the plan that needs the least memory.
    """
    device = replace(device, memory_gib=memory_gib)
    levels = _levels(config, networks, slots)
    keys = set(_DECIDED)
    for level in levels:
        for changes in level:
            keys.update(changes)
    configured = {key: value_of(config, key) for key in keys}

    trial_config = copy.deepcopy(config)
    plans = []
    # the product varies the last level fastest, so expensive changes come only after all cheaper ones have failed
    for combination in itertools.product(*levels):
        trial_changes: Changes = {}
        # of two values for a key, that of the more expensive change counts
        for changes in reversed(combination):
            trial_changes |= changes
        # all keys, because the configuration still has the values of the trial before
        for key, value in (configured | trial_changes).items():
            section_name, _, name = key.rpartition(".")
            section = value_of(trial_config, section_name)
            setattr(section, name, value)
        _decide_reduction(trial_config, networks, slots, device, memory_gib)
        plan = memory_plan(trial_config, networks, slots, device)
        if plan.fits(memory_gib * GIB):
            effective = {key: value for key, value in trial_changes.items() if value != configured[key]}
            return effective, plan
        plans.append(plan)
    # a note is a problem that stops the run even if the memory is enough, so plans without notes come first
    nearest = min(plans, key=lambda plan: (len(plan.notes), plan.device_bytes))
    return None, nearest


def _levels(config: PPOConfig, networks: Networks, slots: int) -> list[list[Changes]]:
    """Returns the changes from the most expensive in time to the cheapest, each as a list of alternatives that begins
    with no change. Only an adapter changes the result."""
    trained_models = {"actor": "model"}
    if networks.critic is not None:
        trained_models["critic"] = "critic.model"
    roles = list(trained_models)
    if needs_reference_model(config):
        roles.append("ref")
    if config.reward_model.enable:
        roles.append("reward_model")

    recomputed: Changes = {}
    offloaded_activations: Changes = {}
    for model in trained_models.values():
        recomputed[f"{model}.enable_gradient_checkpointing"] = True
        recomputed[f"{model}.gradient_checkpointing_layers"] = None
        offloaded_activations[f"{model}.enable_activation_offload"] = True

    adapters: list[Changes] = []
    if not config.model.lora_rank:
        adapters.append({"model.lora_rank": LORA_RANK})
    offloaded_weights = [f"{role}.fsdp_config.param_offload" for role in roles]
    offloaded_moments = [f"{role}.fsdp_config.optimizer_offload" for role in trained_models]
    engine_sizes = _engine_sizes(config, networks.policy, slots)
    sequences = min(SEQUENCES, config.rollout.max_num_seqs)
    alternatives: list[list[Changes]] = [
        adapters,
        [recomputed | offloaded_activations],
        [dict.fromkeys(offloaded_weights, True)],
        [dict.fromkeys(offloaded_moments, True)],
        [{TENSOR: size} for size in engine_sizes],
        _sequence_parallel_changes(config, networks.policy, slots),
        [recomputed],
        [_one_row_changes(config)],
        [{"rollout.max_num_seqs": sequences}],
        # the engine sleeps during the update, so that its share takes nothing from it
        [{"rollout.gpu_memory_utilization": share} for share in SHARES],
    ]
    levels = []
    for alternatives_of_level in alternatives:
        effective = [changes for changes in alternatives_of_level if _is_change(config, changes)]
        levels.append([{}, *effective])
    return levels


def _dividing_sizes(shape: ModelShape, slots: int) -> list[int]:
    """Returns the numbers of devices that divide the run and the heads of the network into equal parts."""
    sizes = []
    for size in range(2, slots + 1):
        divides_run = slots % size == 0
        divides_heads = shape.heads % size == 0
        if divides_run and divides_heads:
            sizes.append(size)
    return sizes


def _engine_sizes(config: PPOConfig, shape: ModelShape, slots: int) -> list[int]:
    """Returns larger numbers of devices for an engine. An engine does not extend over several machines."""
    configured = config.rollout.tensor_model_parallel_size
    largest = slots // config.trainer.nnodes
    sizes = _dividing_sizes(shape, slots)
    return [size for size in sizes if configured < size <= largest]


def _one_row_changes(config: PPOConfig) -> Changes:
    """Returns the changes with which a micro-batch has one row, even if all rows have the maximal length."""
    if not config.actor.use_dynamic_bsz:
        return {"actor.ppo_micro_batch_size_per_gpu": 1}
    budget = math.ceil(config.longest_sample / config.actor.ulysses_sequence_parallel_size)
    return {BUDGET: budget}


def _sequence_parallel_changes(config: PPOConfig, shape: ModelShape, slots: int) -> list[Changes]:
    """Returns changes to more ranks that share each sequence; none if the network does not run packed."""
    if not shape.is_packed or not config.model.use_remove_padding:
        return []
    alternatives = []
    for size in _dividing_sizes(shape, slots):
        # each rank gets whole heads of keys and values, or several ranks get copies of one
        splits_heads = shape.kv_heads % size == 0 or size % shape.kv_heads == 0
        if size > config.actor.ulysses_sequence_parallel_size and splits_heads:
            budget = math.ceil(config.longest_sample / size)
            alternatives.append(_one_row_changes(config) | {RANKS: size, BUDGET: budget})
    return alternatives


def _is_change(config: PPOConfig, changes: Changes) -> bool:
    """Returns True if the configuration has another value for one of the keys."""
    for key, value in changes.items():
        if value_of(config, key) != value:
            return True
    return False


def _command_line(options: Sequence[str]) -> str:
    """Returns the command that trains with these options. Of several options with one key, the last one counts."""
    last_of_key = {}
    for option in options:
        key, _, _ = option.partition("=")
        last_of_key[key] = option
    return f"python -m trainer.main_ppo {shlex.join(last_of_key.values())}"


def fit_table(
    config: PPOConfig,
    networks: Networks,
    slots: int,
    device: Accelerator,
    memory_gib: float,
    words: Sequence[str],
) -> tuple[bool, list[str]]:
    """Finds the cheapest changes for several sizes of a device.

    Args:
        config, networks, slots, device: See `find_fit`.
        memory_gib: Memory of the planned device.
        words: Options of the plan's command line.

    Returns:
        True if a set of changes fits `memory_gib`, and lines with the changes for each size and the command line for
        `memory_gib`.
    """
    # a device sold as 80 GiB has 79.1, and needs no second line for 80
    other_sizes = [size for size in SIZES_GIB if abs(size - memory_gib) > 1]
    lines = [f"{'what fits':<26}{'GiB needed':>12}{'on the host':>13}   cheapest changes"]
    command = ""
    for size in sorted({memory_gib, *other_sizes}):
        changes, plan = find_fit(config, networks, slots, device, size)
        if changes is None:
            problems = [f"nothing tried fits: the phase {plan.worst!r} needs the most", *plan.notes]
            text = "; ".join(problems)
        else:
            options = [f"{key}={written_value(value)}" for key, value in changes.items()]
            text = " ".join(options) or "none"
            if size == memory_gib:
                devices = f"trainer.n_gpus_per_node={slots // config.trainer.nnodes}"
                command = _command_line([*words, devices, *options])
        device_gib = max(plan.device_bytes, plan.engine_bytes) / GIB
        host_gib = sum(plan.host.values()) / GIB
        device_name = f"a device of {size:g} GiB"
        lines.append(f"  {device_name:<24}{device_gib:>12.1f}{host_gib:>13.1f}   {text}")
    return bool(command), [*lines, "", command]
