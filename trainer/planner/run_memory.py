"""The memory of a run before it starts: what each phase of a step takes on one device, and of the disk.

Takes the configuration, the shapes of its networks (config.json alone), the number of devices and what a device is;
gives phases of named bytes. The phases are those of `workers/phase.py`: who is not at work is asleep or offloaded where
the options say so, and on a CPU everything stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from trainer import requirements
from trainer.planner.memory import (
    HeldNetwork,
    Pass,
    engine_weights,
    engine_work,
    forward_only,
    kept_when_freed,
    kv_bytes_per_token,
    sync_bytes,
    training_pass,
)
from trainer.planner.model_shape import ModelShape, read_shape
from trainer.planner.step_time import Accelerator
from trainer.planner.table import GIB, Phase, with_context
from trainer.requirements import needs_critic, needs_old_log_prob, needs_reference, needs_reference_model
from trainer.resources import VLLM_BYTES, WORKER_BYTES
from verl_lite.config import FSDPConfig, PPOConfig
from workers.critic import critic_network
from workers.rollout.base import resolve_engine_name

BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Networks:
    """Shapes of the run's networks; None where a role does not exist."""

    policy: ModelShape
    critic: ModelShape | None = None
    reward_model: ModelShape | None = None


@dataclass
class MemoryPlan:
    """Of one device. always: there in every phase, bytes by name. on_cpu: no moving, no context. host: on the host of
    each rank where options put it there. notes: what would stop the run although the sum fits."""

    always: dict[str, float]
    phases: list[Phase]
    on_cpu: bool
    base: float
    host: dict[str, float] = field(default_factory=dict)
    sequences: int = 0
    micro_batches: int = 1
    notes: list[str] = field(default_factory=list)

    @property
    def worst(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def resident(self) -> float:
        """Bytes that are there in every phase."""
        return sum(self.always.values())

    @property
    def peak(self) -> float:
        """Bytes of tensors at the worst moment."""
        return self.resident + self.worst.total

    def by_phase(self) -> dict[str, float]:
        """Bytes of tensors in each phase, what is always there included."""
        return {phase.name: self.resident + phase.total for phase in self.phases}

    @property
    def device_bytes(self) -> float:
        """What the device has to have: with context and fragmentation on a GPU, the process's libraries on a CPU."""
        return self.peak + self.base if self.on_cpu else with_context(self.peak)

    def fits(self, memory_bytes: float) -> bool:
        """Whether a device of so many bytes holds it, and nothing else stops it."""
        return self.device_bytes <= memory_bytes and not self.notes


@dataclass(frozen=True)
class _Engine:
    """A training engine of a role."""

    role: str
    network: HeldNetwork
    fsdp: FSDPConfig

    def parts(self) -> Iterator[tuple[str, float, bool]]:
        """What it keeps from step to step: name, bytes, and whether that waits on the host."""
        yield "weights", self.network.weights, self.fsdp.param_offload
        if self.network.moments:
            yield "AdamW's moments", self.network.moments, self.fsdp.optimizer_offload


def read_networks(config: PPOConfig) -> Networks:
    """The shapes, from config.json files. UserError where one is missing."""
    policy, critic, scorer = read_shape(config.model), None, None
    if needs_critic(config):
        network = critic_network(config)
        own = config.critic.model.path is not None
        critic = read_shape(network, "critic.model.path" if own else "model.path").as_scorer()
    if config.reward_model.enable:
        scorer = read_shape(config.reward_model.model, "reward_model.model.path").as_scorer()
    return Networks(policy, critic, scorer)


def memory_plan(config: PPOConfig, networks: Networks, slots: int, device: Accelerator) -> MemoryPlan:
    """The memory of a training step on one of `slots` devices."""
    on_cpu = device.name == "cpu"
    engines = {engine.role: engine for engine in _engines(config, networks, slots, device)}
    plan = MemoryPlan({}, [], on_cpu, WORKER_BYTES)
    moved: dict[str, dict[str, float]] = {role: {} for role in engines}  # to the device for the phases of a role
    for role, engine in engines.items():
        for name, size, is_offloaded in engine.parts():
            if on_cpu or not is_offloaded:
                plan.always[f"{role}: {name}"] = size
            else:
                plan.host[f"{role}: {name}"] = moved[role][f"{name}, from the host"] = size
    if resolve_engine_name(config.rollout.name) == "vllm":
        plan.base += VLLM_BYTES
    rollout, asleep = _rollout_parts(config, networks.policy, device, plan, slots)
    for phase, role in _train_phases(config, networks, engines, slots, plan):
        plan.phases.append(Phase(phase.name, {**({} if asleep else rollout), **moved[role], **phase.parts}))
    plan.phases.insert(0, Phase("rollout", rollout))
    plan.phases.append(_sync_phase(config, engines["actor"], rollout, moved, asleep))
    return plan


# -- who holds what ----------------------------------------------------------------------------------------------------


def trained_parameters(config: PPOConfig, shape: ModelShape) -> tuple[int, int]:
    """(numbers that learn, numbers of the adapter) of the policy."""
    model = config.model
    if not model.lora_rank:
        return shape.parameters, 0
    if list(model.target_modules) == ["all-linear"] and not model.exclude_modules:
        adapter = shape.adapter_parameters(model.lora_rank)
    else:
        from workers.policy.loading import count_trained

        adapter = count_trained(model)
    return adapter, adapter


def compute_size(name: str, device: Accelerator) -> int:
    """Bytes of a number of a dtype option; `auto` is the device's."""
    return BYTES.get(name, device.size)


def ranks_of_a_copy(fsdp: FSDPConfig, slots: int) -> int:
    """Over how many devices one copy of the weights is spread."""
    return slots if fsdp.fsdp_size < 1 else min(fsdp.fsdp_size, slots)


def _engines(config: PPOConfig, networks: Networks, slots: int, device: Accelerator) -> Iterator[_Engine]:
    """Training engines by role."""

    def held(role: str, shape: ModelShape, fsdp: FSDPConfig, trained: int = 0, adapter: int = 0) -> _Engine:
        ranks = ranks_of_a_copy(fsdp, slots)
        precision = fsdp.mixed_precision
        compute, reduce = (compute_size(name, device) for name in (precision.param_dtype, precision.reduce_dtype))
        network = HeldNetwork(
            shape,
            ranks,
            compute,
            reduce,
            trained,
            adapter,
            fsdp.reshard_after_forward,
            fsdp.reduce_every_micro_batch,
        )
        return _Engine(role, network, fsdp)

    trained, adapter = trained_parameters(config, networks.policy)
    yield held("actor", networks.policy, config.actor.fsdp_config, trained, adapter)
    if needs_reference_model(config):
        yield held("reference", networks.policy, config.ref.fsdp_config)
    if networks.critic is not None:
        yield held("critic", networks.critic, config.critic.fsdp_config, networks.critic.parameters)
    if networks.reward_model is not None:
        yield held("reward model", networks.reward_model, config.reward_model.fsdp_config)


# -- rollout -----------------------------------------------------------------------------------------------------------


def longest_row(config: PPOConfig) -> int:
    """Tokens of a row at most."""
    return config.data.max_prompt_length + config.data.max_response_length


def _rollout_parts(
    config: PPOConfig, shape: ModelShape, device: Accelerator, plan: MemoryPlan, slots: int
) -> tuple[dict[str, float], bool]:
    """(the rollout engine's parts by name, whether it sleeps in other phases). Fills in plan.sequences."""
    rollout, on_cpu = config.rollout, device.name == "cpu"
    size, parallel = compute_size(rollout.dtype, device), rollout.tensor_model_parallel_size
    context = rollout.max_model_len or longest_row(config)
    weights = engine_weights(shape, size, parallel)
    of_one = kv_bytes_per_token(shape, size, parallel) * context
    work = engine_work(shape, size, rollout.max_num_batched_tokens, rollout.max_num_seqs, parallel)
    if on_cpu:
        budget = float(rollout.kv_cache_memory_mb << 20)
    else:
        budget = rollout.gpu_memory_utilization * (device.memory_gib or 0) * GIB - weights - work
    plan.sequences = min(rollout.max_num_seqs, max(0, int(budget // of_one)))
    if plan.sequences < 1:
        key = "kv_cache_memory_mb" if on_cpu else "gpu_memory_utilization"
        plan.notes.append(
            f"rollout.{key}={getattr(rollout, key)}: leaves {max(0.0, budget) / GIB:.2f} GiB for the KV cache, and one "
            f"sequence of {context} tokens takes {of_one / GIB:.2f}"
        )
    is_vllm = resolve_engine_name(rollout.name) == "vllm"
    kv = max(0.0, budget) if is_vllm else plan.sequences * of_one
    if on_cpu:
        work = _cpu_engine_work(config, shape, size, plan.sequences, slots)
    parts = {"engine: weights": weights, "engine: KV cache": kv, "engine: a step": work}
    return parts, rollout.free_cache_engine and not on_cpu


def _cpu_engine_work(config: PPOConfig, shape: ModelShape, size: int, sequences: int, slots: int) -> float:
    """A step of as many rows and tokens as a device's part of the batch has."""
    rows = max(1, min(sequences, math.ceil(rows_per_step(config) / slots)))
    prompts = config.data.max_prompt_length * rows
    return engine_work(shape, size, min(config.rollout.max_num_batched_tokens, prompts), rows)


# -- training ----------------------------------------------------------------------------------------------------------


def rows_per_step(config: PPOConfig) -> int:
    """Answers (of agents: episodes) of a training step."""
    if config.is_agentic:
        return config.agentic.rollout_batch_size
    return config.data.train_batch_size * config.rollout.n


def mini_batch_prompts(config: PPOConfig, size: int) -> int:
    """Prompts (of agents: episodes) of an optimizer step; size: the option, -1 = the whole batch."""
    whole = config.agentic.rollout_batch_size if config.is_agentic else config.data.train_batch_size
    return whole if size == -1 else min(whole, size)


def _mini_batch_rows(config: PPOConfig, prompts: int) -> int:
    """Rows of an optimizer step over so many prompts."""
    return prompts if config.is_agentic else prompts * config.rollout.n


def _micro_batch(config: PPOConfig, cut: requirements.MicroBatching, rows: int) -> tuple[int, int]:
    """(rows of a micro-batch, micro-batches) of one device that has `rows` rows, if all are as long as allowed."""
    if cut.max_token_len is not None:
        together = max(1, cut.max_token_len // longest_row(config))
    else:
        together = cut.micro_batch_size or 1
    together = max(1, min(together, rows))
    return together, math.ceil(max(1, rows) / together)


def distinct_prompts(config: PPOConfig, rows: int, prompts: int) -> int:
    """Prompts, at most, of which `rows` answers to a batch of `prompts` consist in a packed row; one for each row where
    nothing is shared (`workers.engine.packing`)."""
    return min(rows, prompts) if config.model.use_remove_padding and not config.is_agentic else rows


def _pass(config: PPOConfig, rows: int, prompts: int, size: int, entropy: bool) -> Pass:
    """prompts: of the batch that the micro-batch is a part of."""
    data = config.data
    shared = data.max_prompt_length * (rows - distinct_prompts(config, rows, prompts))
    return Pass(
        tokens=rows * longest_row(config) - shared,
        predicted=rows * data.max_response_length,
        chunk=config.actor.log_prob_chunk_tokens,
        size=size,
        entropy=entropy,
        repeated=shared,
    )


def _train_phases(
    config: PPOConfig, networks: Networks, engines: dict[str, _Engine], slots: int, plan: MemoryPlan
) -> Iterator[tuple[Phase, str]]:
    """Each phase of the training engines, and whose."""
    rows, actor = math.ceil(rows_per_step(config) / slots), config.actor

    def forward(name: str, role: str, cut: requirements.MicroBatching, *, entropy: bool = False) -> tuple[Phase, str]:
        network = engines[role].network
        together, _ = _micro_batch(config, cut, rows)
        run = _pass(config, together, config.data.train_batch_size, network.compute, entropy)
        return Phase(name, forward_only(network, run)), role

    def update(network: HeldNetwork, run: Pass, count: int, checkpointing: bool) -> dict[str, float]:
        parts = training_pass(network, run, count, checkpointing=checkpointing)
        return parts | ({"freed, kept by the C library": kept_when_freed(parts, count)} if plan.on_cpu else {})

    if networks.reward_model is not None:
        yield forward("reward model", "reward model", requirements.cut_of_reward_model(config))
    if needs_old_log_prob(config):
        yield forward("old log-probs", "actor", requirements.cut_of_log_probs(config, config.rollout), entropy=True)
    if needs_reference(config):
        role = "reference" if "reference" in engines else "actor"
        yield forward("reference log-probs", role, requirements.cut_of_log_probs(config, config.ref))
    if networks.critic is not None:
        critic = config.critic
        yield forward("values", "critic", requirements.cut_of_values(config))
        prompts = mini_batch_prompts(config, critic.ppo_mini_batch_size or actor.ppo_mini_batch_size)
        mini = _mini_batch_rows(config, prompts)
        together, count = _micro_batch(config, requirements.cut_of_critic_update(config), math.ceil(mini / slots))
        network = engines["critic"].network
        run = _pass(config, together, prompts, network.compute, entropy=False)
        checkpointing = critic.model.enable_gradient_checkpointing
        yield Phase("critic update", update(network, run, count, checkpointing)), "critic"
    prompts = mini_batch_prompts(config, actor.ppo_mini_batch_size)
    mini = _mini_batch_rows(config, prompts)
    together, plan.micro_batches = _micro_batch(config, requirements.cut_of_update(config), math.ceil(mini / slots))
    network = engines["actor"].network
    run = _pass(config, together, prompts, network.compute, actor.calculate_entropy or actor.entropy_coeff != 0)
    checkpointing = config.model.enable_gradient_checkpointing
    yield Phase("update", update(network, run, plan.micro_batches, checkpointing)), "actor"


def _sync_phase(
    config: PPOConfig, actor: _Engine, rollout: dict[str, float], moved: dict[str, dict[str, float]], asleep: bool
) -> Phase:
    """Weights of both engines, and the bucket between them; AdamW's moments have left if they may."""
    there = {name: value for name, value in rollout.items() if name == "engine: weights" or not asleep}
    there.pop("engine: a step", None)
    there |= {name: value for name, value in moved["actor"].items() if "AdamW" not in name}
    bucket = config.rollout.update_weights_bucket_megabytes << 20
    return Phase("weight sync", there | {"bucket": sync_bytes(actor.network, bucket)})
