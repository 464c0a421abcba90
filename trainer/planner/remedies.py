"""What to change where a run does not fit: each change of keys by itself, with the memory that the device would need.

A change is what a user types; it is applied to a copy of the configuration and planned anew, so that no number here is
a rule of thumb.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.planner.run_memory import MemoryPlan, Networks, longest_row, memory_plan
from trainer.planner.step_time import Accelerator
from trainer.requirements import needs_critic, needs_reference_model
from verl_lite.config import FSDPConfig, PPOConfig
from workers.rollout.base import resolve_engine_name

OF_THE_TRAINING = ("model.lora_rank=", "actor.ppo_mini_batch_size=")
LEAST_SAVED = 0.01  # share of the memory below which a change is not worth a line


@dataclass(frozen=True)
class Remedy:
    """keys: what to type. device_bytes: with it. fits: whether that is enough."""

    keys: tuple[str, ...]
    device_bytes: float
    fits: bool

    @property
    def changes_training(self) -> bool:
        """Whether another model comes of it; the others give the same gradients, up to rounding."""
        return any(key.startswith(OF_THE_TRAINING) for key in self.keys)


def fits(plan: MemoryPlan, memory_bytes: float) -> bool:
    """Whether the device holds it, and nothing else stops it."""
    return plan.device_bytes <= memory_bytes and not plan.notes


def remedies(
    config: PPOConfig, networks: Networks, slots: int, device: Accelerator, memory_bytes: float
) -> list[Remedy]:
    """Each change that saves memory, the most effective first."""
    now = memory_plan(config, networks, slots, device)
    found = []
    for keys in candidates(config, networks, slots, device):
        plan = _planned(config, networks, device, keys)
        saves = plan.device_bytes < (1 - LEAST_SAVED) * now.device_bytes
        if saves or len(plan.notes) < len(now.notes):
            found.append(Remedy(keys, plan.device_bytes, fits(plan, memory_bytes)))
    return sorted(found, key=lambda remedy: remedy.device_bytes)


def together(
    config: PPOConfig, networks: Networks, device: Accelerator, memory_bytes: float, single: list[Remedy]
) -> Remedy | None:
    """Changes that are enough together and none of which can be spared: first those that leave the training and the
    number of devices as they are; None where all are not enough."""
    taken: list[Remedy] = []
    for remedy in sorted(single, key=lambda remedy: (_adds_devices(remedy), remedy.changes_training)):
        if any(_names(remedy) & _names(other) for other in taken):
            continue  # the more effective value of the same key is there
        taken.append(remedy)
        if fits(_planned(config, networks, device, _keys(taken)), memory_bytes):
            break
    else:
        return None
    for remedy in list(reversed(taken)):
        fewer = [other for other in taken if other is not remedy]
        if fits(_planned(config, networks, device, _keys(fewer)), memory_bytes):
            taken = fewer
    return Remedy(_keys(taken), _planned(config, networks, device, _keys(taken)).device_bytes, True)


def _keys(remedies: list[Remedy]) -> tuple[str, ...]:
    return tuple(key for remedy in remedies for key in remedy.keys)


def _names(remedy: Remedy) -> set[str]:
    return {key.partition("=")[0] for key in remedy.keys}


def _adds_devices(remedy: Remedy) -> bool:
    return any(key.startswith("trainer.") for key in remedy.keys)


def candidates(config: PPOConfig, networks: Networks, slots: int, device: Accelerator) -> Iterator[tuple[str, ...]]:
    """What could be changed, as a user would type it."""
    model, rollout, actor = config.model, config.rollout, config.actor
    longest = longest_row(config)
    if not model.enable_gradient_checkpointing:
        yield ("model.enable_gradient_checkpointing=true",)
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu >= 2 * longest:
        yield (f"actor.ppo_max_token_len_per_gpu={max(longest, actor.ppo_max_token_len_per_gpu // 4)}",)
    if not actor.use_dynamic_bsz and (actor.ppo_micro_batch_size_per_gpu or 1) > 1:
        yield ("actor.ppo_micro_batch_size_per_gpu=1",)
    if actor.log_prob_chunk_tokens > 256:
        yield ("actor.log_prob_chunk_tokens=256",)
    if not model.lora_rank:
        yield ("model.lora_rank=32",)
    yield from _of_the_batch(config, slots)
    for name, fsdp in _sharded_roles(config):
        if 0 < fsdp.fsdp_size < slots:
            yield (f"{name}.fsdp_config.fsdp_size=-1",)
        if not fsdp.reshard_after_forward:
            yield (f"{name}.fsdp_config.reshard_after_forward=true",)
        if name in ("actor", "critic") and not fsdp.reduce_every_micro_batch:
            yield (f"{name}.fsdp_config.reduce_every_micro_batch=true",)
        if device.name != "cpu":
            yield from _offloads(name, fsdp.param_offload, fsdp.optimizer_offload, name in ("actor", "critic"))
    if device.name == "cpu":
        if rollout.kv_cache_memory_mb > 64:
            yield (f"rollout.kv_cache_memory_mb={rollout.kv_cache_memory_mb // 2}",)
        return
    if not rollout.free_cache_engine:
        yield ("rollout.free_cache_engine=true",)
    for share in (0.9, 0.8, 0.7, 0.6, 0.4, 0.3):
        yield (f"rollout.gpu_memory_utilization={share}",)
    for size in _parallel_sizes(config, networks):
        yield (f"rollout.tensor_model_parallel_size={size}",)
    yield (f"trainer.nnodes={2 * config.trainer.nnodes}",)


def _of_the_batch(config: PPOConfig, slots: int) -> Iterator[tuple[str, ...]]:
    """A mini-batch that is one micro-batch: its gradients are reduced as they come."""
    actor = config.actor
    if not actor.use_dynamic_bsz:
        return
    rows = max(1, actor.ppo_max_token_len_per_gpu // longest_row(config)) * slots
    prompts = rows // config.rollout.n
    present = config.data.train_batch_size if actor.ppo_mini_batch_size == -1 else actor.ppo_mini_batch_size
    if 1 <= prompts < present:
        yield (f"actor.ppo_mini_batch_size={prompts}",)


def _parallel_sizes(config: PPOConfig, networks: Networks) -> Iterator[int]:
    """Into how many devices of a machine an engine could be split further: vLLM wants whole heads on each."""
    rollout, per_node = config.rollout, config.trainer.n_gpus_per_node or 1
    if resolve_engine_name(rollout.name) != "vllm" or config.is_agentic:
        return
    for size in (2, 4, 8):
        if rollout.tensor_model_parallel_size < size and not per_node % size and not networks.policy.heads % size:
            yield size


def _sharded_roles(config: PPOConfig) -> Iterator[tuple[str, FSDPConfig]]:
    yield "actor", config.actor.fsdp_config
    if needs_reference_model(config):
        yield "ref", config.ref.fsdp_config
    if needs_critic(config):
        yield "critic", config.critic.fsdp_config
    if config.reward_model.enable:
        yield "reward_model", config.reward_model.fsdp_config


def _offloads(name: str, params: bool, optimizer: bool, trains: bool) -> Iterator[tuple[str, ...]]:
    if not params:
        yield (f"{name}.fsdp_config.param_offload=true",)
    if trains and not optimizer:
        yield (f"{name}.fsdp_config.optimizer_offload=true",)
    if trains and not params and not optimizer:
        yield f"{name}.fsdp_config.param_offload=true", f"{name}.fsdp_config.optimizer_offload=true"


def _planned(config: PPOConfig, networks: Networks, device: Accelerator, keys: tuple[str, ...]) -> MemoryPlan:
    """The plan with these keys set."""
    changed = copy.deepcopy(config)
    for key in keys:
        name, _, text = key.partition("=")
        *path, leaf = name.split(".")
        section: Any = changed
        for part in path:
            section = getattr(section, part)
        now = getattr(section, leaf)
        value = text == "true" if isinstance(now, bool) else type(now)(text)
        setattr(section, leaf, value)
    trainer = changed.trainer
    return memory_plan(changed, networks, (trainer.n_gpus_per_node or 1) * trainer.nnodes, device)
