"""Predicts the memory that each phase of a training step needs on one device.

Inputs are the configuration, the shapes of the networks (from config.json only), the number of devices and the kind of
device. The result is a dict of named byte counts for each phase of `workers/phase.py`. On a GPU, components that are
idle in a phase sleep or are offloaded as configured; on a CPU everything stays in memory. The formulas follow the code:
`workers/engine/fsdp.py` (FSDP2: fp32 master weights and moments, frozen weights in the compute dtype, gradients reduced
after the last micro-batch), `workers/policy/causal_lm.py` (logits in tiles), `workers/engine/parameters.py` (buckets)
and `workers/rollout`. Parameters called `size` are bytes per element: 4 for fp32, 2 for bf16. `python -m tests.bench
plan_memory` compares the predictions with a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from trainer import requirements
from trainer.planner.accelerators import Accelerator
from trainer.planner.model_shape import ModelShape, read_shape
from trainer.requirements import (
    distilled_tokens,
    needs_critic,
    needs_old_log_prob,
    needs_reference,
    needs_reference_model,
)
from trainer.resources import VLLM_BYTES, WORKER_BYTES
from verl_lite.config import DataConfig, FSDPConfig, ModelConfig, NetworkConfig, PPOConfig
from verl_lite.device import KEPT_FREED_BYTES
from workers.critic import critic_network
from workers.engine.packing import is_tree_cheaper
from workers.frozen_models import teacher_network
from workers.policy.activations import AHEAD
from workers.rollout.base import resolve_engine_name
from workers.rollout.hf_engine import PACKED_ELEMENTS

GIB = 1 << 30
CONTEXT_GIB = 1.0  # CUDA context and libraries; assumed
FRAGMENTATION = 0.06  # share of the allocated bytes; assumed
BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2}
FP32 = 4
LARGEST_PARTS = 5  # that a plan which does not fit lists
MOMENTS = 2 * FP32  # bytes of AdamW's two moments per trainable parameter
KEPT_LOGITS_BYTES = 32 << 20  # workers.policy.causal_lm keeps logits up to this size for the backward pass
TILE_BYTES = {
    "cpu": 16 << 20,
    "cuda": 96 << 20,
    "cuda, compiled": 240 << 20,
}  # and computes more logits in tiles of this size
KEPT_FREED = "freed, kept by the C library"
WHOLE_GRADIENTS, SHARD = "gradients before their reduction", "gradients, this rank's shard"
TOWER, ENGINE_IMAGES = "vision tower", "engine: images in a step"
ENGINE_STEP, ENGINE_COPIES = "engine: a step", "engine: copies of its matrices"
TEACHER = "teacher "  # prefix of the role of a teacher
TOP_TOKEN = (
    36  # bytes of each of the top tokens at a position: logits and ids of two tiles, their sorted union, results
)
DISTILLED_TOKEN = 60  # bytes of each token of a divergence: ids, 8 fp32 tensors of both distributions, and gradients
GATHERED_LAYERS = 2  # the layer that computes and the next, prefetched layer


@dataclass
class MemoryPlan:
    """The predicted memory of one device.

    Attributes:
        always: Bytes that are allocated in every phase, by name.
        phases: For each phase, its additional bytes by name.
        base: Bytes of a process's libraries on a CPU; None for a GPU, which adds its context and fragmentation.
        host: Bytes in host memory of each rank, by name, for offloaded tensors.
        engine: Bytes on a device of the rollout engines by name, if they have devices of their own.
        sequences: Number of sequences that decode concurrently.
        notes: Problems that stop the run even if the memory is enough.
        images: The assumption about the images of a vision-language model, as a sentence.
    """

    always: dict[str, float]
    phases: dict[str, dict[str, float]]
    base: float | None = None
    host: dict[str, float] = field(default_factory=dict)
    engine: dict[str, float] = field(default_factory=dict)
    sequences: int = 0
    micro_batches: int = 1
    notes: list[str] = field(default_factory=list)
    images: str = ""

    def by_phase(self) -> dict[str, float]:
        """Returns the bytes of tensors in each phase, including `always`."""
        return {name: sum(self.always.values()) + sum(parts.values()) for name, parts in self.phases.items()}

    @property
    def worst(self) -> str:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> float:
        """Bytes of tensors in the worst phase."""
        return self.by_phase()[self.worst]

    @property
    def device_bytes(self) -> float:
        """Memory that the device needs, in bytes."""
        return self._with_base(self.peak)

    @property
    def engine_bytes(self) -> float:
        """Memory that a device of a rollout engine in a separate pool needs, in bytes; 0 without such a pool."""
        return self._with_base(sum(self.engine.values())) if self.engine else 0.0

    def _with_base(self, tensors: float) -> float:
        return tensors * (1 + FRAGMENTATION) + CONTEXT_GIB * GIB if self.base is None else tensors + self.base

    def fits(self, memory_bytes: float) -> bool:
        """Returns True if the plan fits a device with this much memory and has no notes."""
        return max(self.device_bytes, self.engine_bytes) <= memory_bytes and not self.notes

    def _remedies(self) -> Iterator[str]:
        """Yields the largest parts of the worst phase, and for each the options that make it smaller."""
        cache = "rollout.gpu_memory_utilization" if self.base is None else "rollout.kv_cache_memory_mb"
        parts = self.always | self.phases[self.worst]
        for name, size in sorted(parts.items(), key=lambda part: -part[1])[:LARGEST_PARTS]:
            remedies = [_REMEDIES[name]] if name in _REMEDIES else []
            remedies += [text for ending, text in _REMEDIES.items() if ending in name]
            if remedies:
                yield f"  {name:<42}{size / GIB:8.2f}   {remedies[0].format(cache=cache)}"

    def lines(self, device: str, memory_gib: float | None) -> Iterator[str]:
        """Yields the plan as lines of text. memory_gib: memory of one device to compare with; None: no comparison."""
        where = f"device ({device})" if self.base is None else "process"
        yield f"always on each {where} (GiB, calculated)"
        yield from (f"  {name:<42}{value / GIB:8.2f}" for name, value in self.always.items())
        yield f"\n{'additionally in each phase':<44}{'GiB':>8}"
        for name, parts in self.phases.items():
            mark = "*" if name == self.worst else " "
            yield f"{mark} {name:<42}{sum(parts.values()) / GIB:8.2f}   {_listed(parts)}"
        more = f"with {CONTEXT_GIB:g} GiB of context and {FRAGMENTATION:.0%} fragmentation, both assumed"
        if self.base is not None:
            more = f"with {self.base / GIB:.2f} GiB of libraries, measured"
        yield f"\n{'peak of tensors':<44}{self.peak / GIB:8.2f}   in the phase marked *"
        yield f"{f'one {where}':<44}{self.device_bytes / GIB:8.2f}   {more}"
        if self.engine:
            yield f"{'one ' + where + ' of an engine':<44}{self.engine_bytes / GIB:8.2f}   {_listed(self.engine)}"
        if self.host:
            host = sum(self.host.values()) / GIB
            yield f"{'additional host memory of each rank':<44}{host:8.2f}   {_listed(self.host)}"
        if self.sequences:
            yield f"{'concurrently decoded sequences':<44}{self.sequences:8d}   rollout.max_num_seqs and the KV cache"
        if self.images:
            yield self.images
        if memory_gib is not None:
            yield "\n".join(["", *self.notes])
            if self.fits(memory_gib * GIB):
                yield f"fits {memory_gib:.1f} GiB"
            elif self.engine_bytes > memory_gib * GIB:
                yield f"does not fit {memory_gib:.1f} GiB: an engine needs {self.engine_bytes / GIB:.2f}"
            elif self.device_bytes > memory_gib * GIB:
                yield (
                    f"does not fit {memory_gib:.1f} GiB: the phase {self.worst!r} needs {self.device_bytes / GIB:.2f}. "
                    "Its largest parts, and what makes them smaller:"
                )
                yield from self._remedies()
        if self.base is None:
            yield "Calculated from shapes; the formulas were checked on a CPU, and on a GPU only in two small runs."


_REMEDIES = {
    "moments": "model.lora_rank=16 trains an adapter instead of all weights",
    ": weights": "model.lora_rank=16 trains an adapter instead of all weights",
    SHARD: "model.lora_rank=16 trains an adapter instead of all weights",
    WHOLE_GRADIENTS: "actor.fsdp_config.reduce_every_micro_batch=true, or one micro-batch for each mini-batch",
    "kept activations": "model.enable_gradient_checkpointing=true, or a smaller actor.ppo_max_token_len_per_gpu",
    "one layer": "a smaller actor.ppo_max_token_len_per_gpu",
    "logits": "a smaller actor.log_prob_chunk_tokens",
    "KV cache": "a smaller {cache}",
    ENGINE_STEP: "a smaller rollout.max_num_batched_tokens or rollout.max_num_seqs",
    "engine: weights": "a smaller model; several GPUs for an engine (rollout.tensor_model_parallel_size)",
    ENGINE_COPIES: "a smaller model",
    "bucket": "a smaller rollout.update_weights_bucket_megabytes",
}
"""What makes a part of the memory smaller, by the end or another part of its name; the first that is found counts."""


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value / GIB:.2f}" for name, value in parts.items() if value >= 0.005 * GIB)


@dataclass(frozen=True)
class Networks:
    """Shapes of the run's networks; None for a role that the run does not have. teachers: by name, if they have a model
    of their own."""

    policy: ModelShape
    critic: ModelShape | None = None
    reward_model: ModelShape | None = None
    teachers: Mapping[str, ModelShape] = field(default_factory=dict)


def read_networks(config: PPOConfig) -> Networks:
    """Reads the shapes of the run's networks from their config.json files. Raises UserError if one is missing."""
    critic = scorer = None
    if needs_critic(config):
        name = "model.path" if config.critic.model.path is None else "critic.model.path"
        critic = read_shape(critic_network(config), name).as_scorer()
    if config.reward_model.enable:
        scorer = read_shape(config.reward_model.model, "reward_model.model.path").as_scorer()
    policy, most = read_shape(config.model), config.data.max_pixels
    if policy.tower is not None and most is not None:
        policy = replace(policy, tower=replace(policy.tower, largest_image=max(1, most // policy.tower.pixels)))
    teachers = {
        teacher.name: read_shape(teacher_network(config, teacher), f"distillation.teachers.{teacher.name}.path")
        for teacher in config.distillation.named_teachers()
        if teacher.path
    }
    return Networks(policy, critic, scorer, teachers)


def memory_plan(config: PPOConfig, networks: Networks, slots: int, device: Accelerator) -> MemoryPlan:
    """Predicts the memory of a training step on one of `slots` devices."""
    on_cpu = device.name == "cpu"
    is_vllm = resolve_engine_name(config.rollout.name) == "vllm"
    libraries = float(VLLM_BYTES * is_vllm)  # of the engine, on a CPU
    plan = MemoryPlan({}, {}, WORKER_BYTES + libraries * config.hybrid_engine if on_cpu else None)
    held = dict(_held_networks(config, networks, slots, device))
    weights, moments = place_networks(plan, held, on_cpu)
    if (tower := networks.policy.tower) is not None:
        longest, whole = config.data.max_prompt_length, mini_batch_prompts(config, -1)
        images = tower.pixel_bytes(longest * math.ceil(whole / slots), held["actor"].compute)
        (plan.always if on_cpu else plan.host)["images of the batch"] = images
        plan.images = (
            f"assumed: all {longest} tokens of a prompt (data.max_prompt_length) are images, which have "
            f"{longest * tower.per_token} patches; with fewer or smaller images it is less"
        )
    if config.distillation.is_active:
        values = max(1, 2 * distilled_tokens(config)) * config.data.max_response_length  # log-probs, and token ids
        columns = float(FP32 * values * math.ceil(rows_per_step(config) / slots))
        (plan.always if on_cpu else plan.host)["log-probs of the teachers"] = columns
    rollout = _rollout_parts(config, networks.policy, device, plan, slots)
    if config.hybrid_engine:
        plan.phases["rollout"] = rollout
    held_by_engine = _held_by_idle_engine(config, rollout, on_cpu, is_vllm)
    for name, role, parts in _train_phases(config, held, slots, plan):
        brought = weights[role] | (moments[role] if name.endswith("update") else {})
        plan.phases[name] = {**held_by_engine, **brought, **parts}
    awake = {"engine: weights": rollout["engine: weights"]} | held_by_engine if config.hybrid_engine else {}
    awake.pop(ENGINE_STEP, None)
    awake.pop(ENGINE_COPIES, None)  # of the weights that are replaced
    bucket_bytes = config.rollout.bucket_megabytes(on_cpu) << 20
    bucket = sync_bytes(held["actor"], bucket_bytes, on_cpu=on_cpu)
    plan.phases["weight sync"] = awake | weights["actor"] | {"bucket": bucket}
    if not config.hybrid_engine:
        sent = float(held["actor"].compute * networks.policy.parameters)
        plan.engine = rollout | {"bucket": min(sent, float(bucket_bytes))}
        plan.engine |= {"libraries of the engine": libraries} if on_cpu else {}
    return plan


def _held_by_idle_engine(
    config: PPOConfig, rollout: Mapping[str, float], on_cpu: bool, is_vllm: bool
) -> dict[str, float]:
    """Returns the parts of a rollout engine's memory that it keeps while networks compute on the same device."""
    if not config.hybrid_engine:
        return {}
    if config.rollout.free_cache_engine and not on_cpu:
        return {}
    held = {name: size for name, size in rollout.items() if name != ENGINE_IMAGES}
    if not is_vllm:  # vLLM keeps the buffers of its step
        held.pop(ENGINE_STEP)
    if config.rollout.free_cache_engine:
        held.pop(ENGINE_COPIES, None)
    return held


def place_networks(
    plan: MemoryPlan, held: Mapping[str, HeldNetwork], on_cpu: bool
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Adds the weights and moments of networks to the plan. Returns the offloaded weights, which are loaded for all
    phases of a role, and the offloaded moments, which are loaded only for its update, by role."""
    weights: dict[str, dict[str, float]] = {role: {} for role in held}
    moments: dict[str, dict[str, float]] = {role: {} for role in held}
    for role, network in held.items():
        for name, size, is_offloaded, moved in (
            ("weights", network.weights, network.fsdp.param_offload, weights),
            (f"{network.optimizer}'s moments", network.moments, network.fsdp.optimizer_offload, moments),
        ):
            if size and is_offloaded and not on_cpu:
                plan.host[f"{role}: {name}"] = moved[role][f"{name}, from the host"] = size
            elif size:
                plan.always[f"{role}: {name}"] = size
    return weights, moments


# -- networks, rows and phases of a run --------------------------------------------------------------------------------


_COUNTED: dict[str, int] = {}  # sizes of adapters that `trained_parameters` counted


def trained_parameters(model: NetworkConfig, shape: ModelShape, *, freezes_tower: bool) -> tuple[int, int]:
    """Returns the network's number of trainable parameters and, of these, the number in its LoRA adapter."""
    if not isinstance(model, ModelConfig) or not model.lora_rank:
        frozen = shape.tower.parameters if shape.tower is not None and freezes_tower else 0
        return shape.parameters - frozen, 0
    if list(model.target_modules) == ["all-linear"] and not model.exclude_modules:
        adapter = shape.adapter_parameters(model.lora_rank)
    else:
        from workers.policy.loading import count_trained

        key = repr((model.path, model.lora_rank, model.target_modules, model.exclude_modules, model.override_config))
        if key not in _COUNTED:
            _COUNTED[key] = count_trained(model)
        adapter = _COUNTED[key]
    return adapter, adapter


def compute_size(name: str, device: Accelerator) -> int:
    """Returns the bytes per element for a dtype option; `auto` selects the device's default."""
    return BYTES.get(name, device.size)


def ranks_of_a_copy(fsdp: FSDPConfig, slots: int) -> int:
    """Returns the number of devices that share one copy of the weights."""
    return slots if fsdp.fsdp_size is None or fsdp.fsdp_size < 1 else min(fsdp.fsdp_size, slots)


def recomputed_layers(model: NetworkConfig, shape: ModelShape) -> int:
    """Returns the number of layers that gradient checkpointing recomputes."""
    if not model.enable_gradient_checkpointing:
        return 0
    given = model.gradient_checkpointing_layers
    return shape.layers if given is None else min(given, shape.layers)


def held_network(
    slots: int,
    device: Accelerator,
    shape: ModelShape,
    fsdp: FSDPConfig,
    trained: int = 0,
    adapter: int = 0,
    optimizer: str = "adamw",
) -> HeldNetwork:
    """Returns a network in an FSDP engine with these options. trained, adapter: see `HeldNetwork`."""
    compute, reduce = (
        compute_size(name, device) for name in (fsdp.mixed_precision.param_dtype, fsdp.mixed_precision.reduce_dtype)
    )
    matrices = (adapter or shape.matrix_parameters) if optimizer == "muon" else 0
    return HeldNetwork(shape, ranks_of_a_copy(fsdp, slots), compute, reduce, trained, adapter, fsdp, matrices)


def _held_networks(
    config: PPOConfig, networks: Networks, slots: int, device: Accelerator
) -> Iterator[tuple[str, HeldNetwork]]:
    """Yields the role and the network of each FSDP engine in the run."""
    held, actor = partial(held_network, slots, device), config.actor
    trained = trained_parameters(config.model, networks.policy, freezes_tower=actor.freeze_vision_tower)
    yield "actor", held(networks.policy, actor.fsdp_config, *trained, actor.optim.optimizer)
    if needs_reference_model(config):
        yield "reference", held(networks.policy, config.ref.fsdp_config)
    for name, shape in networks.teachers.items():
        yield f"{TEACHER}{name}", held(shape, config.ref.fsdp_config)
    if networks.critic is not None:
        frozen = 0 if networks.critic.tower is None else networks.critic.tower.parameters  # also in the critic
        trained = networks.critic.parameters - frozen, 0
        yield "critic", held(networks.critic, config.critic.fsdp_config, *trained, config.critic.optim.optimizer)
    if networks.reward_model is not None:
        yield "reward model", held(networks.reward_model, config.reward_model.fsdp_config)


def _rollout_parts(
    config: PPOConfig, shape: ModelShape, device: Accelerator, plan: MemoryPlan, slots: int
) -> dict[str, float]:
    """Returns the bytes of the rollout engine by name. Also sets plan.sequences."""
    rollout, data, on_cpu = config.rollout, config.data, device.name == "cpu"
    size, parallel = compute_size(rollout.dtype, device), rollout.tensor_model_parallel_size
    context = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    weights = size * shape.parameters / parallel
    kv_per_sequence = kv_bytes_per_token(shape, size, parallel) * context
    work = engine_work(shape, size, rollout.max_num_batched_tokens, rollout.max_num_seqs, parallel)
    images = 0.0
    if (tower := shape.tower) is not None:  # equal prompts are prefilled once
        at_once = data.max_prompt_length * math.ceil(mini_batch_prompts(config, -1) / slots)
        images = tower.prefill_bytes(min(rollout.max_num_batched_tokens, at_once), size)
    key, budget = "kv_cache_memory_mb", float(rollout.kv_cache_memory_mb << 20)
    if not on_cpu:
        key = "gpu_memory_utilization"
        budget = rollout.gpu_memory_utilization * (device.memory_gib or 0) * GIB - weights - work - images
    plan.sequences = min(rollout.max_num_seqs, max(0, int(budget // kv_per_sequence)))
    if plan.sequences < 1:
        plan.notes.append(
            f"rollout.{key}={getattr(rollout, key)}: leaves {max(0.0, budget) / GIB:.2f} GiB for the KV cache, but one "
            f"sequence of {context} tokens needs {kv_per_sequence / GIB:.2f}"
        )
    if on_cpu:  # an engine step has at most the rows and tokens of one device's part of the batch
        rows = max(1, min(plan.sequences, math.ceil(rows_per_step(config) / slots)))
        work = engine_work(shape, size, min(rollout.max_num_batched_tokens, data.max_prompt_length * rows), rows)
    is_vllm = resolve_engine_name(rollout.name) == "vllm"
    kv = max(0.0, budget) if is_vllm else plan.sequences * kv_per_sequence
    parts = {"engine: weights": weights, "engine: KV cache": kv, ENGINE_STEP: work}
    if on_cpu and not is_vllm and not rollout.router_replay and size == FP32:
        copies = copied_matrices(shape)
        parts |= {ENGINE_COPIES: copies} if copies else {}
    return parts | ({ENGINE_IMAGES: images} if images else {})


def rows_per_step(config: PPOConfig) -> int:
    """Returns the number of answers (agentic runs: episodes) in a training step."""
    if not config.reads_prompts:
        return config.agentic.rollout_batch_size
    return config.data.train_batch_size * config.rollout.n


def mini_batch_prompts(config: PPOConfig, size: int) -> int:
    """Returns the prompts (agentic runs: episodes) of an optimizer step. size: as configured; -1: the whole batch."""
    whole = config.data.train_batch_size if config.reads_prompts else config.agentic.rollout_batch_size
    return whole if size == -1 else min(whole, size)


def distinct_prompts(config: PPOConfig, shape: ModelShape, rows: int, prompts: int) -> int:
    """Returns the largest number of prompts stored for `rows` answers from a mini-batch of `prompts` prompts.

    Answers to one prompt share its tokens in a packed row (`workers.engine.packing`). Without sharing, every answer
    stores its own prompt.
    """
    is_shared = config.model.use_remove_padding and shape.is_packed and not config.is_agentic
    return min(rows, prompts) if is_shared else rows


def has_prompt_trees(data: DataConfig, rows: int, distinct: int) -> bool:
    """Returns True if attention on a CPU has one row per prompt, and no copies of prompts (`PromptTrees`).

    Args:
        rows: Answers of a micro-batch, of maximal length.
        distinct: Their different prompts.
    """
    if distinct == rows:
        return False
    answers = math.ceil(rows / distinct)
    longest = data.max_prompt_length + answers * data.max_response_length
    return is_tree_cheaper(distinct, longest, rows * (data.max_prompt_length + data.max_response_length) ** 2)


def _train_phases(
    config: PPOConfig, networks: dict[str, HeldNetwork], slots: int, plan: MemoryPlan
) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yields the name, role and bytes by name of each phase of the training engines, for rows of maximal length.

    The ranks that share each sequence divide the tokens of a micro-batch, whose token budget counts for each of them.
    """
    data, actor, critic = config.data, config.actor, config.critic
    longest = data.max_prompt_length + data.max_response_length

    def micro_batch(role: str, stage: str, rows: int, prompts: int, entropy: bool) -> tuple[HeldNetwork, Pass, int]:
        """Returns the network, one micro-batch, and the number of micro-batches for all devices' `rows`."""
        cut = requirements.micro_batching(config, stage)
        sections = {"reference": "ref", "reward model": "reward_model"}
        section = "ref" if role.startswith(TEACHER) else sections.get(role, role)
        ranks = config.sequence_parallel_size(section)
        rows = max(1, math.ceil(rows * ranks / slots))
        together = cut.micro_batch_size or 1
        if cut.max_token_len is not None:
            together = max(1, cut.max_token_len * ranks // longest)
        together = min(together, rows)
        distinct = distinct_prompts(config, networks[role].shape, together, prompts)
        shared = data.max_prompt_length * (together - distinct)
        copied = shared
        if plan.base is not None and has_prompt_trees(data, together, distinct):
            copied = 0
        tokens, predicted = together * longest - shared, together * data.max_response_length
        tokens, predicted, copied = (math.ceil(each / ranks) for each in (tokens, predicted, copied))
        tile = TILE_BYTES["cpu" if plan.base is not None else "cuda, compiled" if config.model.compile else "cuda"]
        chunk, size = actor.log_prob_chunk_tokens, networks[role].compute
        images = 0 if networks[role].shape.tower is None else distinct * data.max_prompt_length
        run = Pass(tokens, predicted, chunk, size, entropy, copied, ranks, tile, images)
        return networks[role], run, math.ceil(rows / together)

    def forward(role: str, stage: str, entropy: bool = False, topk: int = 0) -> dict[str, float]:
        network, run, _ = micro_batch(role, stage, rows_per_step(config), data.train_batch_size, entropy)
        parts = forward_only(network, run)
        if topk:
            parts["top tokens"] = float(TOP_TOKEN * topk * run.predicted)
        parts |= tower_parts(replace(network, trained=0), run, parts)
        return parts | ({KEPT_FREED: kept_when_freed(parts)} if plan.base is not None and TOWER in parts else {})

    def update(role: str, stage: str, size: int, entropy: bool, model: NetworkConfig) -> dict[str, float]:
        prompts = mini_batch_prompts(config, size)
        mini = prompts * config.rollout.n if config.reads_prompts else prompts
        network, run, plan.micro_batches = micro_batch(role, stage, mini, prompts, entropy)
        recomputed = recomputed_layers(model, network.shape)
        offload = model.enable_activation_offload and plan.base is None
        if offload:
            plan.host[f"{role}: activations"] = kept_activations(network, run, recomputed)
        parts = training_pass(network, run, plan.micro_batches, recomputed=recomputed, offload=offload)
        if role == "actor" and (topk := distilled_tokens(config)):
            parts["distillation"] = float(DISTILLED_TOKEN * topk * run.predicted)
        parts |= tower_parts(network, run, parts, is_recomputed=model.enable_gradient_checkpointing)
        kept = {} if plan.base is None else {KEPT_FREED: kept_when_freed(parts)}
        return parts | kept

    if "reward model" in networks:
        yield "reward model", "reward model", forward("reward model", "reward_model")
    if needs_old_log_prob(config):
        topk = distilled_tokens(config) if config.distillation.takes_student_topk else 0
        yield "old log-probs", "actor", forward("actor", "log_prob", entropy=True, topk=topk)
    if needs_reference(config):
        role = "reference" if "reference" in networks else "actor"
        yield "reference log-probs", role, forward(role, "ref")
    for teacher in config.distillation.named_teachers():
        if not teacher.url:
            role, stage = ("actor", "log_prob") if teacher.is_policy else (f"{TEACHER}{teacher.name}", "ref")
            yield f"{TEACHER}{teacher.name}: log-probs", role, forward(role, stage, topk=distilled_tokens(config))
    if "critic" in networks:
        yield "values", "critic", forward("critic", "values")
        size = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
        yield "critic update", "critic", update("critic", "update_critic", size, False, critic.model)
    entropy = actor.calculate_entropy or actor.entropy_coeff != 0
    yield "update", "actor", update("actor", "update_actor", actor.ppo_mini_batch_size, entropy, config.model)


# -- a network on one device -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldNetwork:
    """A network in an FSDP engine.

    ranks: number of ranks that share one copy. compute, reduce: bytes per element in passes and in the reduction of
    gradients. trained: number of trainable parameters (all, all but those of a vision tower, those of the adapter, or 0
    for a frozen network). adapter: number of adapter parameters. matrices: number of parameters that Muon updates.
    """

    shape: ModelShape
    ranks: int
    compute: int
    reduce: int = FP32
    trained: int = 0
    adapter: int = 0
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    matrices: int = 0

    @property
    def trains_tower(self) -> bool:
        """True if the network has a vision tower and all its parameters are trained."""
        return self.shape.tower is not None and self.trained == self.shape.parameters

    @property
    def weights(self) -> float:
        """Bytes of this rank's weights: fp32 if all are trained, else the compute dtype plus an fp32 adapter."""
        size = FP32 if self.trained and not self.adapter else self.compute
        return (size * self.shape.parameters + FP32 * self.adapter) / self.ranks

    @property
    def moments(self) -> float:
        """Bytes of this rank's shard of AdamW's two moments, or Muon's one moment."""
        return (MOMENTS * self.trained - FP32 * self.matrices) / self.ranks

    @property
    def optimizer(self) -> str:
        """Name of the optimizer in a plan."""
        return "Muon" if self.matrices else "AdamW"

    @property
    def gathered(self) -> float:
        """Bytes gathered in a pass: the root (embedding, output layer) and two layers, or all layers."""
        shape, layers = self.shape, GATHERED_LAYERS if self.fsdp.reshard_after_forward else self.shape.layers
        per_layer = self.compute * shape.layer_parameters + FP32 * self.adapter / shape.layers
        root = shape.root_parameters + (0 if shape.tower is None else shape.tower.root_parameters)
        return self.compute * root + min(layers, shape.layers) * per_layer

    def gradients(self, micro_batches: int) -> tuple[float, float]:
        """Returns the bytes of unreduced gradients and of this rank's fp32 shard of reduced gradients.

        With several micro-batches, full gradients accumulate on every rank in the dtype of the reduction. The shard
        then replaces them layer by layer, so only the bytes that it needs beyond them count. With one micro-batch, or
        if every micro-batch is reduced, only gradients of the root and of two layers exist at the same time.
        """
        shape, shard = self.shape, FP32 * self.trained / self.ranks
        if micro_batches > 1 and not self.fsdp.reduce_every_micro_batch:
            whole = float(self.reduce * self.trained)
            return whole, max(0.0, shard - whole)
        if self.adapter or not self.trained:
            return 2.0 * FP32 * self.adapter * GATHERED_LAYERS / shape.layers, shard
        parts = shape.root_parameters + min(GATHERED_LAYERS, shape.layers) * shape.layer_parameters
        if shape.tower is not None and self.trains_tower:
            parts += shape.tower.root_parameters
        return float((self.compute + self.reduce) * parts), shard


# -- a pass ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """The size of one micro-batch. tokens: length of the packed row. predicted: tokens whose log-probs are computed.
    chunk: maximum tokens of a tile of logits. size: bytes per element. repeated: additional tokens in attention, where
    each answer has its own copy of a prompt that is shared in all other layers. ranks: number that shares each
    sequence; the numbers of tokens are one rank's part. tile: maximum bytes of a tile. images: tokens of images."""

    tokens: int
    predicted: int
    chunk: int
    size: int
    entropy: bool = False
    repeated: int = 0
    ranks: int = 1
    tile: int = TILE_BYTES["cuda"]
    images: int = 0


def layer_activations(shape: ModelShape, run: Pass, *, has_adapter: bool = False) -> float:
    """Returns the bytes that one layer keeps for its backward pass: the fp32 inputs of both norms with their normalized
    and scaled results, the query, key, value and output of the attention, and the gate, activation, up projection and
    product of the MLP. An fp32 adapter on bf16 weights also keeps an fp32 copy of each linear layer's input."""
    size, hidden, query, inner = run.size, shape.hidden, shape.query, shape.active_inner
    kv = shape.kv * max(1, run.ranks // shape.kv_heads)  # more ranks than heads repeat heads
    norms = 2 * _norm(hidden, size) + shape.head_norms * (_norm(query, size) + _norm(kv, size))
    attention = size * (3 * query + 2 * kv)
    repeated = size * (2 * query + 2 * kv) * run.repeated + (size * query * run.tokens if run.repeated else 0)
    copies = FP32 * (3 * hidden + query + 2 * hidden + inner) if has_adapter and size != FP32 else 0
    return run.tokens * float(norms + attention + size * 4 * inner + copies) + repeated


def _norm(width: int, size: int) -> int:
    """Returns the bytes per token that a norm keeps: its fp32 input, the normalized input, and the scaled result."""
    return (FP32 + 2 * size) * width


def layer_work(shape: ModelShape, run: Pass) -> float:
    """Returns the temporary bytes of a layer's forward: residual, its norm, and the larger of attention and MLP."""
    attention = 3 * shape.query + 4 * shape.kv
    return run.tokens * float(run.size * (3 * shape.hidden + max(attention, 3 * shape.active_inner)))


def logits_bytes(shape: ModelShape, run: Pass) -> float:
    """Returns the bytes of one tile of fp32 logits."""
    if not shape.has_head:
        return 0.0
    whole = run.predicted * shape.vocab * FP32
    return float(whole if whole <= KEPT_LOGITS_BYTES else min(FP32 * shape.vocab * run.chunk, run.tile, whole))


def output_layer_bytes(shape: ModelShape, run: Pass, *, trains: bool) -> float:
    """Returns the peak bytes of tiles of logits: the tile, its exponentials or the previous tile, and in training the
    larger of the entropy's terms and a copy in the compute dtype if that is not fp32."""
    more = max(float(run.entropy), (run.size != FP32) / 2) if trains else 0.0
    return (2 + more) * logits_bytes(shape, run)


def forward_only(network: HeldNetwork, run: Pass) -> dict[str, float]:
    """Returns the peak bytes of a pass without gradients by name, in addition to the engine's shards."""
    shape = network.shape
    return {
        "gathered weights": network.gathered,
        "activations": layer_work(shape, run) + run.size * run.tokens * shape.hidden,
        "logits": output_layer_bytes(shape, run, trains=False),
    }


def kept_activations(network: HeldNetwork, run: Pass, recomputed: int) -> float:
    """Returns the bytes that the layers keep for the backward pass: the inputs of the `recomputed` layers, and all
    activations of the others."""
    shape = network.shape
    layer = layer_activations(shape, run, has_adapter=bool(network.adapter))
    return recomputed * float(run.size * run.tokens * shape.hidden) + (shape.layers - recomputed) * layer


def training_pass(
    network: HeldNetwork, run: Pass, micro_batches: int, *, recomputed: int, offload: bool = False
) -> dict[str, float]:
    """Returns the peak bytes of forward and backward of one micro-batch by name, in addition to the engine's shards.

    The peak occurs either where the backward pass begins, at the output layer (all activations, the logits and the
    layer's gradient), or where it ends, at the embedding (the gradients of embedding and output layer, one layer, and
    this rank's shard of all gradients). Between the two, each layer frees its activations and adds its shard, so that
    no other moment needs more.

    recomputed: number of layers with gradient checkpointing. offload: kept activations are on the host, except for the
    tensors that `workers.policy.activations` leaves or brings back ahead of their use.
    """
    shape, has_adapter = network.shape, bool(network.adapter)
    layer = layer_activations(shape, run, has_adapter=has_adapter)
    hidden = float(run.size * run.tokens * shape.hidden)
    kept = kept_activations(network, run, recomputed)
    if offload:
        all_recomputed = recomputed == shape.layers
        width = (AHEAD + 1) * shape.hidden if all_recomputed else 2 * AHEAD * max(shape.hidden, shape.active_inner)
        kept = min(kept, float(run.size * run.tokens * width))
    last_norm = float(run.tokens * _norm(shape.hidden, run.size))

    # a recomputed layer takes the place of a later one that kept its activations and is done
    again = layer if recomputed and (offload or recomputed == shape.layers) else 0.0
    temporary = run.tokens * float(run.size * 3 * shape.active_inner) + 2 * hidden
    work = again + temporary
    head_gradient = float(run.size * shape.embedding) if network.trained and not has_adapter and shape.has_head else 0.0
    at_head = (
        output_layer_bytes(shape, run, trains=True) + head_gradient + (FP32 + run.size) * run.predicted * shape.hidden
    )

    before, shard = network.gradients(micro_batches)
    of_earlier_micro_batches = micro_batches > 1
    at_start = {
        "gathered weights": network.gathered,
        WHOLE_GRADIENTS: before if of_earlier_micro_batches else 0.0,
        "kept activations": kept + last_norm,
        "logits and output layer" if at_head > work else "one layer": max(at_head, work),
        SHARD: shard if of_earlier_micro_batches else 0.0,
    }
    # offload brings back a part of the first layer at a time, unless that layer is recomputed as a whole
    first_layer = kept if offload and not recomputed else layer
    at_end = {
        "gathered weights": network.gathered,
        WHOLE_GRADIENTS: before,
        "kept activations": hidden,
        "one layer": first_layer + temporary,
        SHARD: shard,
    }
    return max(at_start, at_end, key=lambda moment: sum(moment.values()))


def tower_parts(
    network: HeldNetwork, run: Pass, parts: Mapping[str, float], *, is_recomputed: bool = False
) -> dict[str, float]:
    """Returns the bytes by name that a vision tower adds to the `parts` of a pass.

    The tower runs first: at that time none of the later activations and logits exist, and in a backward pass they are
    freed. Its temporary tensors need additional memory only where they exceed those.

    is_recomputed: True if the blocks of a trained tower are recomputed.
    """
    if (tower := network.shape.tower) is None:
        return {}
    kept, work = tower.feature_bytes(run.images, run.size), tower.work_bytes(run.images, run.size)
    if network.trains_tower:
        kept += tower.kept_bytes(run.images, run.size, is_recomputed=is_recomputed)
        work = max(work, is_recomputed * tower.block_bytes(run.images, run.size))
    later = sum(size for name, size in parts.items() if name not in ("gathered weights", WHOLE_GRADIENTS, SHARD))
    return {"pixels": tower.pixel_bytes(run.images, run.size), TOWER: kept + max(0.0, work - later)}


def kept_when_freed(parts: Mapping[str, float]) -> float:
    """Returns the freed bytes that the C library keeps on a CPU (`verl_lite.device.release_freed_memory`).

    Tensors of the next layer or micro-batch often do not fit into the gaps that others have left. Measured: the heap
    takes about the temporary bytes of a backward pass a second time, unless they are given back.
    """
    temporary = sum(size for name, size in parts.items() if name != SHARD)
    return min(float(KEPT_FREED_BYTES), temporary)


# -- rollout and sync --------------------------------------------------------------------------------------------------


def kv_bytes_per_token(shape: ModelShape, size: int, tensor_parallel: int = 1) -> float:
    """Returns the KV cache bytes per token on one of the devices of an engine."""
    return size * shape.kv_per_token / min(tensor_parallel, shape.kv_heads)  # more devices than heads repeat heads


def engine_work(shape: ModelShape, size: int, batched_tokens: int, sequences: int, tensor_parallel: int = 1) -> float:
    """Returns the temporary bytes of a step of the rollout engine: of a prefill with batched_tokens tokens, or of the
    fp32 logits of all running sequences with the tensors that sampling derives from them."""
    run = Pass(batched_tokens, 0, 1, size)
    prefill = layer_work(shape, run) / tensor_parallel
    return max(prefill, 4.0 * FP32 * sequences * shape.vocab)


def copied_matrices(shape: ModelShape) -> float:
    """Returns the bytes of the matrices that the hf engine keeps a second time while it decodes in fp32 on a CPU."""
    large = [elements for elements in shape.projections if elements >= PACKED_ELEMENTS]
    return float(FP32 * sum(large)) if shape.is_lean else 0.0


def sync_bytes(network: HeldNetwork, bucket_bytes: int, *, on_cpu: bool = False) -> float:
    """Returns the bytes of weights gathered for the rollout engine.

    A bucket is gathered from this rank's part of it; gloo, on a CPU, fills a copy of the bucket first. Then one tensor
    after the other is copied out of the bucket. A single rank passes its own tensors, and converts them one at a time
    if the dtype differs.
    """
    shape = network.shape
    largest = float(network.compute * max(shape.embedding, shape.layer_parameters))
    if network.ranks == 1:
        return 0.0 if network.compute == FP32 or network.adapter else largest
    whole = min(float(network.compute * shape.parameters), max(float(bucket_bytes), largest))
    gathering = whole * (1 + on_cpu + 1 / network.ranks)
    copying = whole + largest
    return max(gathering, copying) + FP32 * network.adapter
