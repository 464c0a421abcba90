"""Chooses options by memory: null options at launch, and the cheapest changes with which a run fits a device."""

import bisect
import itertools
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

from trainer.planner.accelerators import Accelerator
from trainer.planner.memory import GIB, MemoryPlan, Networks, memory_plan
from trainer.requirements import needs_reference_model
from verl_lite.config import NetworkConfig, PPOConfig

SIZES_GIB = (8.0, 16.0, 24.0, 80.0)  # devices that the search reports besides the planned one
SPARE = 0.85  # share of the memory up to which layers keep their activations instead of being recomputed
LORA_RANK = 32  # of the proposed adapter
SHARES = (0.7, 0.85, 0.3)  # of the device's memory for the engine, besides the configured one
SEQUENCES = 16  # decoded at a time, at least
BUDGET, RANKS = "actor.ppo_max_token_len_per_gpu", "actor.ulysses_sequence_parallel_size"
Changes = dict[str, Any]  # values by key


def decide_sharding(
    config: PPOConfig, networks: Networks, slots: int, device: Accelerator, memory_gib: float | None
) -> str:
    """Sets `fsdp_size` (if the actor's is null), `reduce_every_micro_batch` and, on a GPU,
    `gradient_checkpointing_layers` where they are null. Returns a sentence about each decision, or an empty string.

    On several machines, each machine gets a full copy of the weights if that fits, so that layers are gathered within a
    machine. If full gradients do not fit, they are reduced after each micro-batch. Then as many layers keep their
    activations as fit in the share SPARE of the memory.
    """
    decisions = [_decide_reduction(config, networks, slots, device, memory_gib)]
    if device.name != "cpu" and memory_gib is not None:
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
    for key, model, shape in (
        ("model", config.model, networks.policy),
        ("critic.model", config.critic.model, networks.critic),
    ):
        if shape is None or not model.enable_gradient_checkpointing or model.gradient_checkpointing_layers is not None:
            continue

        def fits(number: int, model: NetworkConfig = model) -> bool:
            model.gradient_checkpointing_layers = number
            return memory_plan(config, networks, slots, device).fits(memory_bytes)

        number = bisect.bisect_left(range(shape.layers), True, key=fits)
        model.gradient_checkpointing_layers = number if number < shape.layers else None
        if number < shape.layers:
            kept = f"{shape.layers - number} of {shape.layers} layers keep their activations"
            yield f"{kept}: {key}.gradient_checkpointing_layers={number}"


# -- search ------------------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """changes: options to change; None if no tried set of changes fits. plan: the plan with these changes, or the plan
    that needs the least memory."""

    changes: Changes | None
    plan: MemoryPlan


def find_fit(config: PPOConfig, networks: Networks, slots: int, device: Accelerator, memory_gib: float) -> Fit:
    """Returns the first set of changes that fits a GPU with this memory. Sets are tried in the order of their most
    expensive change, so no part of the returned set is enough. The configuration is unchanged afterwards."""
    device, least = replace(device, memory_gib=memory_gib), None
    for chosen in itertools.product(*reversed(list(_levels(config, networks, slots)))):
        changes = {key: value for level in reversed(chosen) for key, value in level.items()}
        if BUDGET in changes:
            ranks = changes.get(RANKS, config.actor.ulysses_sequence_parallel_size)
            changes[BUDGET] = math.ceil(longest_row(config) / ranks)
        before = {key: _assign(config, key) for key in _DECIDED}
        before |= {key: _assign(config, key, value) for key, value in changes.items()}
        _decide_reduction(config, networks, slots, device, memory_gib)
        plan = memory_plan(config, networks, slots, device)
        for key, value in before.items():
            _assign(config, key, value)
        if plan.fits(memory_gib * GIB):
            return Fit(changes, plan)
        if least is None or (len(plan.notes), plan.device_bytes) < (len(least.notes), least.device_bytes):
            least = plan
    assert least is not None
    return Fit(None, least)


_DECIDED = [
    f"{role}.fsdp_config.{name}" for role in ("actor", "critic") for name in ("fsdp_size", "reduce_every_micro_batch")
] + ["ref.fsdp_config.fsdp_size"]
_UNCHANGED = object()


def _assign(config: PPOConfig, key: str, value: Any = _UNCHANGED) -> Any:
    """Returns the value of a dotted key, and sets the key if a value is given."""
    *sections, name = key.split(".")
    section = reduce(getattr, sections, config)
    before = getattr(section, name)
    if value is not _UNCHANGED:
        setattr(section, name, value)
    return before


def longest_row(config: PPOConfig) -> int:
    """Returns the largest number of tokens of a sequence."""
    return config.data.max_prompt_length + config.data.max_response_length


def hold_longest_row(config: PPOConfig) -> list[str]:
    """Raises the token budget of the micro-batches to the longest sequence if it is smaller. Returns the option."""
    actor = config.actor
    needed = math.ceil(longest_row(config) / actor.ulysses_sequence_parallel_size)
    if not actor.use_dynamic_bsz or actor.ppo_max_token_len_per_gpu >= needed:
        return []
    actor.ppo_max_token_len_per_gpu = needed
    return [f"{BUDGET}={needed}"]


def _levels(config: PPOConfig, networks: Networks, slots: int) -> Iterator[list[Changes]]:
    """Yields the changes from the cheapest to the most expensive in time, each as a list of alternatives that begins
    with no change. Only the last, an adapter, changes the result."""
    rollout, actor, shape = config.rollout, config.actor, networks.policy
    trained, models = ["actor"], ["model"]
    if networks.critic is not None:
        trained, models = [*trained, "critic"], [*models, "critic.model"]
    frozen = ["ref"] * needs_reference_model(config) + ["reward_model"] * config.reward_model.enable

    def level(*alternatives: Changes) -> list[Changes]:
        changed = (
            {key: value for key, value in each.items() if _assign(config, key) != value} for each in alternatives
        )
        return [{}, *filter(None, changed)]

    # engines sleep during the update, unless free_cache_engine=false
    yield level(*({"rollout.gpu_memory_utilization": share} for share in SHARES))
    yield level({"rollout.max_num_seqs": min(SEQUENCES, rollout.max_num_seqs)})
    yield level({BUDGET: "one sequence"} if actor.use_dynamic_bsz else {"actor.ppo_micro_batch_size_per_gpu": 1})
    all_layers = {"enable_gradient_checkpointing": True, "gradient_checkpointing_layers": None}
    yield level({f"{model}.{key}": value for model in models for key, value in all_layers.items()})
    ranks = actor.ulysses_sequence_parallel_size
    is_packed = shape.is_packed and config.model.use_remove_padding
    sizes = [size for size in _divisors(math.gcd(slots, shape.heads)) if size > ranks and is_packed]
    sizes = [size for size in sizes if not shape.kv_heads % size or not size % shape.kv_heads]
    yield level(*({RANKS: size} for size in sizes))
    here = math.gcd(slots // config.trainer.nnodes, shape.heads)
    parallel = rollout.tensor_model_parallel_size
    yield level(*({"rollout.tensor_model_parallel_size": size} for size in _divisors(here) if size > parallel))
    yield level({f"{role}.fsdp_config.optimizer_offload": True for role in trained})
    yield level({f"{role}.fsdp_config.param_offload": True for role in (*trained, *frozen)})
    yield level({f"{model}.enable_activation_offload": True for model in models})
    yield level({"model.lora_rank": config.model.lora_rank or LORA_RANK})


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def fit_table(
    config: PPOConfig, networks: Networks, slots: int, device: Accelerator, memory_gib: float, given: Sequence[str]
) -> tuple[bool, list[str]]:
    """Returns True if a set of changes fits `memory_gib`, and lines with the changes for several device sizes and the
    command line for `memory_gib`. given: the options of the plan's command line."""
    others = (size for size in SIZES_GIB if abs(size - memory_gib) > 1)
    found = {size: find_fit(config, networks, slots, device, size) for size in sorted({*others, memory_gib})}
    title = f"sequences of {longest_row(config):,} tokens"
    lines = [f"{title:<30}{'GiB needed':>12}{'on the host':>13}   cheapest changes that fit"]
    for size, (changes, plan) in found.items():
        needed, host = max(plan.device_bytes, plan.engine_bytes) / GIB, sum(plan.host.values()) / GIB
        text = "no changes" if changes == {} else _shown(changes or {})
        if changes is None:
            text = "; ".join([f"nothing tried fits: the phase {plan.worst!r} needs the most", *plan.notes])
        lines.append(f"  {f'a device of {size:g} GiB':<28}{needed:>12.1f}{host:>13.1f}   {text}")
    if (changes := found[memory_gib].changes) is None:
        return False, lines
    devices = f"trainer.n_gpus_per_node={slots // config.trainer.nnodes}"
    options = [option for option in given if option.partition("=")[0] not in {*changes, "trainer.n_gpus_per_node"}]
    lines += ["", f"python -m trainer.main_ppo {shlex.join(options)} {devices} {_shown(changes)}".rstrip()]
    if "model.lora_rank" in changes:
        lines.append("model.lora_rank trains an adapter instead of all weights; no other change affects the result")
    return True, lines


def _shown(changes: Changes) -> str:
    return " ".join(f"{key}={'null' if value is None else str(value).lower()}" for key, value in changes.items())
