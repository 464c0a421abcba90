"""Predicts the memory that each phase of a training step needs on one device.

Inputs are the configuration, the shapes of the networks (from config.json only), the number of devices and the kind of
device. The result is a dict of named byte counts for each phase of `workers/engine/phase.py`. On a GPU, components that
are idle in a phase sleep or are offloaded as configured; on a CPU everything stays in memory. The formulas are in
`networks.py` (weights and moments), `pass_bytes.py` (a micro-batch) and `engine_bytes.py` (rollout engine and weight
update). `python -m tests.bench plan_memory` compares the predictions with a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from trainer.planner.accelerators import Accelerator
from trainer.planner.engine_bytes import copied_matrices, engine_work, kv_bytes_per_token, sync_bytes
from trainer.planner.memory_table import (
    ENGINE_COPIES,
    ENGINE_IMAGES,
    ENGINE_STEP,
    GIB,
    KEPT_FREED,
    TOWER,
    VLLM_BYTES,
    WORKER_BYTES,
    MemoryPlan,
)
from trainer.planner.model_shape import ModelShape
from trainer.planner.networks import (
    FP32,
    TEACHER,
    HeldNetwork,
    Networks,
    compute_size,
    held_networks,
    recomputed_layers,
)
from trainer.planner.pass_bytes import (
    Pass,
    forward_only,
    kept_activations,
    kept_after_update,
    kept_when_freed,
    tile_bytes,
    tower_parts,
    training_pass,
)
from trainer.ppo import requirements
from trainer.ppo.requirements import distilled_tokens, needs_old_log_prob, needs_reference
from verl_lite.config import DataConfig, NetworkConfig, PPOConfig, RolloutConfig
from workers.engine.packing import is_tree_cheaper
from workers.engines.base import resolve_engine_name

TOP_TOKEN_BYTES = 36
"""Bytes for each of the top tokens at a position: logits and ids of two tiles, their sorted union, results."""
DISTILLED_TOKEN_BYTES = 60
"""Bytes for each token of a divergence: ids, 8 fp32 tensors of both distributions, and gradients."""

Parts = dict[str, float]
"""Bytes by name."""


def memory_plan(config: PPOConfig, networks: Networks, slots: int, device: Accelerator) -> MemoryPlan:
    """Predicts the memory of a training step on one of `slots` devices."""
    on_cpu = device.name == "cpu"
    rollout = config.rollout
    is_vllm = resolve_engine_name(rollout.name) == "vllm"
    engine_libraries = float(VLLM_BYTES) if is_vllm else 0.0

    base = None
    # on a GPU, libraries take no memory of the device beyond its context
    if on_cpu:
        base = float(WORKER_BYTES)
        if config.hybrid_engine:
            base += engine_libraries
    plan = MemoryPlan(always={}, phases={}, base=base)

    held = dict(held_networks(config, networks, slots, device))
    weights, moments = place_networks(plan, held, on_cpu)
    _place_batch(plan, config, networks, held["actor"], slots)

    engine = _engine_parts(config, networks.policy, device, plan, slots)
    if config.hybrid_engine:
        plan.phases["rollout"] = engine
    # engines of the training and of the rollout share the device in turns (`PhaseManager`)
    idle_engine = _held_by_idle_engine(config, engine, on_cpu, is_vllm)
    training = _TrainPhases(config, held, slots, plan)
    for phase in training.phases():
        loaded = weights[phase.role]
        if phase.is_update:
            loaded = loaded | moments[phase.role]
        plan.phases[phase.name] = idle_engine | loaded | phase.parts

    bucket_bytes = rollout.bucket_megabytes(on_cpu) << 20
    bucket = sync_bytes(held["actor"], bucket_bytes, on_cpu=on_cpu)
    sync = weights["actor"] | {"bucket": bucket}
    if config.hybrid_engine:
        sync = _held_by_receiving_engine(engine, idle_engine) | sync
    plan.phases["weight sync"] = sync

    # engines on devices of their own get the weights bucket by bucket
    if not config.hybrid_engine:
        sent = float(held["actor"].compute * networks.policy.parameters)
        bucket_of_engine = min(sent, float(bucket_bytes))
        plan.engine = engine | {"bucket": bucket_of_engine}
        if on_cpu:
            plan.engine["libraries of the engine"] = engine_libraries
    return plan


def place_networks(
    plan: MemoryPlan, held: Mapping[str, HeldNetwork], on_cpu: bool
) -> tuple[dict[str, Parts], dict[str, Parts]]:
    """Adds the weights and moments of networks to the plan.

    Returns:
        By role, the offloaded weights, which are loaded for all phases of a role, and the offloaded moments, which are
        loaded only for its update.
    """
    weights: dict[str, Parts] = {}
    moments: dict[str, Parts] = {}
    for role, network in held.items():
        fsdp = network.fsdp
        # on a CPU, device and host are the same memory, and offloading does nothing
        offloads_weights = fsdp.param_offload and not on_cpu
        offloads_moments = fsdp.optimizer_offload and not on_cpu

        weights[role] = _place(plan, role, "weights", network.weights, is_offloaded=offloads_weights)
        moments_name = f"{network.optimizer}'s moments"
        moments[role] = _place(plan, role, moments_name, network.moments, is_offloaded=offloads_moments)
    return weights, moments


def _place(plan: MemoryPlan, role: str, name: str, size: float, *, is_offloaded: bool) -> Parts:
    """Adds tensors of a role to the plan. Returns the bytes that are loaded from the host for a phase."""
    if not size:
        return {}
    if not is_offloaded:
        plan.always[f"{role}: {name}"] = size
        return {}
    plan.host[f"{role}: {name}"] = size
    return {f"{name}, from the host": size}


def update_parts(plan: MemoryPlan, role: str, network: HeldNetwork, micro_batch: Pass, model: NetworkConfig) -> Parts:
    """Returns the bytes of forward and backward of an update with `plan.micro_batches` micro-batches.

    Adds offloaded activations to the memory of the host.

    Args:
        plan: The plan of the run.
        role: Role of the network.
        network: The network.
        micro_batch: The largest micro-batch.
        model: Options of the network.
    """
    recomputed = recomputed_layers(model, network.shape)
    # on a CPU, offload frees nothing
    is_offloaded = model.enable_activation_offload and plan.base is None
    if is_offloaded:
        plan.host[f"{role}: activations"] = kept_activations(network, micro_batch, recomputed)
    return training_pass(network, micro_batch, plan.micro_batches, recomputed=recomputed, offload=is_offloaded)


def _place_batch(plan: MemoryPlan, config: PPOConfig, networks: Networks, actor: HeldNetwork, slots: int) -> None:
    """Adds large columns of the batch, which exist during the whole step: images, and log-probs of teachers."""
    # the driver's batch is in the memory of the host, which a CPU worker shares
    columns = plan.host if plan.base is None else plan.always
    tower = networks.policy.tower
    if tower is not None:
        longest = config.data.max_prompt_length
        image_tokens = longest * _prompts_of_device(config, slots)
        columns["images of the batch"] = tower.pixel_bytes(image_tokens, actor.compute)
        plan.images = (
            f"assumed: all {longest} tokens of a prompt (data.max_prompt_length) are images, which have "
            f"{longest * tower.per_token} patches; with fewer or smaller images it is less"
        )
    if config.distillation.is_active:
        # a log-prob and an id for each of the teacher's top tokens; without top tokens, the sampled token's log-prob
        values_per_token = max(1, 2 * distilled_tokens(config))
        rows = math.ceil(rows_per_step(config) / slots)
        values = values_per_token * config.data.max_response_length * rows
        columns["log-probs of the teachers"] = float(FP32 * values)


# -- the rollout engine ------------------------------------------------------------------------------------------------


def _held_by_idle_engine(config: PPOConfig, engine: Mapping[str, float], on_cpu: bool, is_vllm: bool) -> Parts:
    """Returns the parts of a rollout engine's memory that it keeps while networks compute on the same device."""
    if not config.hybrid_engine:
        return {}
    # on a GPU, such an engine sleeps, without weights and cache
    if config.rollout.free_cache_engine and not on_cpu:
        return {}
    freed = {ENGINE_IMAGES}
    # vLLM keeps the buffers of its step
    if not is_vllm:
        freed.add(ENGINE_STEP)
    # the hf engine discards its copies when another engine begins to compute
    if config.rollout.free_cache_engine:
        freed.add(ENGINE_COPIES)
    return {name: size for name, size in engine.items() if name not in freed}


def _held_by_receiving_engine(engine: Mapping[str, float], idle_engine: Mapping[str, float]) -> Parts:
    """Returns the parts of a rollout engine's memory while it receives new weights.

    Args:
        engine: All parts of the engine.
        idle_engine: Those that it keeps while networks compute.
    """
    # only the weights are awake, and whatever an idle engine keeps anyway
    parts = {"engine: weights": engine["engine: weights"], **idle_engine}
    parts.pop(ENGINE_STEP, None)
    # an update of the weights discards their copies
    parts.pop(ENGINE_COPIES, None)
    return parts


def _engine_parts(config: PPOConfig, shape: ModelShape, device: Accelerator, plan: MemoryPlan, slots: int) -> Parts:
    """Returns the bytes of the rollout engine by name.

    Sets `plan.sequences`, and adds a note to the plan if the engine has no room for a single sequence.
    """
    rollout = config.rollout
    data = config.data
    on_cpu = device.name == "cpu"
    size = compute_size(rollout.dtype, device)
    parallel = rollout.tensor_model_parallel_size
    weights = size * shape.parameters / parallel
    context = rollout.max_model_len or config.longest_sample
    kv_per_sequence = kv_bytes_per_token(shape, size, parallel) * context

    images = 0.0
    if shape.tower is not None:
        # equal prompts are prefilled once
        prompt_tokens = data.max_prompt_length * _prompts_of_device(config, slots)
        prefilled_tokens = min(rollout.max_num_batched_tokens, prompt_tokens)
        images = shape.tower.prefill_bytes(prefilled_tokens, size)

    work = engine_work(shape, size, rollout.max_num_batched_tokens, rollout.max_num_seqs, parallel)
    cache_bytes = _cache_bytes(rollout, device, weights, work, images)
    plan.sequences = min(rollout.max_num_seqs, int(cache_bytes // kv_per_sequence))
    if plan.sequences < 1:
        option = "kv_cache_memory_mb" if on_cpu else "gpu_memory_utilization"
        plan.notes.append(
            f"rollout.{option}={getattr(rollout, option)}: leaves {cache_bytes / GIB:.2f} GiB "
            f"for the KV cache, but one sequence of {context} tokens needs {kv_per_sequence / GIB:.2f}"
        )
    if on_cpu:
        # an engine step has at most the rows and tokens of one device's part of the batch
        rows_of_device = math.ceil(rows_per_step(config) / slots)
        rows = max(1, min(plan.sequences, rows_of_device))
        batched_tokens = min(rollout.max_num_batched_tokens, data.max_prompt_length * rows)
        work = engine_work(shape, size, batched_tokens, rows)

    is_vllm = resolve_engine_name(rollout.name) == "vllm"
    # vLLM allocates its whole cache at once, hf only what the sequences fill
    if not is_vllm:
        cache_bytes = plan.sequences * kv_per_sequence
    parts = {
        "engine: weights": weights,
        "engine: KV cache": cache_bytes,
        ENGINE_STEP: work,
    }
    # the conditions of `lean_decoder`, which does not report the experts that router_replay needs
    is_lean = on_cpu and not is_vllm and not rollout.router_replay and size == FP32
    copies = copied_matrices(shape) if is_lean else 0.0
    if copies:
        parts[ENGINE_COPIES] = copies
    if images:
        parts[ENGINE_IMAGES] = images
    return parts


def _cache_bytes(rollout: RolloutConfig, device: Accelerator, *other_bytes: float) -> float:
    """Returns the bytes that an engine has for its KV cache.

    Args:
        rollout: Options of the engine.
        device: Kind of the device.
        other_bytes: What the engine needs besides the cache.
    """
    if device.name == "cpu":
        return float(rollout.kv_cache_memory_mb << 20)
    # the option is a share for everything that the engine needs, of which the cache gets the rest
    cache_bytes = rollout.gpu_memory_utilization * (device.memory_gib or 0) * GIB
    for size in other_bytes:
        cache_bytes -= size
    return max(0.0, cache_bytes)


# -- rows of a run -----------------------------------------------------------------------------------------------------


def rows_per_step(config: PPOConfig) -> int:
    """Returns the number of answers (agentic runs: episodes) in a training step."""
    if not config.reads_prompts:
        return config.agentic.rollout_batch_size
    return config.data.train_batch_size * config.rollout.n


def mini_batch_prompts(config: PPOConfig, size: int) -> int:
    """Returns the prompts (agentic runs: episodes) of an optimizer step.

    Args:
        config: Options of the run.
        size: The configured size of a mini-batch; -1 means the whole batch.
    """
    prompts_of_step = config.agentic.rollout_batch_size
    if config.reads_prompts:
        prompts_of_step = config.data.train_batch_size
    if size == -1:
        return prompts_of_step
    return min(prompts_of_step, size)


def _prompts_of_device(config: PPOConfig, slots: int) -> int:
    """Returns the prompts of a whole step on one device."""
    prompts_of_step = mini_batch_prompts(config, -1)
    return math.ceil(prompts_of_step / slots)


def distinct_prompts(config: PPOConfig, shape: ModelShape, rows: int, prompts: int) -> int:
    """Returns the largest number of prompts stored for `rows` answers from a mini-batch of `prompts` prompts.

    Answers to one prompt share its tokens in a packed row (`workers.engine.packing`). Without sharing, every answer
    stores its own prompt.
    """
    is_shared = config.model.use_remove_padding and shape.is_packed and not config.is_agentic
    if not is_shared:
        return rows
    return min(rows, prompts)


def has_prompt_trees(data: DataConfig, rows: int, distinct: int) -> bool:
    """Returns True if attention on a CPU has one row per prompt, and no copies of prompts (`PromptTrees`).

    Models with sliding windows, soft caps or sinks still copy prompts; `ModelShape` does not know these, so that their
    plan is too low by the copies.

    Args:
        rows: Answers of a micro-batch, of maximal length.
        distinct: Their different prompts.
    """
    if distinct == rows:
        return False
    answers_per_prompt = math.ceil(rows / distinct)
    longest_tree = data.max_prompt_length + answers_per_prompt * data.max_response_length
    longest_row = data.max_prompt_length + data.max_response_length
    return is_tree_cheaper(distinct, longest_tree, rows * longest_row**2)


# -- the phases of the training engines --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Phase:
    """A phase of a training engine.

    Attributes:
        name: Name of the phase in the plan.
        role: Role of the network that computes.
        parts: Bytes by name, without weights and moments.
        is_update: Whether the optimizer's moments are loaded.
    """

    name: str
    role: str
    parts: Parts
    is_update: bool = False


@dataclass(frozen=True)
class _TrainPhases:
    """The phases of a run's training engines, for rows of maximal length.

    Attributes:
        networks: Networks by role.
        slots: Number of devices.
        plan: Gets the number of micro-batches, and the bytes of offloaded activations.
    """

    config: PPOConfig
    networks: Mapping[str, HeldNetwork]
    slots: int
    plan: MemoryPlan

    def phases(self) -> Iterator[_Phase]:
        """Yields the phases in the order of a step."""
        config = self.config
        actor = self.config.actor
        if "reward model" in self.networks:
            parts = self._forward("reward model", "reward_model")
            yield _Phase("reward model", "reward model", parts)

        if needs_old_log_prob(config):
            topk = distilled_tokens(config) if config.distillation.takes_student_topk else 0
            parts = self._forward("actor", "log_prob", entropy=True, topk=topk)
            yield _Phase("old log-probs", "actor", parts)

        if needs_reference(config):
            # without a network of its own, the reference is the policy with its adapter disabled
            role = "reference" if "reference" in self.networks else "actor"
            parts = self._forward(role, "ref")
            yield _Phase("reference log-probs", role, parts)

        for teacher in config.distillation.named_teachers():
            # a teacher behind a URL is in the memory of its own server
            if teacher.url:
                continue
            name = f"{TEACHER}{teacher.name}"
            topk = distilled_tokens(config)
            if teacher.is_policy:
                parts = self._forward("actor", "log_prob", topk=topk)
                yield _Phase(f"{name}: log-probs", "actor", parts)
            else:
                parts = self._forward(name, "ref", topk=topk)
                yield _Phase(f"{name}: log-probs", name, parts)

        if "critic" in self.networks:
            parts = self._forward("critic", "values")
            yield _Phase("values", "critic", parts)
            size = config.critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
            parts = self._update("critic", "update_critic", size, config.critic.model)
            yield _Phase("critic update", "critic", parts, is_update=True)

        has_entropy = actor.calculate_entropy or actor.entropy_coeff != 0
        parts = self._update("actor", "update_actor", actor.ppo_mini_batch_size, config.model, entropy=has_entropy)
        yield _Phase("update", "actor", parts, is_update=True)

    def _forward(self, role: str, stage: str, *, entropy: bool = False, topk: int = 0) -> Parts:
        """Returns the bytes of a pass without gradients.

        Args:
            role: Role of the network.
            stage: Stage of the step, as `requirements.micro_batching` names it.
            entropy: Whether the entropy is computed.
            topk: Number of most probable tokens that the pass returns at each position.
        """
        config = self.config
        network = self.networks[role]
        rows = rows_per_step(config)
        micro_batch, _ = self._micro_batch(role, stage, rows, config.data.train_batch_size, entropy=entropy)
        parts = forward_only(network, micro_batch)
        if topk:
            parts["top tokens"] = float(TOP_TOKEN_BYTES * topk * micro_batch.predicted)

        # without gradients, a trained tower keeps nothing
        frozen = replace(network, trained=0)
        parts |= tower_parts(frozen, micro_batch, parts)
        if self.plan.base is not None and TOWER in parts:
            parts[KEPT_FREED] = kept_when_freed(parts)
        return parts

    def _update(self, role: str, stage: str, size: int, model: NetworkConfig, *, entropy: bool = False) -> Parts:
        """Returns the bytes of an update. Sets the number of micro-batches of the plan.

        Args:
            role: Role of the network.
            stage: Stage of the step, as `requirements.micro_batching` names it.
            size: Prompts of a mini-batch, as configured.
            model: Options of the network.
            entropy: Whether the entropy is computed.
        """
        config = self.config
        plan = self.plan
        network = self.networks[role]
        prompts = mini_batch_prompts(config, size)
        rows = prompts
        if config.reads_prompts:
            rows *= config.rollout.n
        micro_batch, plan.micro_batches = self._micro_batch(role, stage, rows, prompts, entropy=entropy)

        parts = update_parts(plan, role, network, micro_batch, model)
        # only the policy is distilled
        topk = distilled_tokens(config) if role == "actor" else 0
        if topk:
            parts["distillation"] = float(DISTILLED_TOKEN_BYTES * topk * micro_batch.predicted)
        parts |= tower_parts(network, micro_batch, parts, is_recomputed=model.enable_gradient_checkpointing)
        if plan.base is not None:
            parts[KEPT_FREED] = kept_after_update(parts, network.shape, micro_batch, plan.micro_batches)
        return parts

    def _micro_batch(self, role: str, stage: str, rows: int, prompts: int, *, entropy: bool) -> tuple[Pass, int]:
        """Returns the largest micro-batch and the number of micro-batches.

        The ranks that share each sequence divide the tokens of a micro-batch, whose token budget counts for each of
        them.

        Args:
            role: Role of the network.
            stage: Stage of the step, as `requirements.micro_batching` names it.
            rows: Answers of all devices.
            prompts: Their different prompts.
            entropy: Whether the entropy is computed.
        """
        config = self.config
        data = self.config.data
        network = self.networks[role]
        on_cpu = self.plan.base is not None
        ranks = config.sequence_parallel_size(_section_of(role))
        longest = config.longest_sample

        # the micro-batches of an optimizer step are distributed over groups of ranks that share their sequences
        rows_of_group = max(1, math.ceil(rows * ranks / self.slots))
        limit = requirements.micro_batching(config, stage)
        rows_of_pass = limit.micro_batch_size or 1
        if limit.max_token_len is not None:
            rows_of_pass = max(1, limit.max_token_len * ranks // longest)
        rows_of_pass = min(rows_of_pass, rows_of_group)

        # answers share the tokens of their prompt, but attention on a GPU copies them to each answer
        distinct = distinct_prompts(config, network.shape, rows_of_pass, prompts)
        shared = data.max_prompt_length * (rows_of_pass - distinct)
        copied = shared
        if on_cpu and has_prompt_trees(data, rows_of_pass, distinct):
            copied = 0
        predicted = rows_of_pass * data.max_response_length

        tokens = rows_of_pass * longest - shared
        images = 0
        if network.shape.tower is not None:
            # a plan does not know the images, so all tokens of the prompts are taken for theirs
            images = distinct * data.max_prompt_length
        micro_batch = Pass(
            tokens=math.ceil(tokens / ranks),
            predicted=math.ceil(predicted / ranks),
            # the actor's option also counts for the other networks
            chunk=config.actor.log_prob_chunk_tokens,
            size=network.compute,
            entropy=entropy,
            repeated=math.ceil(copied / ranks),
            ranks=ranks,
            tile=tile_bytes(config.model, on_cpu=on_cpu),
            images=images,
        )
        return micro_batch, math.ceil(rows_of_group / rows_of_pass)


def _section_of(role: str) -> str:
    """Returns the section of the configuration with the options of a role's engine."""
    if role == "reference" or role.startswith(TEACHER):
        return "ref"
    if role == "reward model":
        return "reward_model"
    return role
